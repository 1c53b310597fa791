"""The embedded demo: a tiny model, its tokenizer, a small verifiable problem and reward, built without a network."""

"""The embedded demo: a tiny model, its tokenizer, a small verifiable problem and reward, built without a network."""

EMBEDDED = "letters"  # the demo's name, as `--demo` takes it

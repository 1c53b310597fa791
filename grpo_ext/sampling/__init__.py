"""What samples completions: this trainer's own keyed decoding, and engines."""

"""Log-probabilities of completions: packed or padded forwards, attention, language-model head, reference model."""

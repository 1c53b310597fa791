"""One optimizer step: its plan, counts, losses, gradients and log values."""

"""Keeping a run: checkpoints, state, fingerprint, interrupts, log."""

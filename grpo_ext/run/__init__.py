"""Keeping a run: checkpoints, state, fingerprint, manifest, interrupts, log."""

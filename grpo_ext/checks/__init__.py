"""Refusals before training: models and data that cannot be trained on, or whose update depends on the split."""

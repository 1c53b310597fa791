"""Reward functions: found by name, called by chunks, checked."""

"""Reward functions: resolved by name, called by chunks, checked."""

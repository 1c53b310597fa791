"""The mathematics and the planning of grpo_ext: pure functions, no collectives, no trainer state."""

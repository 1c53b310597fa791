"""What a run means: advantages, losses, which groups are trained on, random numbers. Pure: torch and numbers."""

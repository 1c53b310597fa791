"""What people run beside training: the command line `grpo-ext`, the console, the report. Not the tools of a model."""

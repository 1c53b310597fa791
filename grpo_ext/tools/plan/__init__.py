"""`grpo-ext plan`: sizes and memory of a run, before anything is started."""

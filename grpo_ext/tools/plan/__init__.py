"""`grpo-ext plan`: sizes, balance between processes and memory of a run, before anything is started."""

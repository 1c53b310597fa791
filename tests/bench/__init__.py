"""`make bench`: seconds and memory of a step, beside stock TRL, on the reference shapes."""

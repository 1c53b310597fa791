"""`grpo-ext check`: train the same run on several hardware splits and compare what was learned."""

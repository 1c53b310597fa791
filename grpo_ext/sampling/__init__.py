"""From prompts to the rollout batch: keyed sampling, vLLM seeds, rounds of dynamic sampling."""

"""Rollouts: transcripts that grow turn by turn on one process, and the join that makes a rollout batch of them."""

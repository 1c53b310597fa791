"""Repairs of faults in TRL, transformers, PEFT and Accelerate, whatever the split; docs/upstream.md reports each.

Where a report has a script, `make test-full` fails beside a version that no longer needs the repair.
"""

"""Repairs of faults in TRL, transformers, PEFT and Accelerate, whatever the split; docs/upstream.md reports each.

tests/unit/upstream/test_reports.py fails with a version that no longer needs one.
"""

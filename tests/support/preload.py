"""Imported once by the fork server of tests.support.forks: what a run imports, now or in its course."""

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util

import matplotlib.figure  # noqa: F401  the report of a run that has ended

import grpo_ext
import grpo_ext.run.fingerprint
import tests.support.cases
import tests.support.forks
import tests.support.kills
import tests.support.worker  # noqa: F401
from tests.support.spared import spare

assert grpo_ext.GRPOConfig
assert grpo_ext.GRPOTrainer
if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed  # noqa: F401  Accelerate looks into it as soon as it is installed
for kind in ("gpt2", "llama", "qwen2", "qwen2_moe"):  # those of nearly all launches (tests.support.tiny)
    importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
with contextlib.suppress(ImportError):  # of other versions of transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen2")  # compiles hundreds of patterns when it is first called

importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # as in tests/conftest.py
importlib.metadata.version = functools.cache(importlib.metadata.version)
spare()
gc.collect()
gc.freeze()  # Accelerate collects garbage whenever a run begins; also, pages that are shared stay shared

"""Where the tests of tests/gpu run: on CUDA, or with GRPO_EXT_TOY=1 at toy size on the CPU, to rehearse them."""

from __future__ import annotations

import os

import pytest
import torch

TOY = os.environ.get("GRPO_EXT_TOY") == "1"
DEVICE = "cpu" if TOY else "cuda"
needs_gpu = pytest.mark.skipif(
    not TOY and not torch.cuda.is_available(), reason="needs a CUDA device (GRPO_EXT_TOY=1 rehearses on the CPU)"
)

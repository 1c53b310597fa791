"""Where the tests of tests/gpu run: on CUDA, or with GRPO_EXT_TOY=1 at toy size on the CPU, to rehearse them."""

import os

import pytest
import torch

TOY = os.environ.get("GRPO_EXT_TOY") == "1"
DEVICE = "cpu" if TOY else "cuda"
needs_gpu = pytest.mark.skipif(
    not TOY and not torch.cuda.is_available(), reason="needs a CUDA device (GRPO_EXT_TOY=1 rehearses on the CPU)"
)
# the parts of a run that are tests, each in a process of its own: a fault of CUDA ends what follows it there. A test
# belongs to the first part whose text is in its name, so that none is in two parts, or in none
TEST_PARTS = {
    "flex attention": "flex_attention",
    "matrix": "test_matrix_on_gpu",
    "head": "test_head_on_gpu",
    "kernels": "test_packs_on_gpu",
    "dropout": "test_dropout_on_gpu",
    "sampling": "test_sampling_on_gpu",
    "bits": "same_bits",
    "training": "",
}


def part_of(test: str) -> str:
    """The part that runs this test."""
    return next(part for part, text in TEST_PARTS.items() if text in test)

"""Remarks that nobody can act on are kept off the console, one by one, and everything is put back."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path

import pytest

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.runtime.quiet import quiet
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer

BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
REMARKS = [
    (BITSANDBYTES, "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'. ..."),
    ("DeepSpeed", "Setting ds_accelerator to cpu (auto detect)"),
]


@pytest.mark.parametrize(("name", "text"), REMARKS)
def test_the_remarks_of_libraries_are_dropped_inside_and_nothing_else(caplog, name, text):
    logger = logging.getLogger(name)
    before = list(logger.filters)
    with quiet(), quiet():
        logger.error(text)  # whatever level its logger has by now
        logger.error("weights are gone")
    assert [record.message for record in caplog.records] == ["weights are gone"]
    logger.error(text)
    assert caplog.records[-1].message == text
    assert logger.filters == before


def test_the_remark_of_bitsandbytes_is_still_its_own():
    """Otherwise what is dropped here is dropped for nothing."""
    folder = Path(importlib.util.find_spec("bitsandbytes").origin).parent
    assert "Failed to load CPU gemm_4bit_forward" in (folder / "backends" / "cpu" / "ops.py").read_text()


def warned(*filters: dict[str, str]) -> list[str]:
    """The warnings inside: of a model's old name for checkpointing, twice, and another one."""
    model = tiny_model()
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        for one in filters:
            warnings.filterwarnings(**one)
        before = list(warnings.filters)
        with quiet():
            with quiet():
                _ = model.is_gradient_checkpointing
            _ = model.is_gradient_checkpointing
            warnings.warn("tokens are gone", FutureWarning, stacklevel=1)
        assert warnings.filters == before
        inside = [str(one.message) for one in seen]
        _ = model.is_gradient_checkpointing
    assert len(seen) == len(inside) + 1
    return inside


def test_a_warning_is_dropped_inside_by_its_text_alone():
    assert warned() == ["tokens are gone"]


def test_a_filter_of_the_user_comes_first():
    assert len(warned({"action": "always", "message": "`is_gradient"})) == 3


def test_a_run_says_nothing_of_the_old_names_that_trl_calls(tmp_path):
    """From the configuration to a rollout of an evaluation, with TRL's default, `gradient_checkpointing`."""
    settings = config_kwargs(tmp_path, num_generations_eval=2)
    del settings["gradient_checkpointing"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        trainer = GRPOTrainer(
            tiny_model(), letter_reward, GRPOConfig(**settings), prompts(12), prompts(2), tiny_tokenizer()
        )
        trainer.train()
        trainer.evaluate()
    assert not [str(one.message) for one in seen if issubclass(one.category, FutureWarning)]

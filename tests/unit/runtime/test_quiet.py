"""Warnings that nobody can act on are kept off the console, by their text alone, and everything is put back."""

from __future__ import annotations

import logging
import warnings

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.runtime.quiet import quiet, quiet_libraries
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


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


def test_quiet_libraries_leaves_the_warnings_of_this_project():
    names = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        with warnings.catch_warnings(record=True) as seen:
            quiet_libraries()
            warnings.warn_explicit("theirs", UserWarning, "trl.py", 1, module="trl.trainer")
            warnings.warn_explicit("ours", UserWarning, "window.py", 1, module="grpo_ext.step.loss")
        assert [str(warning.message) for warning in seen] == ["ours"]
        assert logging.getLogger("grpo_ext.trainer").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("trl").isEnabledFor(logging.WARNING)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

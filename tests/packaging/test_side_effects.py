"""A library changes nothing behind one's back: not when it is imported, and nothing stays changed after a run.
What TRL's own import changes is TRL's."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from grpo_ext import Console, GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer

from .start import ROOT, call
from .state_of_process import state

SCRIPT = Path(__file__).with_name("state_of_process.py")
python = partial(call, cwd=ROOT, path=str(ROOT))
SEEDED = "import random, numpy, torch; [seed(0) for seed in (random.seed, numpy.random.seed, torch.manual_seed)]"


def states(*statements: str) -> list[dict]:
    """The states of a process before the statements and after each of them."""
    return json.loads(python("-W", "default", SCRIPT, *statements).splitlines()[-1])


def differences(one: dict, other: dict) -> dict:
    return {name: (one.get(name), other.get(name)) for name in one.keys() | other.keys() if one[name] != other[name]}


def test_import_loads_no_library():
    code = "import sys, grpo_ext; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(python("-c", code).split())
    assert not loaded & {"torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "rich", "typer"}


@pytest.mark.full
def test_import_changes_nothing():
    assert differences(*states("import grpo_ext")) == {}


@pytest.mark.full
def test_importing_the_trainer_changes_no_more_than_trl_does():
    theirs = f"{SEEDED}; from trl import GRPOConfig, GRPOTrainer"
    assert differences(*states(theirs, "from grpo_ext import Console, GRPOConfig, GRPOTrainer")[1:]) == {}


HEAR = "import os, sys; sys.stderr = sys.stdout; "


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("from grpo_ext.tools.cli import load_libraries as f; f(); f()", "Loading torch, transformers and TRL ...\n"),
        ("os.environ['RANK'] = '1'; import grpo_ext.tools.starting", ""),
        ("sys.modules['torch'] = None; import grpo_ext.tools.starting", ""),
    ],
    ids=["a command", "another process", "loaded already"],
)
def test_an_import_that_takes_seconds_is_announced_once(code, printed):
    assert python("-c", HEAR + code) == printed


@pytest.mark.full
def test_a_change_would_be_found():
    change = "import logging; torch.set_num_threads(3); logging.basicConfig()"
    assert differences(*states(SEEDED, change)[1:]).keys() == {"threads", "root logger"}


@pytest.mark.full
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_run_leaves_no_setting_changed(tmp_path, ends):
    calls = []

    def reward(prompts, completions, **kwargs):
        calls.append(1)
        if ends != "well" and len(calls) > 1:
            raise ValueError("no reward today")
        return letter_reward(prompts, completions, **kwargs)

    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=reward,
        args=GRPOConfig(**config_kwargs(tmp_path, bitwise_invariant=True, bitwise_threads=2, max_steps=1)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    Console().install(trainer)
    signal.signal(signal.SIGTERM, own_handler := lambda *_: None)
    before = state_to_restore()
    try:
        if ends == "well":
            trainer.train()
        else:
            with pytest.raises(Exception, match="no reward today"):
                trainer.train()
        assert signal.getsignal(signal.SIGTERM) is own_handler
        assert differences(before, state_to_restore()) == {}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert calls


def state_to_restore() -> dict:
    """The state that a run has to put back; it may draw random numbers, as TRL's does."""
    return {name: value for name, value in state(with_libraries=True).items() if "random" not in name}

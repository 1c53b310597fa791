"""What the package relies on in TRL, transformers, Accelerate and torch beyond the signatures of what it overrides.

Behaviour rather than signatures: how they call what is overridden, gather, accumulate and generate.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

import pytest
import transformers
import trl
from trl.trainer.base_trainer import _BaseTrainer

from grpo_ext import compat


@cache
def tree_of(owner) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(owner)))


def calls_in(owner, name: str) -> list[ast.Call]:
    """Calls `self.name(...)` and `super().name(...)` in a class."""
    found = []
    for node in ast.walk(tree_of(owner)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            base = node.func.value
            is_super = isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
            if is_super or (isinstance(base, ast.Name) and base.id == "self"):
                found.append(node)
    return found


CALLERS = (trl.GRPOTrainer, _BaseTrainer, transformers.Trainer)


def test_every_override_is_still_called():
    """Whether the calls fit is seen from the signatures (compat)."""
    names = set(compat.OVERRIDES) - {"__init__", "train", "predict", "prediction_step", "training_step"}
    assert [name for name in sorted(names) if not any(calls_in(owner, name) for owner in CALLERS)] == []


def test_the_constructor_reads_beta_for_the_reference_model_alone():
    # it is shown zero where our own reference follows: an adapter's copy, the attribute, two checks
    tree = tree_of(trl.GRPOTrainer.__init__)
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "beta"]
    assert sum(isinstance(node.ctx, ast.Load) for node in read) == 4, "GRPOTrainer.__init__ reads beta elsewhere"


# ---- Collectives ----------------------------------------------------------------------------------------------------


TURN = ("_generate_single_turn", "_tokenize_prompts")  # still TRL's, where continuous batching or a user calls them
COLLECTIVE = ("gather", "reduce", "broadcast", "pad_across", "all_")


def collectives_in(name: str) -> set[str]:
    """Names of collectives that a method of TRL's trainer calls, as written."""
    found = set()
    for node in ast.walk(tree_of(getattr(trl.GRPOTrainer, name))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.split(".")[-1].startswith(COLLECTIVE) and not called.startswith("asyncio."):
                found.add(called)
    return found


def test_what_is_still_called_of_trls_turn_exchanges_nothing():
    used = set().union(*(collectives_in(name) for name in TURN))
    assert used == set(), f"TRL's turn uses collectives, of which processes run different numbers: {used}"
    assert collectives_in("_calculate_rewards")  # it finds those that there are


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("_generate_and_score_completions", "self.accelerator.process_index * len(prompts)"),
        ("_calculate_rewards", "gather(rewards_per_func)"),
        ("_generate", "self.accelerator.gather(prompt_lengths)"),
    ],
)
def test_trl_still_takes_as_many_rows_from_every_process(name, line):
    # and so does code that is written for it, which runs here where processes have unequal shares
    source = inspect.getsource(getattr(trl.GRPOTrainer, name))
    assert line in source, f"{name} may take unequal shares now: see whether uneven_gathers is still needed"

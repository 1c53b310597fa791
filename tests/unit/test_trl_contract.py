"""What the package relies on in TRL, transformers, Accelerate and torch beyond the signatures of what it overrides.

Behaviour rather than signatures: how they call what is overridden, gather, accumulate and generate.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from typing import Any

import transformers
import trl
from trl.trainer.base_trainer import _BaseTrainer

from grpo_ext import compat


@cache
def code_of(owner: Any) -> str:
    """The source without comments and docstrings."""
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(owner))))


def test_every_override_is_still_called():
    """Whether the calls fit is seen from the signatures (compat)."""
    names = set(compat.OVERRIDES) - {"__init__", "train", "predict", "prediction_step", "training_step"}
    code = "".join(map(code_of, (trl.GRPOTrainer, _BaseTrainer, transformers.Trainer)))
    assert [name for name in sorted(names) if not re.search(rf"\b(self|super\(\))\.{name}\(", code)] == []


def test_the_constructor_reads_beta_for_the_reference_model_alone():
    # it is shown zero where our own reference follows: an adapter's copy, the attribute, two checks
    read = re.findall(r"\.beta\b(?! = )", code_of(trl.GRPOTrainer.__init__))
    assert len(read) == 4, "GRPOTrainer.__init__ reads beta elsewhere"


def test_trls_turn_calls_no_collectives():
    """It is still TRL's, where continuous batching or a user calls it; processes run different numbers of turns."""
    collective = re.compile(r"(?<!asyncio\.)\b(?:gather|reduce|broadcast|pad_across|all_)\w*\(")
    for name in ("_generate_single_turn", "_tokenize_prompts"):
        assert collective.findall(code_of(getattr(trl.GRPOTrainer, name))) == [], name
    assert collective.findall(code_of(trl.GRPOTrainer._calculate_rewards))  # it finds those that there are

"""A sampler says what it can do, and what samples is asked in one place."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from grpo_ext import GRPOTrainer
from grpo_ext.sampling.sampler import Sampler
from tests.support.tiny import given_rollout
from tests.support.trainers import make

ROOT = Path(__file__).parents[3]


class OwnTurns(GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return super()._generate_single_turn(*args, **kwargs)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"other": None, "uncovered": None, "returns": {"masks", "experts"}, "whole": False}),
        ({"top_p": 0.5}, {"filters": {"top_p": 0.5}, "other": None, "changed": []}),
        (
            {"repetition_penalty": 1.5},
            {"changed": ["repetition_penalty=1.5 (it changes scores by more than leaving some out)"], "other": None},
        ),
        (
            {"generation_kwargs": {"do_sample": False}},
            {"other": "do_sample=False", "returns": set()},
        ),
        (
            {"cls": OwnTurns},
            {"other": "OwnTurns._generate_single_turn", "by_user": "OwnTurns._generate_single_turn", "whole": False}
            | {"returns": {"masks"}},
        ),
        (
            {"rollout_func": given_rollout},
            {"other": "rollout_func", "by_user": "rollout_func", "whole": True, "returns": {"masks"}, "changed": ()},
        ),
    ],
    ids=["plain", "filtered", "other_scores", "not_keyed", "own_turns", "own_rollouts"],
)
def test_what_a_sampler_can_do_is_an_attribute_of_it(tmp_path, changes, expected):
    sampler = make(tmp_path, **changes)._rollouts.sampler
    assert {name: getattr(sampler, name) for name in expected} == expected
    assert (sampler.inner is None) is (sampler.by_user is None)
    assert sampler.turns.whole is False


def test_every_attribute_of_a_sampler_is_read():
    files = [path for path in (ROOT / "grpo_ext").rglob("*.py") if path.name != "sampler.py"]
    read = {node.attr for p in files for node in ast.walk(ast.parse(p.read_text())) if isinstance(node, ast.Attribute)}
    assert {spec.name for spec in dataclasses.fields(Sampler)} - {"inner"} | {"own", "turns"} <= read


def asked(source: str) -> list[int]:
    """Lines that ask a trainer or its settings what samples."""
    names = {"use_vllm", "use_transformers_continuous_batching"}
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in names]


def test_what_samples_is_asked_where_samplers_are_built_and_before_a_trainer_is():
    found = {
        p.relative_to(ROOT / "grpo_ext").as_posix(): asked(p.read_text()) for p in (ROOT / "grpo_ext").rglob("*.py")
    }
    counts = {name: len(lines) for name, lines in found.items() if lines}
    assert counts == {
        "sampling/sampler.py": 2,  # the values
        "rollouts/build.py": 5,  # the engines, of training and of sampling ahead
        # settings, before a trainer is built
        "sampling/vllm.py": 1,
        "sampling/vllm_weights.py": 1,
        "sampling/equal_shares.py": 1,
        "upstream/argument_checks.py": 2,
        "view.py": 1,  # whether it corrects the loss
        "compat.py": 1,  # before there is a sampler
        "checks/trainer.py": 2,  # a callback that has changed it
        "run/fingerprint.py": 1,
        "run/rerun.py": 1,
    }, "ask the sampler (rollouts.sampler) instead"
    assert asked("def f(view):\n    return view.use_vllm") == [2]

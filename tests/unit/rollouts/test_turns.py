"""Turns: prompts, answers, masks, limits, images and counts as TRL's own loop makes them of what one model says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.rollouts import tools
from grpo_ext.rollouts.chat import Chat
from grpo_ext.rollouts.environments import Environments
from grpo_ext.rollouts.tools import Toolbox
from grpo_ext.rollouts.turns import TurnLimits, continue_with
from tests.support import turns
from tests.support.images import image
from tests.support.turns import KINDS, PLAIN, Worker, by_transcripts, by_trl, case_of, differences, stock_trainer


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Stock trainers by kind, built when they are asked for."""
    built: dict[str, trl.GRPOTrainer] = {}

    def trainer(kind: str) -> trl.GRPOTrainer:
        if kind not in built:
            built[kind] = stock_trainer(kind, tmp_path_factory.mktemp(kind))
        return built[kind]

    return trainer


@pytest.mark.parametrize("kind", [*KINDS, *PLAIN])
def test_turns_are_those_of_trls_loop(trainers, kind):
    trainer = trainers(kind)
    worker, generations = Worker.beside(trainer), []

    @given(st.integers(0, 10**9))
    def alike(seed):
        case = case_of(kind, seed)
        if trainer.environment_factories is not None:
            trainer._environment_pool = {name: [] for name in trainer.environment_factories}
            worker.environments.pools = {name: [] for name in trainer.environment_factories}
        assert differences(trainer, worker, kind, case) == []
        assert differences(trainer, worker, kind, case) == []  # instances are used again
        generations.append(len(by_transcripts(worker, kind, case)["heard"]))

    alike()
    assert kind in PLAIN or max(generations) > 2


def reversed_order(monkeypatch):
    inner = Toolbox._answers
    monkeypatch.setattr(Toolbox, "_answers", lambda *args: inner(*args)[::-1])


def without_prefix(monkeypatch):
    inner = Chat.parse
    monkeypatch.setattr(Chat, "parse", lambda self, ids, prefix, name: inner(self, ids, [], name))


def without_shown_tools(monkeypatch):
    monkeypatch.setattr(Chat, "tools_of", lambda self, name: self.tools)


def uncounted_failures(monkeypatch):
    monkeypatch.setattr(tools, "_failure", lambda transcript, error: {"error": str(error)})


def images_of_answers_without_room(monkeypatch):
    inner = Toolbox.answer

    def answer(self, transcripts, chat, limits):
        waiting = limits.waiting(transcripts)
        going_on = inner(self, transcripts, chat, limits)
        for t in waiting:
            t.images += [image(0)] * (not any(t is other for other in going_on))
        return going_on

    monkeypatch.setattr(Toolbox, "answer", answer)


def an_instance_for_each_completion(monkeypatch):
    inner = Environments.begin

    def begin(self, transcripts, seconds=None):
        self.pools = {name: [] for name in self.pools}
        inner(self, transcripts, seconds)

    monkeypatch.setattr(Environments, "begin", begin)


def message_of_an_empty_turn(monkeypatch):
    inner = continue_with

    def begun(transcript, ids, logps, chat, limits):
        inner(transcript, ids, logps, chat, limits)
        if transcript.mask[-1] == 0:
            transcript.completion += [{"role": "assistant", "content": ""}]

    monkeypatch.setattr(turns, "continue_with", begun)


@pytest.mark.parametrize(
    ("rule", "kind", "columns"),
    [
        (reversed_order, "tools", {"completions"}),
        (without_prefix, "tools", {"completions"}),
        (without_shown_tools, "environments", {"completions", "prompt_ids"}),
        (uncounted_failures, "tools", {"failures"}),
        (images_of_answers_without_room, "images", {"images", "tool_images"}),
        (an_instance_for_each_completion, "environment", {"environments"}),
        (message_of_an_empty_turn, "tools", {"completions"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_loop_with_another_rule_is_found_different(trainers, monkeypatch, rule, kind, columns):
    trainer = trainers(kind)
    worker = Worker.beside(trainer)
    if trainer.environment_factories is not None:
        trainer._environment_pool = {name: [] for name in trainer.environment_factories}
    rule(monkeypatch)
    apart = [set(differences(trainer, worker, kind, case_of(kind, seed))) for seed in range(12)]
    assert columns <= set().union(*apart)


@pytest.mark.parametrize("limit", ["max_completion_length", "context", "max_turns"])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_limit_that_is_one_off_is_found_different(trainers, limit, step):
    """Each limit stands where TRL's loop just fits, or just does not."""
    trainer = trainers("tools")
    worker = Worker.beside(trainer)
    for seed in range(40):
        case = case_of("tools", seed)
        wide = replace(case, limits=TurnLimits(4000, 5000, 3))
        # the first answer of the first completion that calls a tool ends here
        theirs = by_trl(trainer, "tools", wide)
        for prompt, mask in zip(theirs["prompt_ids"], theirs["mask"]):
            if 0 in mask:
                end = mask.index(1, mask.index(0)) if 1 in mask[mask.index(0) :] else len(mask)
                values = {"max_completion_length": end, "context": len(prompt) + end + 1, "max_turns": 1}
                exact = replace(case, limits=replace(wide.limits, **{limit: values[limit]}))
                assert differences(trainer, worker, "tools", exact) == []
                other = replace(exact.limits, **{limit: values[limit] + step})
                if differences(trainer, worker, "tools", exact, replace(case, limits=other)):
                    return
    pytest.fail("no case shows the limit")

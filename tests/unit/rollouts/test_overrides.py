"""The main thread's worker, where users' overrides run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_ext.rollouts.images import ImageSource
from grpo_ext.rollouts.local import Hooks
from grpo_ext.rollouts.overrides import MainWorker
from grpo_ext.rollouts.transcript import Sampled, Transcript


@pytest.mark.parametrize(("empty", "rows"), [(False, 0), (True, 2)], ids=["nothing to go on with", "no prompts"])
def test_where_a_forward_is_a_collective_a_process_without_rows_samples_with_the_others(empty, rows):
    asked = []

    def generate(transcripts: Any, config: Any, num_generations: int) -> list[Any]:
        asked.append(len(transcripts))
        return []

    terms = SimpleNamespace(hooks=Hooks(turn=pytest.fail), generation_config=object())
    local: Any = SimpleNamespace(request=SimpleNamespace(empty=empty, num_generations=2), terms=terms)
    worker = MainWorker.__new__(MainWorker)
    worker.settings, worker.images = SimpleNamespace(sharded=True, filler=7), ImageSource()  # type: ignore[assignment]
    worker.engine = SimpleNamespace(generate=generate)
    sampled = worker.sample_turn(local, [Transcript({}, 0) for _ in range(rows)])
    assert asked == [0]
    assert sampled == [Sampled([7])] * rows

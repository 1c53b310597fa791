"""Callbacks get the events that they get from TRL: a micro-batch is a substep, and a batch of an evaluation."""

import warnings
from typing import Any

import pytest
import transformers
import trl

import grpo_ext
from tests.support.kept import of_stock
from tests.support.tiny import prompts, stock_scores
from tests.support.trainers import make, on, ran, stopping

EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
# 16 completions a step and 24 an evaluation, in micro-batches of 4
SIZES = {
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 4},
    "global_batch_size": None,  # TRL has none
}


def recorded_in(events: list[tuple[Any, ...]], cls: type, folder: Any, *callbacks: Any, **settings: Any) -> Any:
    """A trainer whose events are kept in their order, with the progress of the run."""

    def recorded(name: str) -> Any:
        def event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress = (state.global_step, state.epoch, state.max_steps)
            events.append((name, *progress, state.is_local_process_zero, sorted(kwargs)))

        return event

    recorder = type("Recorder", (transformers.TrainerCallback,), {name: recorded(name) for name in EVENTS})()
    # whole steps: stock TRL drops a tail
    parts = {"train_dataset": prompts(20), "eval_dataset": prompts(6), "callbacks": [recorder, *callbacks]}
    return make(folder, cls=cls, **{**SIZES, **parts, **settings})


@stock_scores
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"bf16": None, "use_cpu": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"},
            marks=pytest.mark.full,
        ),
        {
            **{"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 5, "per_device_eval_batch_size": 5},
            "gradient_accumulation_steps": 2,
            "max_steps": 2,
        },
    ],
    ids=["default precision and checkpoints", "evaluations and other sizes"],
)
def test_the_events_are_those_of_stock_trl_in_their_order(tmp_path, settings):
    def events_of(package: Any) -> list[tuple[Any, ...]]:
        events: list[tuple[Any, ...]] = []
        ran(recorded_in(events, package.GRPOTrainer, tmp_path / package.__name__, **settings)).evaluate()
        return events

    stock = of_stock(lambda: events_of(trl))
    assert stock == events_of(grpo_ext)
    assert sum(name == "on_substep_end" for name, *_ in stock) > 0
    assert sum(name == "on_prediction_step" for name, *_ in stock) > 3


def test_a_step_is_whole_where_a_callback_stops_the_run_inside_it(tmp_path):
    events: list[tuple[Any, ...]] = []
    trainer = ran(recorded_in(events, grpo_ext.GRPOTrainer, tmp_path, stopping("on_substep_end", at=1, save=True)))
    assert trainer.state.global_step == 2
    assert [event for event, *_ in events].count("on_substep_end") == 2 * 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_warning_of_every_step_is_shown_once(tmp_path):
    """Python shows a warning again after each change of its filters."""
    warn = on("on_step_end", lambda state: warnings.warn("of a callback", UserWarning, stacklevel=1))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        make(tmp_path, max_steps=3, callbacks=[warn]).train()
    assert [str(entry.message) for entry in shown].count("of a callback") == 1


def test_filters_of_warnings_that_a_callback_sets_stay(tmp_path):
    def ignore(state: Any) -> None:
        warnings.filterwarnings("ignore", "of mine", UserWarning)

    def warn(state: Any) -> None:
        warnings.warn("of mine", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        callbacks = [on("on_train_begin", ignore), on("on_step_end", warn)]
        make(tmp_path, max_steps=2, callbacks=callbacks).train()
        added = [entry for entry in warnings.filters if entry not in before]
        assert [entry[2] for entry in added] == [UserWarning]
    assert "of mine" not in [str(entry.message) for entry in shown]

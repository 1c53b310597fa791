"""Each row ends where generation ended it, whatever ended it, and nothing in it depends on its neighbours in a call."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import StoppingCriteria, StoppingCriteriaList

from grpo_ext import GRPOTrainer
from grpo_ext.errors import RolloutError
from tests.support.colocated import stand_in
from tests.support.decoding import decoding
from tests.support.selection import few_of
from tests.support.tiny import own_config, tiny_model, tiny_tokenizer, tokenizer_with
from tests.support.trainers import batches_of, change, error, make, passing_on
from tests.tolerances import DIFFERENT, UPDATE

LIMIT = 12
STOPS = {19, 20, 22, 24, 25}  # letters that are in no special token
ENDS = {1, *STOPS}
LETTERS = [tiny_tokenizer().decode([token]) for token in sorted(STOPS)]


class OnLetters(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(sorted(STOPS)))


class StopsByItself(transformers.Qwen2ForCausalLM):
    """A model with a criterion of its own."""

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        return StoppingCriteriaList([*super()._get_stopping_criteria(*args, **kwargs), OnLetters()])


def with_criterion() -> Any:
    model = tiny_model()
    model.__class__ = StopsByItself
    return model


CAUSES: dict[str, Callable[[], dict[str, Any]]] = {
    "end tokens": lambda: {"generation_kwargs": {"eos_token_id": sorted(STOPS)}},
    "the model's end tokens": lambda: {"model": own_config(eos_token_id=sorted(ENDS))},
    "stop strings": lambda: {"generation_kwargs": {"stop_strings": LETTERS}},
    "the model's stop strings": lambda: {"model": own_config(stop_strings=LETTERS)},
    "a criterion": lambda: {"model": with_criterion()},
}


def run(folder: Any, **settings: Any) -> tuple[torch.Tensor, list[list[int]], dict[str, float]]:
    """The update of one step, its completions and its log."""
    cls = settings.pop("cls", GRPOTrainer)
    settings = {"max_steps": 1, "num_generations": 8, **settings}
    trainer = make(folder, settings.pop("model", "qwen2"), cls=cls, **settings)
    batches = batches_of(trainer)
    update = change(trainer)
    return update, [row.tolist() for row in batches[0]["completion_ids"]], trainer.state.log_history[0]


def check(rows: list[list[int]], log: dict[str, float], ends: set[int] = ENDS) -> None:
    """Rows go up to their first end or to the limit, and the log says how many were cut off."""
    for row in rows:
        assert ends.isdisjoint(row[:-1])
        assert row[-1] in ends or len(row) == LIMIT
    ended = [len(row) for row in rows if row[-1] in ends]
    assert 0 < len(ended) < len(rows)
    assert len(set(ended)) > 2
    assert log["completions/clipped_ratio"] == 1 - len(ended) / len(rows)
    assert log["completions/mean_terminated_length"] == pytest.approx(sum(ended) / len(ended))
    assert log["completions/max_length"] == LIMIT


def causes() -> Iterator[Any]:
    """In `make test` one way of decoding: both read ends in one place, but for a criterion."""
    for cause, compact in itertools.product(CAUSES, (True, False)):
        few = cause == "a criterion" or (compact and cause not in ("end tokens", "the model's stop strings"))
        yield pytest.param(cause, compact, marks=() if few else pytest.mark.full)


@pytest.mark.parametrize(("cause", "compact"), causes())
def test_a_row_ends_where_generation_ended_it(tmp_path, cause, compact):
    with decoding(compact):
        update, rows, log = run(tmp_path, **CAUSES[cause]())
        check(rows, log)
        if cause == "a criterion":  # which sees padding, so a warning says that sampling is not covered
            return
        again, others, _ = run(tmp_path, rollout_chunk_size=8, **CAUSES[cause]())
    assert others == rows
    assert error(update, again) < UPDATE
    if cause == "end tokens":
        assert error(update, run(tmp_path)[0]) > DIFFERENT


@pytest.mark.parametrize("compact", few_of([True, False], [True]))
def test_a_stop_string_is_not_found_in_padding(tmp_path, compact):
    """The padding is a letter, and a stop string begins with it: a short prompt could end with the first token."""
    stops = ["a" + last + letter for last in "cd" for letter in "abcdefghijklmnopqrstuvwxyz0123456789 "]
    settings: dict[str, Any] = {"processing_class": tokenizer_with(pad_token="a")}
    settings |= {"train_dataset": Dataset.from_dict({"prompt": ["bcdefgh>", "c", "bc>", "d"] * 2})}
    settings |= {"num_generations": 4, "generation_kwargs": {"stop_strings": stops}}
    with decoding(compact):
        _, rows, _ = run(tmp_path, rollout_chunk_size=16, **settings)
        _, others, _ = run(tmp_path, rollout_chunk_size=4, **settings)
    assert any(len(row) > 1 for row in rows)
    assert others == rows


def test_a_model_with_a_loop_of_its_own_runs_it(tmp_path, caplog):
    calls: list[int] = []

    class Own(transformers.Qwen2ForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super()._sample(*args, **kwargs)

    model = tiny_model()
    model.__class__ = Own
    make(tmp_path, model, max_steps=1).train()
    assert calls
    assert "Own._sample" in caplog.text


def test_a_model_with_its_own_generate_ends_rows_before_their_padding(tmp_path):
    model = tiny_model()
    model.generate = functools.partial(model.generate, stopping_criteria=StoppingCriteriaList([OnLetters()]))
    _, rows, log = run(tmp_path, model=model)
    assert all(ENDS.isdisjoint(row[:-1]) for row in rows)
    assert all(row[-1] in ENDS or len(row) == LIMIT for row in rows)
    ended = [row[-1] == 1 or len(row) < LIMIT for row in rows]  # of a row of full length only the ids are known
    assert log["completions/clipped_ratio"] == 1 - sum(ended) / len(rows)


@pytest.mark.parametrize("stops", [{"stop_token_ids": sorted(STOPS)}, {"stop": LETTERS}], ids=str)
def test_vllm_says_how_a_row_ended(tmp_path, monkeypatch, stops):
    stand_in(monkeypatch.setattr)
    _, rows, log = run(tmp_path, use_vllm=True, vllm_mode="colocate", generation_kwargs=stops, top_k=0)
    check(rows, log)


def test_a_time_limit_cuts_rows_off(tmp_path):
    for compact in (True, False):
        with decoding(compact):
            _, rows, log = run(tmp_path, generation_kwargs={"max_time": 1e-9})
        assert {len(row) for row in rows} == {1}
        assert log["completions/clipped_ratio"] == sum(row[-1] != 1 for row in rows) / len(rows) > 0


@pytest.mark.parametrize(
    ("compact", "pad"),
    [
        (True, "a"),
        pytest.param(True, "<eos>", marks=pytest.mark.full),
        pytest.param(False, "a", marks=pytest.mark.full),
        pytest.param(False, "<eos>", marks=pytest.mark.full),
    ],
)
def test_the_padding_token_is_a_token_like_any_other(tmp_path, pad, compact):
    tokenizer = tokenizer_with(pad_token=pad)
    settings = {"processing_class": tokenizer, "mask_truncated_completions": True}
    settings["generation_kwargs"] = {"stop_strings": LETTERS}
    with decoding(compact):
        update, rows, log = run(tmp_path, **settings)
    full = [row for row in rows if row]  # nothing is left of a masked completion
    assert all(row[-1] in ENDS and ENDS.isdisjoint(row[:-1]) for row in full)
    assert log["completions/clipped_ratio"] == 1 - len(full) / len(rows)
    assert tokenizer.pad_token_id == 1 or any(tokenizer.pad_token_id in row for row in rows)
    assert error(update, run(tmp_path, rollout_chunk_size=8, **settings)[0]) < UPDATE


def test_a_search_ends_at_a_stop_token_too(tmp_path):
    _, rows, _ = run(tmp_path, generation_kwargs={"num_beams": 2, "eos_token_id": sorted(STOPS)})
    assert len(rows) == 16
    assert all(ENDS.isdisjoint(row[:-1]) and 0 not in row for row in rows)


PASSING_ON = {
    "turn": {"cls": passing_on("_generate_single_turn")},
    "rollout": {"rollout_func": lambda prompts, trainer: trainer.generate(prompts)},
}


@pytest.mark.parametrize("sampling", PASSING_ON.values(), ids=PASSING_ON)
def test_what_passes_rows_on_changes_no_end(tmp_path, sampling):
    settings = {"generation_kwargs": {"stop_strings": LETTERS}}
    _, rows, log = run(tmp_path, **sampling, **settings)
    check(rows, log)
    assert rows == run(tmp_path, **settings)[1]


class Own(GRPOTrainer):
    """A user's sampling, of which only the ids are known: stop tokens end a row here too."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return [[5, 6, 20] if place % 2 else [5] * LIMIT for place in range(len(prompt_ids))], None


def test_ids_of_a_users_own_end_at_every_end_token(tmp_path):
    assert run(tmp_path, cls=Own)[2]["completions/clipped_ratio"] == 1.0
    assert run(tmp_path, cls=Own, generation_kwargs={"eos_token_id": [20]})[2]["completions/clipped_ratio"] == 0.5


class Doubled(GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, logps = super()._generate_single_turn(*args, **kwargs)
        return [row for row in ids for _ in range(2)], logps


def test_other_rows_than_were_asked_for_are_refused(tmp_path):
    model = tiny_model()
    model.generate = functools.partial(model.generate, num_return_sequences=2)
    with pytest.raises(RolloutError, match="generate returned 32 rows for 16 prompts"):
        make(tmp_path, model, max_steps=1).train()
    with pytest.raises(RolloutError, match="_generate_single_turn returned 32 completions for 16 prompts"):
        make(tmp_path, cls=Doubled, max_steps=1).train()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"generation_kwargs": {"num_return_sequences": 2}}, "num_return_sequences=2"),
    ({"model": own_config(num_return_sequences=2)}, "num_return_sequences=2"),
    ({"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": {"n": 2}}, "n=2 in generation_kwargs"),
    ({"processing_class": tokenizer_with(eos_token=None)}, "has no end token"),
    ({"generation_kwargs": {"stop_strings": ["a"]}, "use_transformers_continuous_batching": True}, "does not support"),
    ({"generation_kwargs": {"stop_strings": ["\u00e9"]}}, "unable to identify tokens"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_settings_of_ends_and_rows_that_cannot_be_kept_are_refused(tmp_path, monkeypatch, settings, words):
    stand_in(monkeypatch.setattr)
    with pytest.raises(ValueError, match=words):  # the last one is of transformers
        make(tmp_path, **settings)

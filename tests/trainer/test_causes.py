"""The cause that `grpo-ext diff` names: a setting, or another part of what a run is made of."""

from pathlib import Path
from typing import Any

import pytest

from grpo_ext.run.diff import diff
from tests.support import tool_runs
from tests.support.tiny import own_config, prompts, tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trails import RUN, first_of, run
from tests.support.trainers import SAVE, make, on

CAUSES: dict[str, tuple[dict[str, Any], str, int, str, str]] = {
    "the order": ({"shuffle_dataset": False}, "prompts", 1, "row", "shuffle_dataset"),
    "suppressed tokens": (
        *({"model": own_config(suppress_tokens=[5, 6, 7, 8])}, "completions", 1, "generation"),
        "generation_config.suppress_tokens",
    ),
    "end tokens": ({"model": own_config(eos_token_id=[1, 9])}, "completions", 1, "generation", "end_tokens"),
    "the rotary base": (
        *({"model": tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 9.0})}, "completions", 1),
        *("generation", "model.config.rope_parameters.rope_theta"),
    ),
}


ONE, THREE = {"max_steps": 1}, {"max_steps": 3}


@pytest.fixture(scope="module")
def one_step(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("base") / "one", **ONE)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("base") / "three", **THREE)


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named(tmp_path, one_step, name):
    changes, stage, step, what, meaning = CAUSES[name]
    found = diff(one_step, run(tmp_path / "run", **ONE, **changes))
    assert first_of(found) == (stage, step), found.text
    assert what in found.text
    assert meaning in found.meaning


def resumed(folder: Path, *calls: tuple[int, str], **changes: Any) -> Path:
    """A run whose training calls, each from a checkpoint, have these `scale_rewards`."""
    run(folder, **SAVE, **THREE, **changes)
    for step, scale in calls:
        allowed = {"allow_changed_on_resume": ["scale_rewards"], "scale_rewards": scale}
        trainer = make(folder, **{**RUN, **SAVE, **THREE, **changes, **allowed})
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")  # beside the run that went on from there
        folder = Path(trainer.args.output_dir)
    return folder


@pytest.mark.full
def test_a_cause_that_came_with_a_resume_is_named_where_a_later_one_took_it_back(tmp_path, three_steps):
    found = diff(three_steps, resumed(tmp_path / "run", (1, "none"), (2, "group")))
    assert first_of(found) == ("advantages", 2), found.text
    assert found.meaning.endswith("computed differently: scale_rewards.")
    assert any("scale_rewards 'group' -> 'none'" in note for note in found.notes)


@pytest.mark.full
def test_what_changed_after_a_difference_is_no_cause(tmp_path, three_steps):
    found = diff(three_steps, resumed(tmp_path / "run", (1, "none"), seed=9))
    assert first_of(found) == ("prompts", 1), found.text
    assert found.meaning.endswith(": seed.")


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_a_callback_writes_are_named_as_a_possible_cause(tmp_path, frozen):
    def parts(folder: Path, writes: bool) -> Path:
        model = tiny_model("qwen2")
        model.get_input_embeddings().weight.requires_grad_(not frozen)
        spoil = on("on_step_begin", lambda state: model.get_input_embeddings().weight.data.mul_(-1.0), at=1)
        return run(folder, model=model, callbacks=[spoil] if writes else [], max_steps=2)

    found = diff(*(parts(tmp_path / str(writes), writes) for writes in (False, True)))
    assert first_of(found) == ("completions", 2), found.text
    assert "weights that something wrote between two steps" in found.meaning


@pytest.mark.full
def test_what_a_run_is_made_of_besides_settings_is_named(tmp_path, one_step):
    def by_answer(answer, completions, **columns):
        return [float(len(row) % (1 + len(text))) for row, text in zip(completions, answer)]

    data = prompts(12)
    other = data.map(lambda row, number: {"answer": row["answer"] + "x" * (number % 3)}, with_indices=True)
    parts = ({"reward": by_answer, "train_dataset": rows, **ONE} for rows in (data, other))
    found = diff(*(run(tmp_path / str(number), **changes) for number, changes in enumerate(parts)))
    assert first_of(found) == ("rewards", 1)
    assert found.meaning == "The completions are the same. The cause: data.by_column.answer."

    def count(number: int) -> str:
        """
        Count.

        Args:
            number: any
        """
        return str(number % 5)

    runs = {name: always_calling() | {"tools": [tool]} for name, tool in (("one", tool_runs.count), ("two", count))}
    runs["again"] = runs["one"]
    folders = [run(tmp_path / name, **parts) for name, parts in runs.items()]
    found = diff(*folders[:2])
    assert found.first is not None
    assert "tool_code.count" in found.meaning, found.text
    assert diff(folders[0], folders[2]).verdict == "same bits"
    found = diff(one_step, run(tmp_path / "half", bf16=True, **ONE))
    assert found.first is not None
    assert "bf16" in found.meaning, found.text

"""What makes a run another run beside its settings: the model's configuration, the tools, every row of the data."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_ext import GRPOTrainer
from grpo_ext.errors import CheckpointError
from tests.support import tool_runs
from tests.support.drop_in import conversations
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer
from tests.support.tool_runs import count, sampled, tell
from tests.support.trainers import SAVE, make, other


def saved_run(folder: Path, **changes: Any) -> Path:
    other(folder, **{"max_steps": 1, **changes}).train()
    return folder / "checkpoint-1"


def test_a_model_by_its_path_is_compared_with_what_was_loaded(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    def train(resume: str | None = None, **loading: Any) -> None:
        parts = {"model": str(tmp_path / "model"), "processing_class": None}
        other(tmp_path / "out", **parts, max_steps=1, bf16=True, model_init_kwargs=loading).train(resume)

    train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"model\.config\.rms_norm_eps: 1e-06 in the checkpoint, 0\.01 now"):
        train(checkpoint, rms_norm_eps=1e-2)
    train(checkpoint, attn_implementation="eager")  # how it is computed, not what


class Game(tool_runs.Game):
    def give_up(self) -> str:
        """Give up."""
        return "over"


def with_tools(folder: Path, **parts: Any) -> GRPOTrainer:
    if "environment_factory" in parts:
        parts["reward_funcs"] = None
    return other(
        folder,
        model=tiny_model(max_position_embeddings=4096),
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        train_dataset=conversations(12),
        processing_class=sampled(lambda ids: []),
        max_steps=1,
        max_completion_length=8,
        **parts,
    )


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"tools": [count]}, {"tools": [count, tell]}, r"tools\.tell: null in the checkpoint"),
        ({"environment_factory": tool_runs.Game}, {"environment_factory": Game}, r"tools\.Game\.give_up: null"),
    ],
)
def test_other_tools_are_refused_and_named(tmp_path, before, after, named):
    with_tools(tmp_path / "out", **before).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(CheckpointError, match=named):
        with_tools(tmp_path / "other", **after).train(resume_from_checkpoint=checkpoint)
    with_tools(tmp_path / "other", **before).train(resume_from_checkpoint=checkpoint)


def test_the_same_rows_are_the_same_data_however_they_are_held(tmp_path):
    rows = prompts(12)
    checkpoint = saved_run(tmp_path / "out", train_dataset=rows)
    rows.to_json(tmp_path / "rows.jsonl")
    backwards = Dataset.from_list(rows.to_list()[::-1])
    for same in (
        Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache")),
        backwards.select(range(11, -1, -1)),  # through an indices mapping
    ):
        trainer = other(tmp_path, train_dataset=same, max_steps=1)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == 1
    with pytest.raises(CheckpointError, match=r"data\.rows_sha256: "):
        other(tmp_path, train_dataset=backwards, max_steps=1).train(resume_from_checkpoint=str(checkpoint))


def test_latest_of_another_trainer_goes_back_to_a_checkpoint_that_has_everything(tmp_path, caplog):
    folder = tmp_path / "out"
    make(folder, **SAVE, max_steps=3).train()
    for path in [*folder.glob("checkpoint-*/grpo_ext_*"), *folder.glob("checkpoint-*/checkpoint.json")]:
        path.unlink()
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    (folder / "checkpoint-2" / "scheduler.pt").unlink()
    trainer = make(folder, **SAVE, max_steps=3)
    trainer.train(resume_from_checkpoint="latest")
    assert "checkpoint-3 has neither checkpoint.json nor trainer_state.json" in caplog.text
    assert "checkpoint-2 holds no learning-rate schedule" in caplog.text
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3]
    assert (folder / "checkpoint-2.replaced-1").is_dir()


def test_weights_alone_are_no_run_to_go_on_with(tmp_path):
    checkpoint = saved_run(tmp_path / "out", save_only_model=True)
    for wanted in (str(checkpoint), "latest", "auto"):
        with pytest.raises(CheckpointError, match="no optimizer state and no learning-rate schedule") as refused:
            other(tmp_path / "out", save_only_model=True).train(resume_from_checkpoint=wanted)
        assert f"model='{checkpoint}'" in str(refused.value)
    with pytest.raises(CheckpointError, match=r"out is a run, not a checkpoint; the newest in it is .*checkpoint-1"):
        other(tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "out"))
    make(tmp_path / "new", model=type(tiny_model()).from_pretrained(checkpoint)).train()

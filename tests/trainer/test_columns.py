"""What a rollout batch carries from the sampler to the loss, between processes and into checkpoints."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_ext.forward import columns
from grpo_ext.forward.columns import COLUMNS, COMPLETION_IDS, Column, Rows
from grpo_ext.rollouts import join
from grpo_ext.run.state import load_state
from grpo_ext.runtime.transfer import pack
from tests.support.trainers import make, train_and_keep_first


def test_a_new_recorded_quantity_is_one_row_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(columns.COLUMNS, "noise", Column("completion", loss=True))
    trainer = make(tmp_path, max_steps=1, save_steps=1, save_strategy="steps")
    sample, seen = trainer._rollouts.worker.engine.generate, []

    def noisy(*args: Any) -> Any:
        turns = sample(*args)
        noises = [torch.arange(len(turn.ids)) + 0.5 for turn in turns]
        return [replace(turn, columns={**turn.columns, "noise": n}) for turn, n in zip(turns, noises, strict=True)]

    def loss_of(model: Any, micro_batch: Any) -> torch.Tensor:
        seen.append(micro_batch.columns["noise"])
        return inner(model, micro_batch)

    trainer._rollouts.worker.engine.generate = noisy
    inner, trainer._loss_of = trainer._loss_of, loss_of
    batch = train_and_keep_first(trainer)
    assert [row.tolist() for row in batch["noise"]] == [[n + 0.5 for n in range(len(ids))] for ids in batch.completions]
    assert torch.equal(torch.cat(seen).sort().values, batch["noise"].values.sort().values)
    state = load_state(tmp_path / "checkpoint-1")
    assert state is not None
    saved = Rows.saved(state["rollouts"]["batch"]["columns"]["noise"])
    assert torch.equal(saved.values, batch["noise"].values)


def sent(folder: Any, monkeypatch: Any, **settings: Any) -> tuple[int, int, int]:
    """Bytes of the columns of a rollout batch that a process sends; tokens of completions, and of different prompts."""
    shares: list[Any] = []
    monkeypatch.setattr(join, "gather_nested", lambda share: shares.append(share) or [share])
    batch = train_and_keep_first(make(folder, max_steps=1, num_generations=4, global_batch_size=16, **settings))
    (share,) = shares
    prompts = sum(len(ids) for ids in list(batch["prompt_ids"])[::4])
    size = sum(state["values"].nbytes for state in share.columns.values())
    assert pack(share)[1].numel() < size + 16 * 40  # the whole buffer: rewards, and filling up to 16 bytes each
    return size, len(batch["completion_ids"].values), prompts


@pytest.mark.parametrize(
    ("settings", "logps"),
    [({}, 1), pytest.param({"beta": 0.1}, 2, marks=pytest.mark.full), ({"num_iterations": 2, "beta": 0.1}, 3)],
)
def test_a_token_takes_4_bytes_and_4_for_each_log_probability_and_a_prompt_is_sent_once(
    tmp_path, monkeypatch, settings, logps
):
    size, tokens, prompts = sent(tmp_path / "run", monkeypatch, **settings)
    assert size == 4 * tokens * (1 + logps) + 4 * prompts
    monkeypatch.setitem(COLUMNS, COMPLETION_IDS, replace(COLUMNS[COMPLETION_IDS], dtype=torch.long))
    assert sent(tmp_path / "control", monkeypatch, **settings)[0] == size + 4 * tokens

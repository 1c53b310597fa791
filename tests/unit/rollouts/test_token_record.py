"""What the sampler records of each token: against the scores themselves, for rows that leave early."""

from __future__ import annotations

import torch

from grpo_ext.rollouts import token_record
from grpo_ext.rollouts.token_record import Recorder

ROWS, STEPS, VOCABULARY, BOUND = 3, 7, 11, 4


def filtered(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (3, 11), and the same with 2 to 4 tokens left."""
    scores = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(step))
    kept = [scores[row].topk(2 + (row + step) % 3).indices for row in range(ROWS)]
    left = torch.full_like(scores, -torch.inf)
    for row, ids in enumerate(kept):
        left[row, ids] = scores[row, ids]
    return scores, left


def test_records_are_those_of_each_row_wherever_rows_leave(monkeypatch):
    monkeypatch.setattr(token_record, "_AT_ONCE", 3)
    recorder, rows = Recorder(temperature=1.0, bound=BOUND), torch.arange(ROWS)
    for step in range(STEPS):
        scores, left = filtered(step)
        recorder(None, scores[rows])
        tokens = left[rows].argmax(1)
        assert torch.equal(recorder.bounded(left[rows]), left[rows])
        recorder.add(left[rows], tokens, left[rows].softmax(1))
        if step == 3:  # row 1 has ended, and the last row takes its place
            rows = torch.tensor([0, 2])
            recorder.keep(rows)
    records = recorder.records([7, 3, 6])
    for row, (record, length) in enumerate(zip(records, (7, 3, 6))):
        pairs = [tuple(values[row] for values in filtered(step)) for step in range(length)]
        assert record.counts_T.tolist() == [int(left.isfinite().sum()) for _, left in pairs]
        for ids, (_, left) in zip(record.ids_K.split(record.counts_T.tolist()), pairs):
            assert set(ids.tolist()) == set(left.isfinite().nonzero().flatten().tolist())
        assert torch.allclose(record.logps_T, torch.stack([left.log_softmax(0).max() for _, left in pairs]))
        masses = [scores.softmax(0)[left.isfinite()].sum() for scores, left in pairs]
        assert torch.allclose(record.mass_T, torch.stack(masses))

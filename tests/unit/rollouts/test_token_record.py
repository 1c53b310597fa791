"""What the sampler records of each token: against the scores themselves, for rows that leave early."""

from __future__ import annotations

import torch

from grpo_ext.rollouts import token_record
from grpo_ext.rollouts.token_record import Recorder, TokenRecord

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


def test_without_filters_the_record_names_what_was_suppressed_at_each_position():
    recorder = Recorder(kinds=[-2, -2, -1])
    scores, tokens = torch.zeros(2, VOCABULARY), torch.zeros(2, dtype=torch.long)
    for _ in range(4):
        recorder.add(recorder.bounded(scores), tokens, scores.softmax(1))
    record, _ = recorder.records([4, 1])
    assert record.counts_T.tolist() == [-2, -2, -1, -1]
    assert record.ids_K.tolist() == []
    assert record.mass_T.tolist() == [1] * 4


def test_records_join_and_are_cut_with_their_ids():
    one = TokenRecord(torch.zeros(2), torch.ones(2), torch.tensor([2, 1]), torch.tensor([4, 5, 6]))
    record = TokenRecord.joined([one, TokenRecord.neutral(2), one])
    assert record.counts_T.tolist() == [2, 1, 0, 0, 2, 1]
    assert record.first(5).ids_K.tolist() == [4, 5, 6, 4, 5]

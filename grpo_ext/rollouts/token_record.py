"""What the sampler knows of each token it draws: its probability, and the tokens that the filters had kept.

transformers keeps neither. Used by rollouts.keyed, which draws the tokens; read by `join`. Shapes: B rows, T tokens,
V vocabulary, K kept ids of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor

_AT_ONCE = 64  # tokens whose records are brought to the host together


@dataclass(frozen=True)
class TokenRecord:
    """The records of a completion's tokens, on the CPU; neutral for tokens of tools and environments.

    Attributes:
        logps_T: log-probability of each token, after every filter.
        mass_T: the share of the probability that the filters had kept.
        counts_T, ids_K: a row of `forward.sampling_masks.KeptTokens`; no ids without replay.
    """

    logps_T: torch.Tensor
    mass_T: torch.Tensor
    counts_T: torch.Tensor
    ids_K: torch.Tensor

    @classmethod
    def neutral(cls, tokens: int) -> TokenRecord:
        """Of tokens that were not sampled."""
        counts, ids = torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        return cls(torch.zeros(tokens), torch.ones(tokens), counts, ids)

    @classmethod
    def of_kept(cls, kept_ids: Sequence[Sequence[int]], logps: Sequence[float | None] | None) -> TokenRecord:
        """Of a `rollout_func`, from the ids that each token was sampled from; NaN for what it does not say."""
        tokens = len(kept_ids)
        known = [math.nan if value is None else value for value in logps or [None] * tokens]
        counts = torch.tensor([len(ids) for ids in kept_ids], dtype=torch.int32)
        ids_K = torch.tensor([token for ids in kept_ids for token in ids], dtype=torch.int32)
        return cls(torch.tensor(known), torch.full((tokens,), math.nan), counts, ids_K)

    @classmethod
    def joined(cls, parts: Sequence[TokenRecord]) -> TokenRecord:
        """The records of tokens that follow each other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def first(self, tokens: int) -> TokenRecord:
        """The first tokens."""
        counts_T = self.counts_T[:tokens]
        ids = int(counts_T.clamp(min=0).sum())
        return TokenRecord(self.logps_T[:tokens], self.mass_T[:tokens], counts_T, self.ids_K[:ids])


@dataclass
class Recorder(LogitsProcessor):
    """Records the tokens of a `generate` call; as the first of the filters it sees the scores before them.

    Attributes:
        temperature: what the filters divide the scores by; None: nothing is truncated, so the kept mass is 1.
        bound: the most ids that a token keeps; None: no ids are recorded.
        kinds: without ids, the `counts_T` of the tokens at the first positions, and of all that follow.
    """

    temperature: float | None = None
    bound: int | None = None
    kinds: Sequence[int] = (0,)
    _before_B: torch.Tensor | None = None
    _kept: tuple[torch.Tensor, torch.Tensor] | None = None  # of `bounded`: counts and ids
    _steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    _recorded: int = 0  # steps on the host
    _parts: dict[int, list[TokenRecord]] = field(default_factory=dict)  # of each row
    _numbers_B: torch.Tensor | None = None  # of the rows that are left, among all

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.temperature is not None:
            self._before_B = (scores / self.temperature).logsumexp(1)
        return scores

    def bounded(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The scores with at most `bound` tokens left, which filters exceed where scores are equal."""
        if self.bound is None:
            return scores_BV
        values_BN, ids_BN = scores_BV.topk(min(self.bound, scores_BV.size(1)), dim=1)
        self._kept = (values_BN > -torch.inf).sum(1, dtype=torch.int32), ids_BN.int()
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, ids_BN, values_BN)

    def add(self, scores_BV: torch.Tensor, tokens_B: torch.Tensor, probabilities_B: torch.Tensor) -> None:
        """Record the tokens that were drawn from `scores_BV`."""
        logps_B = probabilities_B.log().float()
        mass_B = torch.ones_like(logps_B)
        if self._before_B is not None:
            mass_B = (scores_BV.gather(1, tokens_B[:, None]).squeeze(1).float() - self._before_B - logps_B).exp()
        ids_BN = tokens_B.new_zeros(len(tokens_B), 0, dtype=torch.int32)
        if self.bound is None:
            position = self._recorded + len(self._steps)
            counts_B = torch.full_like(tokens_B, self.kinds[min(position, len(self.kinds) - 1)], dtype=torch.int32)
        else:
            assert self._kept is not None
            counts_B, ids_BN = self._kept
        self._steps.append((logps_B, mass_B, counts_B, ids_BN))
        if self._numbers_B is None:
            self._numbers_B = torch.arange(len(tokens_B), device=tokens_B.device)
        if len(self._steps) == _AT_ONCE:
            self._flush()

    def keep(self, index: torch.Tensor) -> None:
        """Go on with these rows only."""
        self._flush()
        assert self._numbers_B is not None
        self._numbers_B = self._numbers_B[index]

    def _flush(self) -> None:
        """Bring the latest steps to the host, without room for ids that were not kept."""
        if not self._steps or self._numbers_B is None:
            return
        logps_BT, mass_BT, counts_BT, ids_BTN = (torch.stack(column, dim=1).cpu() for column in zip(*self._steps))
        self._steps.clear()
        self._recorded += logps_BT.size(1)
        kept_BTN = torch.arange(ids_BTN.size(2)) < counts_BT[:, :, None]
        rows = zip(self._numbers_B.tolist(), logps_BT, mass_BT, counts_BT, ids_BTN, kept_BTN)
        for number, logps_T, mass_T, counts_T, ids_TN, kept_TN in rows:
            self._parts.setdefault(number, []).append(TokenRecord(logps_T, mass_T, counts_T, ids_TN[kept_TN]))

    def records(self, lengths: Sequence[int]) -> list[TokenRecord]:
        """The records of all rows, the first tokens of each."""
        self._flush()
        return [TokenRecord.joined(self._parts[row]).first(length) for row, length in enumerate(lengths)]

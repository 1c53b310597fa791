"""What the sampler knows of each token it draws: its probability, and the tokens that the filters had kept.

transformers keeps neither. Used by rollouts.keyed, which draws the tokens; read by `join`. Shapes: B rows, T tokens,
V vocabulary, K kept ids of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import LogitsProcessor

from ..forward.sampling_masks import first_tokens
from .expert_record import ExpertRecorder

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
        """Records of tokens that were not sampled."""
        counts, ids = torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        return cls(torch.zeros(tokens), torch.ones(tokens), counts, ids)

    @classmethod
    def of_kept(cls, kept_ids: Sequence[Sequence[int]], logps: Sequence[float | None] | None) -> TokenRecord:
        """Records from the `kept_ids` and log-probabilities of a `rollout_func` or of vLLM; NaN where there are none."""
        tokens = len(kept_ids)
        known = [math.nan if value is None else value for value in logps or [None] * tokens]
        counts = torch.tensor([len(ids) for ids in kept_ids], dtype=torch.int32)
        ids_K = torch.tensor([token for ids in kept_ids for token in ids], dtype=torch.int32)
        return cls(torch.tensor(known), torch.full((tokens,), math.nan), counts, ids_K)

    @classmethod
    def joined(cls, parts: Sequence[TokenRecord]) -> TokenRecord:
        """The records of several turns, one after the other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def first(self, tokens: int) -> TokenRecord:
        """The records of the first tokens."""
        ids = first_tokens(self.counts_T, self.ids_K, tokens)
        return TokenRecord(self.logps_T[:tokens], self.mass_T[:tokens], *ids)


@dataclass
class Recorder(LogitsProcessor):
    """Records the tokens of a `generate` call; as the first of the filters it sees the scores before them.

    Attributes:
        temperature: what the filters divide the scores by; None: nothing is truncated, so the kept mass is 1.
        bound: the most ids that a token keeps; None: no ids are recorded.
        kinds: without ids, the `counts_T` of the tokens at the first positions; the last also counts for what follows.
        experts: records the experts of each token; None where they are not replayed.
    """

    temperature: float | None = None
    bound: int | None = None
    kinds: Sequence[int] = (0,)
    experts: ExpertRecorder | None = None
    _before_B: torch.Tensor | None = None  # log-sum of the scores before the filters
    _bounded: tuple[torch.Tensor, ...] = ()  # counts and ids of the scores that are drawn from
    _numbers_B: torch.Tensor | None = None  # of the rows that are left, among all
    _steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # numbers of rows, and columns of `add`
    _parts: dict[int, list[TokenRecord]] = field(default_factory=dict)  # of each row, on the host

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.temperature is not None:
            self._before_B = (scores / self.temperature).logsumexp(1)
        return scores

    def bounded(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The scores with at most `bound` tokens left, which filters exceed where scores are equal."""
        if self.bound is None:
            return scores_BV
        values_BN, ids_BN = scores_BV.topk(min(self.bound, scores_BV.size(1)), dim=1)
        self._bounded = (values_BN > -torch.inf).sum(1, dtype=torch.int32), ids_BN.int()
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, ids_BN, values_BN)

    def add(self, scores_BV: torch.Tensor, tokens_B: torch.Tensor, probabilities_BV: torch.Tensor) -> None:
        """Record the tokens that were drawn from `scores_BV`, whose softmax are the probabilities."""
        tokens_B1 = tokens_B[:, None]
        probabilities_B = probabilities_BV.gather(1, tokens_B1).squeeze(1)
        mass: tuple[torch.Tensor, ...] = ()
        if self._before_B is not None:
            mass = ((scores_BV.gather(1, tokens_B1).squeeze(1) - self._before_B).exp() / probabilities_B,)
        if self._numbers_B is None:
            self._numbers_B = torch.arange(len(tokens_B), device=tokens_B.device)
        experts = () if self.experts is None else (self.experts.newest(len(tokens_B)),)
        self._steps.append((self._numbers_B, probabilities_B, *mass, *self._bounded, *experts))
        if len(self._steps) == _AT_ONCE:
            self._flush()

    def keep(self, index: torch.Tensor) -> None:
        """Go on with these rows only."""
        assert self._numbers_B is not None
        self._numbers_B = self._numbers_B[index]

    def _flush(self) -> None:
        """Bring the latest steps to the host, without room for ids that were not kept."""
        if not self._steps:
            return
        numbers_N, probabilities_N, *others = (torch.cat(column).cpu() for column in zip(*self._steps))
        self._steps.clear()
        if self.experts is not None:
            self.experts.steps.append((numbers_N, others.pop()))
        order_N = numbers_N.argsort(stable=True)
        logps_N = probabilities_N.log().float()[order_N]
        mass_N = torch.ones_like(logps_N) if self.temperature is None else others.pop(0).float()[order_N]
        nothing_N1 = torch.zeros(len(order_N), 1, dtype=torch.int32)
        counts_N, ids_NK = (part[order_N] for part in others or (nothing_N1[:, 0], nothing_N1[:, 1:]))
        lengths = numbers_N.bincount()
        ids_lengths = torch.zeros_like(lengths).index_add_(0, numbers_N[order_N], counts_N.long())
        ids_K = ids_NK[torch.arange(ids_NK.size(1)) < counts_N[:, None]]
        columns = (column.split(lengths.tolist()) for column in (logps_N, mass_N, counts_N))
        for row, parts in enumerate(zip(*columns, ids_K.split(ids_lengths.tolist()))):
            self._parts.setdefault(row, []).append(TokenRecord(*parts))

    def records(self, lengths: Sequence[int]) -> list[TokenRecord]:
        """The records of the first tokens of each row.

        Tokens after the last one that was drawn are neutral: padding after an end token that `generate` knows alone.
        """
        self._flush()
        records = []
        for row, length in enumerate(lengths):
            record = TokenRecord.joined([*self._parts[row], TokenRecord.neutral(length)]).first(length)
            if self.bound is None:
                kinds = torch.tensor(self.kinds, dtype=torch.int32)
                record = replace(record, counts_T=kinds[torch.arange(length).clamp(max=len(kinds) - 1)])
            records.append(record)
        return records

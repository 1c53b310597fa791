"""Records what the sampler knows of each token: its probability, the tokens that the filters kept, its experts.

transformers returns none of them. Used by rollouts.keyed, which draws the tokens; read by `join`. Shapes: B rows, T
tokens, N tokens of all rows, V vocabulary, K kept ids of all tokens, C choices of all routers (forward.routing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import LogitsProcessor

from ..forward.routing import LIVE, Routing
from ..forward.sampling_masks import KeptIds

_AT_ONCE = 64  # tokens whose records are brought to the host together


class TokenRecord(NamedTuple):
    """The records of a completion's tokens, on the CPU; neutral for tokens of tools and environments."""

    logps_T: torch.Tensor  # log-probability of each token, after every filter
    mass_T: torch.Tensor  # the share of the probability that the filters had kept
    counts_T: torch.Tensor  # with `ids_K`: of `KeptIds`; no ids without replay
    ids_K: torch.Tensor

    @classmethod
    def neutral(cls, tokens: int) -> TokenRecord:
        counts, ids = torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        return cls(torch.zeros(tokens), torch.ones(tokens), counts, ids)

    @classmethod
    def of_kept(cls, kept_ids: Sequence[Sequence[int]], logps: Sequence[float | None] | None) -> TokenRecord:
        """Records from the kept ids and log-probabilities of a `rollout_func` or of vLLM; NaN where it gives none."""
        tokens = len(kept_ids)
        known = [math.nan if value is None else value for value in logps or [None] * tokens]
        counts = torch.tensor([len(ids) for ids in kept_ids], dtype=torch.int32)
        ids_K = torch.tensor([token for ids in kept_ids for token in ids], dtype=torch.int32)
        return cls(torch.tensor(known), torch.full((tokens,), math.nan), counts, ids_K)

    @classmethod
    def joined(cls, parts: Sequence[TokenRecord]) -> TokenRecord:
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @property
    def kept(self) -> KeptIds:
        return KeptIds(self.counts_T, self.ids_K)

    def first(self, tokens: int) -> TokenRecord:
        return TokenRecord(self.logps_T[:tokens], self.mass_T[:tokens], *self.kept.first(tokens))


@dataclass
class Recorder(LogitsProcessor):
    """Records the tokens of a `generate` call; as the first of the filters it sees the scores before them."""

    temperature: float | None = None  # the filters divide scores by it; None: nothing is truncated, so all mass is kept
    bound: int | None = None  # the most ids that a token keeps; None: no ids are recorded
    kinds: Sequence[int] = (0,)  # without ids: the `counts_T` of the first positions; the last one holds for the rest
    routing: Routing | None = None  # records experts (`forward.routing.routed` is around the call); None: not recorded
    _before_B: torch.Tensor | None = None  # log-sum of the scores before the filters
    _bounded: tuple[torch.Tensor, ...] = ()  # counts and ids of the scores that are drawn from
    _position: int = 0  # of the token that is drawn next
    _numbers_B: torch.Tensor | None = None  # of the rows that are left, among all
    _prompts_NC: torch.Tensor | None = None  # experts of the first forward's tokens
    # row numbers and the columns of `add`; columns that are equal for all rows stay on the CPU, without a launch
    _steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    _parts: dict[int, list[TokenRecord]] = field(default_factory=dict)  # of each row, on the host
    _experts: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of each row, on the host

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.temperature is not None:
            self._before_B = (scores / self.temperature).logsumexp(1)
        return scores

    def bounded(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The scores with at most `bound` tokens left (filters keep more at equal scores); precedes each `add`."""
        if self.bound is None:
            kind = self.kinds[min(self._position, len(self.kinds) - 1)]
            counts_B = torch.full((len(scores_BV),), kind, dtype=torch.int32)
            self._bounded = counts_B, counts_B.new_empty(len(counts_B), 0)
            return scores_BV
        values_BN, ids_BN = scores_BV.topk(min(self.bound, scores_BV.size(1)), dim=1)
        self._bounded = (values_BN > -torch.inf).sum(1, dtype=torch.int32), ids_BN.int()
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, ids_BN, values_BN)

    def add(self, scores_BV: torch.Tensor, tokens_B: torch.Tensor, probabilities_BV: torch.Tensor) -> None:
        tokens_B1 = tokens_B[:, None]
        probabilities_B = probabilities_BV.gather(1, tokens_B1).squeeze(1)
        mass_B = torch.ones(len(tokens_B))
        if self._before_B is not None:
            mass_B = (scores_BV.gather(1, tokens_B1).squeeze(1) - self._before_B).exp() / probabilities_B
        if self._numbers_B is None:
            self._numbers_B = torch.arange(len(tokens_B), device=tokens_B.device)
        self._steps.append((self._numbers_B, probabilities_B, mass_B, *self._bounded, self._newest(tokens_B)))
        self._position += 1
        if len(self._steps) == _AT_ONCE:
            self._flush()

    def _newest(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """The experts (B, C) of the token before each of these; `LIVE` after the forward of the prompts."""
        if self.routing is None:
            return torch.empty(len(tokens_B), 0)
        experts_NC = self.routing.take()
        if self._prompts_NC is None:
            self._prompts_NC = experts_NC.cpu()
            return experts_NC.new_full((len(tokens_B), experts_NC.size(1)), LIVE)
        # without a cache, every forward runs all tokens
        return experts_NC.view(len(tokens_B), -1, experts_NC.size(1))[:, -1]

    def keep(self, index: torch.Tensor) -> None:
        assert self._numbers_B is not None
        self._numbers_B = self._numbers_B[index]

    def _flush(self) -> None:
        """Copy the latest steps to the host, without the ids that were not kept."""
        if not self._steps:
            return
        numbers_N, *columns = (torch.cat(column).cpu() for column in zip(*self._steps, strict=True))
        self._steps.clear()
        order_N, lengths = numbers_N.argsort(stable=True), numbers_N.bincount().tolist()
        rows = zip(*(column[order_N].split(lengths) for column in columns), strict=True)
        for row, (probabilities_T, mass_T, counts_T, ids_TK, experts_TC) in enumerate(rows):
            ids_K = ids_TK[torch.arange(ids_TK.size(1)) < counts_T[:, None]]
            record = TokenRecord(probabilities_T.log().float(), mass_T.float(), counts_T, ids_K)
            self._parts.setdefault(row, []).append(record)
            self._experts.setdefault(row, []).append(experts_TC)

    def records(self, lengths: Sequence[int]) -> list[TokenRecord]:
        self._flush()
        return [TokenRecord.joined(self._parts[row]).first(length) for row, length in enumerate(lengths)]

    def experts(self, contexts: Sequence[int], prompts_B: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """The experts (N, C) of the prompt and the first tokens of each row; `LIVE` for the last, which never ran.

        `contexts` are the tokens of each prompt of the first forward, `prompts_B` for every row the number of its
        prompt.
        """
        self._flush()
        assert self._prompts_NC is not None
        prompts_PWC = self._prompts_NC.view(len(contexts), -1, self._prompts_NC.size(1))
        last_1C = self._prompts_NC.new_full((1, self._prompts_NC.size(1)), LIVE)
        return [
            torch.cat([prompts_PWC[prompt, -contexts[prompt] :], torch.cat(self._experts[row])[1:length], last_1C])
            for row, (prompt, length) in enumerate(zip(prompts_B, lengths, strict=True))
        ]

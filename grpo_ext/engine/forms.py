"""Which form a model's forward takes (pack, padded batch, TRL's own), decided once for each model and said once.

Differs from TRL, which always pads. Called by the trainer for the policy and the reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ..core.micro_batches import TokenCost
from ..errors import ModelError
from .checks import accepts_positions
from .collectives import any_process
from .memory import Halving
from .pack_check import Evidence, Trial, telling_rows, try_pack
from .packed_forward import read_batch, score_packed, score_padded, why_not_packed
from .scoring import with_positions

logger = get_logger(__name__)


def token_cost(policy: Any) -> TokenCost:
    """What a token costs in this model, from the sizes in its configuration and its weights."""
    config = policy.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 1)
    heads = getattr(config, "num_attention_heads", 1)
    hidden = getattr(config, "hidden_size", 1)
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    head = getattr(config, "vocab_size", 0) * hidden
    tied = policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    weights = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())  # whole also where ZeRO-3 has cut it
    body = max(weights - (1 if tied else 2) * head, 1)
    experts, chosen = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    if experts and chosen:
        body = body * chosen // experts  # most of it is experts
    return TokenCost.of_model(layers, width, body, head)


def _is_prompt_learning(model: Any) -> bool:
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


class Forms:
    """Chooses how a model's completions are scored.

    The cost rule between the forms: a pack computes `prompt + sum of completions` tokens, a padded batch
    `rows * (longest prompt + longest completion)`: never less. So a model that can run packs always does; inside a
    pack, `engine.attention.split_is_cheaper` decides for each group how its attention is computed.
    """

    def __init__(
        self,
        packed: bool,
        score_completions_only: bool,
        device: torch.device,
        may_cut: bool = True,
        multiple: int | None = None,
    ) -> None:
        self.packed, self.score_completions_only, self.multiple = packed, score_completions_only, multiple or 1
        self.device = device
        self._memory = Halving("comparing packed with padded", "set packed_forward=False", may_cut)
        self._reasons: dict[int, str | None] = {}
        self._evidence: dict[int, Evidence] = {}

    def packs(self, policy: Any, wrapped: Any = None) -> bool:
        """Whether `policy` runs packs; says once why not, where that was asked for."""
        if not self.packed:
            return False
        if id(policy) not in self._reasons:
            reason = "prompt-learning adapters add tokens" if _is_prompt_learning(wrapped) else why_not_packed(policy)
            self._conclude(policy, reason)
        return self._reasons[id(policy)] is None

    def _conclude(self, policy: Any, reason: str | None) -> None:
        if reason is not None and reason not in self._reasons.values():  # policy and reference are often of one kind
            logger.warning(f"packed_forward is off, padded batches run instead: {reason}.")
        self._reasons[id(policy)] = reason

    def scorer(
        self, policy: Any, wrapped: Any, stock: Callable[..., Any], recomputed_outside: bool = False
    ) -> Callable[..., Any]:
        """A function with the signature of TRL's `_get_per_token_logps_and_entropies`.

        Args:
            policy: the causal language model.
            wrapped: it, as PEFT wraps it.
            stock: TRL's own method, for what the other forms cannot do.
            recomputed_outside: gradient checkpointing will run the layers again where packs are off.
        """
        if self.packs(policy, wrapped) and not recomputed_outside:
            return partial(_as_trl, partial(score_packed, multiple=self.multiple), policy)
        if self.score_completions_only and not _is_prompt_learning(wrapped):
            return partial(_as_trl, score_padded, policy)
        return partial(_positioned, stock) if accepts_positions(policy) else stock

    def check(self, model: Any, policy: Any, wrapped: Any, batch: Callable[[], tuple[Any, Any, int]]) -> None:
        """Before the first pack of a model, run both forms on real completions; every process reaches this together.

        What one process finds holds for all. Where the completions at hand cannot tell (one token each; none longer
        than the sliding window), the next ones are looked at too.

        Args:
            batch: makes ids, attention mask and completion width of this process's completions.

        Raises:
            ModelError: on every process, where the two differ by more than rounding on one of them.
        """
        evidence = self._evidence.setdefault(id(policy), Evidence())
        if evidence.settled or not self.packs(policy, wrapped):
            return
        ids, mask, width = batch()
        prompts, completions, _ = read_batch(ids, mask, width)
        rows = telling_rows(prompts, completions, evidence.longer_than)
        if not any_process(rows is not None, self.device):
            return
        part = rows or slice(0, 1)  # a forward may be a collective, so all processes run it

        def work(piece: Sequence[int]) -> Trial:
            some = slice(piece[0], piece[-1] + 1)
            return try_pack(model, policy, ids[some], mask[some], width)

        trials = gather_object(self._memory.run(range(part.start, part.stop), work))
        difference = next((trial.difference for trial in trials if trial.difference), None)
        if difference is not None:
            raise ModelError(f"{difference}. Set packed_forward=False.")
        reason = next((trial.refused for trial in trials if trial.refused), None)
        if reason is not None:
            self._conclude(policy, reason)
        evidence.add(trials)


def _as_trl(
    score: Callable[..., Any],
    policy: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **nothing: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    logps, entropies, aux_loss = score(model, policy, input_ids, attention_mask, logits_to_keep, compute_aux_loss)
    return logps, entropies if compute_entropy else None, aux_loss


def _positioned(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    return stock(with_positions(model), *args, **kwargs)

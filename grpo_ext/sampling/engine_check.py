"""Compares vLLM's log-probabilities of the tokens it sampled with the trainer's own: have the weights arrived?

An engine that samples with other weights raises no error: importance-sampling ratios absorb the difference, or nothing
does. vLLM returns the log-probabilities with the completions, so the check adds no request.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RolloutError
from ..settings import named

# sampling parameters of vLLM that do not change the distribution
NEUTRAL = {
    *("seed", "n", "max_tokens", "logprobs", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", *named("to_vllm")),
}
_UNIT_ROUNDOFF = 2.0**-8  # of bfloat16
_SPREAD = 8.0  # nats: the range in which the logits of likely tokens lie


def rounding_bound(layers: int) -> float:
    """The largest mean difference (nats) of two log-probabilities of a token that rounding in half precision explains.

    Each of the `2 * layers` sublayers adds to the residual stream and rounds it, by `2**-8` at most in bfloat16. The
    roundings are independent, so relative to its size the last hidden state is off by `2**-8 * sqrt(2 * layers)`, and
    the logits by that part of their range. 30 layers: 0.24; two forms of SmolLM2-135M differ by 0.02 to 0.04.
    """
    return _SPREAD * _UNIT_ROUNDOFF * math.sqrt(2 * layers)


def surplus_of(generation: Any, logprobs_mode: str) -> float | None:
    """How far (nats) vLLM's log-probability of a token may exceed the trainer's where both have the same weights.

    The trainer's are those of the whole distribution at the temperature. vLLM's "processed" ones are of the part that
    filters leave: at least `top_p` of it; what `top_k` and `min_p` leave is taken to be half of it or more. Its "raw"
    ones are before filters and temperature. None: they cannot be compared (penalties, a grammar, logits instead).
    `generation` is TRL's `VLLMGeneration`, for its settings.
    """
    further = generation.generation_kwargs or {}
    setting = {name: getattr(generation, name) for name in named("to_vllm")} | dict(further)
    if logprobs_mode == "raw_logprobs":
        return 0.0 if generation.temperature == 1.0 else None
    penalised = setting["repetition_penalty"] != 1.0 or generation.structured_outputs_regex is not None
    if logprobs_mode != "processed_logprobs" or penalised or further.keys() - NEUTRAL:
        return None
    others = (setting["top_k"] or 0) > 0 or setting["min_p"]
    return -math.log(setting["top_p"]) + (math.log(2) if others else 0.0)


@dataclass
class EngineCheck:
    surplus: Callable[[], float | None]  # see `surplus_of`; read once, before the first comparison
    bound: float  # see `rounding_bound`
    done: bool = False  # a rollout batch was compared

    def compare(self, mask_S: torch.Tensor, trainer_S: torch.Tensor | None, engine_S: torch.Tensor | None) -> None:
        """Compare log-probabilities of tokens where the mask is 1; a RolloutError if rounding cannot explain them."""
        self.done, surplus = True, self.surplus()
        if surplus is None or trainer_S is None or engine_S is None:
            return
        excess = (engine_S - trainer_S)[mask_S.bool()].double()
        excess = excess[~excess.isnan()]
        off = excess.clamp(max=0).neg() + (excess - surplus).clamp(min=0)
        if len(off) and not (mean := off.mean().item()) <= self.bound:
            raise RolloutError(
                f"vLLM's log-probabilities of the {len(off)} tokens it sampled differ from the trainer's by {mean:.3g} "
                f"nats on average (at most {off.max().item():.3g}); rounding in half precision explains "
                f"{self.bound:.2g}. The engine samples with other weights or at another temperature: check that it "
                "serves this model, in a precision like the trainer's, and that weights reach it. If the difference is "
                "known and wanted (for example a top_k that leaves less than half), set vllm_check=False."
            )

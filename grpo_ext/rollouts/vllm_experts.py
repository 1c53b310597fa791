"""The experts that vLLM sent each token to, for `routing_replay`: when it is asked for them, and what is refused.

A colocated engine returns them where its version takes `enable_return_routed_experts` (0.31, with its Model Runner V2,
not on CPUs): those of all layers, for the tokens of prompt and completion except the last. Elsewhere they are recorded
with the log-probabilities of the policy. Called by rollouts.build and rollouts.vllm. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..errors import RolloutError
from ..forward.routing import LIVE, Router


def why_recorded_later(args: Any) -> str | None:
    """Why vLLM is not asked for experts, as a clause; None where it is."""
    if args.vllm_mode == "server":
        return "TRL's client of a vLLM server returns no experts"
    return compat.why_no_experts()


def asks_for_experts(args: Any, rollout_func: Any) -> bool:
    """Whether a colocated engine is told to return experts; a `rollout_func` samples in its own way."""
    return bool(args.use_vllm and args.routing_replay) and rollout_func is None and why_recorded_later(args) is None


def experts_of(routed: Any, tokens: int, routers: Sequence[Router]) -> torch.Tensor:
    """The experts (tokens, C) of a prompt and its completion; `LIVE` for the last token, which never ran.

    Args:
        routed: vLLM's array [tokens - 1, decoder layers, K], zeros in layers without experts; None: not returned.
        tokens: of prompt and completion.

    Raises:
        RolloutError: the array is missing, of another shape, or holds what no router chooses.
    """
    layers = [router.layer for router in routers]
    if routed is None:
        raise _unusable("none", tokens)
    shape = tuple(routed.shape)
    fits = len(shape) == 3 and shape[0] == tokens - 1 and 0 <= min(layers) and max(layers) < shape[1]
    if not fits or {router.width for router in routers} != {shape[2]}:
        choices = sorted({router.width for router in routers})
        raise _unusable(f"an array {shape}, where routers of layers {layers} choose {choices} each", tokens)
    experts_NRK = torch.from_numpy(routed[:, layers].astype("int32"))
    limits_R1 = torch.tensor([[router.experts] for router in routers])
    if bool((outside := (experts_NRK < 0) | (experts_NRK >= limits_R1)).any()):
        most = int(limits_R1.max())
        raise _unusable(f"expert {int(experts_NRK[outside][0])}, where routers have up to {most}", tokens)
    ordered_NRK = experts_NRK.sort(-1).values
    if bool((ordered_NRK[..., 1:] == ordered_NRK[..., :-1]).any()):
        raise _unusable("one expert twice in the choice of a router", tokens)
    dtype = max(routers, key=lambda router: router.experts).dtype
    return torch.nn.functional.pad(experts_NRK.flatten(1).to(dtype), (0, 0, 0, 1), value=LIVE)


def _unusable(returned: str, tokens: int) -> RolloutError:
    return RolloutError(
        "routing_replay=True: vLLM was told to return the experts of every token but the last "
        f"(enable_return_routed_experts=True), and returned {returned}, for {tokens} tokens of a prompt and its "
        "completion; use another version of vLLM, or vllm_mode='server', where experts are recorded with the "
        "log-probabilities, or leave routing_replay out."
    )

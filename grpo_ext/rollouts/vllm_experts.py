"""Reads the experts that a colocated vLLM engine returns, for `routing_replay`. Not run on a GPU.

vLLM returns those of all layers, for the tokens of prompt and completion except the last. Where it returns none
(`compat.why_no_experts`) they are recorded with the log-probabilities of the policy. Called by rollouts.vllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import RolloutError
from ..forward.routing import LIVE, Router


def experts_of(routed: Any, tokens: int, routers: Sequence[Router]) -> torch.Tensor:
    """The experts (tokens, C) of a prompt and its completion; `LIVE` for the last token, which never ran.

    Args:
        routed: vLLM's array [tokens - 1, decoder layers, K], zeros in layers without experts; None: not returned.
        tokens: of prompt and completion.

    Raises:
        RolloutError: the array is missing, of another shape, or holds what no router chooses.
    """
    layers, experts = [router.layer for router in routers], [router.experts for router in routers]
    returned, choices = "none", routers[0].choices
    if routed is not None:
        shape = tuple(routed.shape)
        returned = f"an array {shape}, where routers of layers {layers} make {choices} choices,"
        fits = len(shape) == 3 and shape[0] == tokens - 1 and min(layers) >= 0 and max(layers) < shape[1]
        if fits and len(layers) * shape[2] == choices:
            experts_NRK = torch.from_numpy(routed[:, layers].astype("int32"))
            ordered_NRK = experts_NRK.sort(-1).values
            unknown_NR = (ordered_NRK[..., 0] < 0) | (ordered_NRK[..., -1] >= torch.tensor(experts))
            unknown_NR |= (ordered_NRK[..., 1:] == ordered_NRK[..., :-1]).any(-1)
            if not unknown_NR.any():
                dtype = max(routers, key=lambda router: router.experts).dtype
                return torch.nn.functional.pad(experts_NRK.flatten(1).to(dtype), (0, 0, 0, 1), value=LIVE)
            returned = f"{experts_NRK[unknown_NR][0].tolist()} as a choice of different experts out of {max(experts)},"
    raise RolloutError(
        "routing_replay=True: vLLM was told to return the experts of every token but the last "
        f"(enable_return_routed_experts=True), and returned {returned} for {tokens} tokens of prompt and completion; "
        "use another version of vLLM, or vllm_mode='server', where they are recorded with the log-probabilities, or "
        "leave routing_replay out."
    )

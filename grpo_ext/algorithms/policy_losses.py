"""Policy losses by name, and a check before training that the split does not change a registered one.

Shapes: B completions, T completion tokens (padded).
"""

from collections.abc import Callable

import torch

from ..errors import ConfigError
from ..loading import load_named

PPO_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*PPO_CLIPPED, "cispo", "sapo", "vespo")
PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# those that users registered, and whether a completion with advantage zero adds nothing to them
POLICY_LOSSES: dict[str, tuple[PolicyLoss, bool]] = {}
_TOLERANCE = 1e-5  # of losses of order one in float32


def register_policy_loss(name: str, zero_at_zero_advantage: bool = False) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a function under a name, for `GRPOConfig(loss_type=name)`.

    The function gets log-probabilities with the gradient, (B, T), those of the old policy, (B, T), advantages, (B, 1)
    or with a teacher (B, T), and the mask, (B, T), 1 on tokens that carry loss; it returns a loss per token, (B, T).
    Weights, masks, corrections and the KL term come on top. Completions with advantage zero are run, unless
    `zero_at_zero_advantage` says that they add nothing. A ConfigError if a loss of this package has the name.
    """

    def register(function: PolicyLoss) -> PolicyLoss:
        if name in LOSS_TYPES:
            raise ConfigError(f"policy loss {name!r} comes with grpo_ext; choose another name.")
        POLICY_LOSSES[name] = (function, zero_at_zero_advantage)  # a cell of a notebook may run again
        return function

    return register


def check_loss_type(name: str) -> None:
    """Register `path/to/file.py:function`; raise a ConfigError for any other name that is not registered."""
    if name not in POLICY_LOSSES and ".py:" in name:
        register_policy_loss(name)(load_named(name, f"loss_type={name!r}", Callable))
    if name not in (names := [*LOSS_TYPES, *POLICY_LOSSES]):
        raise ConfigError(f"loss_type={name!r} is unknown; use one of {', '.join(names)}, or path/to/file.py:function.")


def adds_at_zero_advantage(loss_type: str) -> bool:
    """Whether a completion with advantage zero adds to the loss or its log ("vespo": a weight of every sequence)."""
    return loss_type == "vespo" or (loss_type in POLICY_LOSSES and not POLICY_LOSSES[loss_type][1])


def check_policy_loss(name: str, per_token: bool = False) -> None:
    """Call a registered loss on four completions, and on each alone; a ConfigError where it breaks a rule.

    `per_token`: advantages are those of a run with a teacher, (B, T).
    """
    function, zero_at_zero = POLICY_LOSSES[name]
    lengths: tuple[int, ...] = (5, 3, 1, 4)
    logps_BT, old_BT = -1.5 + 0.4 * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    mask_BT = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()

    def terms(rows: slice, advantages: tuple[float, ...] = (1.0, -0.5, 0.3, -2.0)) -> torch.Tensor:
        """Losses and gradients of the tokens that carry loss, (2, B, T), of a micro-batch as wide as it needs."""
        logps, old, mask = (part_BT[rows, : max(lengths[rows])] for part_BT in (logps_BT, old_BT, mask_BT))
        logps = logps.clone().requires_grad_()
        weights = old_BT[rows, : max(lengths[rows])] if per_token else 1.0
        loss = function(logps, old, torch.tensor(advantages)[rows, None] * weights, mask)
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        if shape != tuple(mask.shape) or not loss.requires_grad or not bool(loss.isfinite().all()):
            raise ConfigError(
                f"policy loss {name!r} returned {shape} for log-probabilities of shape {tuple(mask.shape)}; return a "
                "finite loss for each token, padding too, that depends on the first argument."
            )
        gradient = torch.autograd.grad((loss * mask).sum(), logps)[0]
        return torch.stack([loss.detach(), gradient]) * mask

    whole = terms(slice(0, 4))
    for row, length in enumerate(lengths):
        alone, among = terms(slice(row, row + 1))[:, 0], whole[:, row, :length]
        if float((alone - among).abs().max()) > _TOLERANCE:
            raise ConfigError(
                f"policy loss {name!r} depends on the split: the losses of a completion are {alone[0].tolist()} alone, "
                f"and {among[0].tolist()} beside others (or their gradients differ). Compute each token from its own "
                "row, and leave means to loss_aggregation."
            )
    if zero_at_zero and bool(terms(slice(0, 4), (0.0,) * 4).any()):
        raise ConfigError(
            f"policy loss {name!r} was registered with zero_at_zero_advantage=True, but completions with advantage "
            "zero add to it; leave that out, so that they run."
        )

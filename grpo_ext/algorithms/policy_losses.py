"""Policy losses by name, and a check before training that the split does not change a registered one.

Shapes: B completions, T completion tokens (padded), S tokens of all completions without padding.
"""

from collections.abc import Callable

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import ConfigError
from ..loading import require_registered

PPO_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*PPO_CLIPPED, "cispo", "sapo", "vespo")
PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# those that users registered, and whether a completion with advantage zero adds nothing to them
POLICY_LOSSES: dict[str, tuple[PolicyLoss, bool]] = {}
_TOLERANCE = 1e-5  # of the largest loss or gradient, in float32


def register_policy_loss(name: str, zero_at_zero_advantage: bool = False) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a function under a name, for `GRPOConfig(loss_type=name)`.

    The function gets log-probabilities with the gradient, (B, T), those of the old policy, (B, T), advantages, (B, 1)
    or with a teacher (B, T), and the mask, (B, T), 1 on tokens that carry loss; it returns a loss per token, (B, T).
    Weights, masks, corrections and the KL term come on top. Completions with advantage zero are run, unless
    `zero_at_zero_advantage` says that they add nothing. A ConfigError if a loss of this package has the name. A
    configuration refuses a function that depends on the split.
    """
    if not isinstance(name, str) or name in LOSS_TYPES:
        raise ConfigError(f"policy loss {name!r} comes with grpo_ext, or is not a string; choose another name.")

    def register(function: PolicyLoss) -> PolicyLoss:
        POLICY_LOSSES[name] = (function, zero_at_zero_advantage)  # a cell of a notebook may run again
        return function

    return register


def check_loss_type(name: str) -> None:
    """Raise a ConfigError for a loss that neither this package nor a user's registration nor a file has."""
    require_registered(name, "loss_type", register_policy_loss, lambda: [*LOSS_TYPES, *POLICY_LOSSES])


def adds_at_zero_advantage(loss_type: str) -> bool:
    """Whether a completion with advantage zero adds to the loss or its log ("vespo": a weight of every sequence)."""
    return loss_type == "vespo" or (loss_type in POLICY_LOSSES and not POLICY_LOSSES[loss_type][1])


def registered_loss(name: str, lengths: list[int], logps_S: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The losses of a registered function, (S,), which gets padded copies, and may write to those of the `others`.

    `lengths`: tokens of each row. Values of rows, (B, 1), are not padded.
    """
    if not len(logps_S):
        return logps_S
    given = (v if v.dim() == 2 else pad_sequence(v.split(lengths), batch_first=True) for v in (logps_S, *others))
    return torch.cat([row_T[:n] for row_T, n in zip(_losses(name, *given), lengths, strict=True)])


def _losses(name: str, logps_BT: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    loss = POLICY_LOSSES[name][0](logps_BT, *(other.clone() for other in others))
    shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
    if shape != tuple(logps_BT.shape):
        raise ConfigError(
            f"policy loss {name!r} returned {shape} for log-probabilities of shape {tuple(logps_BT.shape)}; return a "
            "loss for each token, padding too."
        )
    return loss


def check_policy_loss(name: str, per_token: bool = False) -> None:
    """Call a registered loss on four completions, and on each alone; a ConfigError where it breaks a rule.

    The last one carries no loss, as one that is masked out. `per_token`: advantages are (B, T), as with a teacher.
    """
    lengths: tuple[int, ...] = (5, 3, 1, 4)
    logps_BT, old_BT = -1.5 + 0.4 * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    mask_BT = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    mask_BT[3] = 0

    def terms(rows: slice, advantages: tuple[float, ...] = (1.0, -0.5, 0.3, -2.0)) -> torch.Tensor:
        """Losses and gradients of the tokens that carry loss, (2, B, T), of a micro-batch as wide as it needs."""
        logps, old, mask = (part_BT[rows, : max(lengths[rows])] for part_BT in (logps_BT, old_BT, mask_BT))
        logps, weights = logps.clone().requires_grad_(), old if per_token else 1.0
        try:
            loss = _losses(name, logps, old, torch.tensor(advantages)[rows, None] * weights, mask)
            gradient = torch.autograd.grad((loss * mask).sum(), logps)[0]
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"policy loss {name!r} failed on log-probabilities of shape {tuple(mask.shape)}, or has no gradient "
                f"with respect to them ({error}); it takes four tensors and returns one."
            ) from error
        if not loss.isfinite().all():
            raise ConfigError(
                f"policy loss {name!r} is not finite on padding, or on a completion whose mask is zero (it carries no "
                "loss); divide by mask.sum(1, keepdim=True).clamp(min=1)."
            )
        return torch.stack([loss.detach(), gradient]) * mask

    whole = terms(slice(0, 4))
    for row, length in enumerate(lengths):
        alone, among = terms(slice(row, row + 1))[:, 0], whole[:, row, :length]
        if float((alone - among).abs().max()) > _TOLERANCE * float(whole.abs().max()):
            raise ConfigError(
                f"policy loss {name!r} depends on the split: the losses of a completion are {alone[0].tolist()} alone, "
                f"and {among[0].tolist()} beside others (or their gradients differ). Compute each token from its own "
                "row, and leave means to loss_aggregation."
            )
    if POLICY_LOSSES[name][1] and terms(slice(0, 4), (0.0,) * 4).any():
        raise ConfigError(
            f"policy loss {name!r} was registered with zero_at_zero_advantage=True, but completions with advantage "
            "zero add to it; leave that out, so that they run."
        )

"""Counter-based random numbers: the number for a token depends on its key alone, never on a generator's history.

The key is (seed, stream, rollout, prompt, generation, token position); the mixer is SplitMix64's finaliser (Steele,
Lea, Flood, OOPSLA 2014), written with 64-bit integers that wrap around. Used by rollouts.keyed.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch

TRAIN_STREAM, EVAL_STREAM, ORDER_STREAM, FURTHER_STREAM = 1, 2, 3, 4
_MASK64 = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: torch.Tensor, value: torch.Tensor | int) -> torch.Tensor:
    """Fold `value` into a tensor of 64-bit keys (int64, any shape); wraps around, never overflows."""
    x = (key ^ value) + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    return x ^ _shift_right(x, 31)


def mix_int(key: int, value: int) -> int:
    """`mix` for one Python integer; returns an unsigned 64-bit integer."""
    x = ((key ^ (value & _MASK64)) + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
    return x ^ (x >> 31)


def derive_key(*parts: int) -> int:
    """One unsigned 64-bit key from a sequence of integers; the order of the parts matters."""
    key = 0
    for part in parts:
        key = mix_int(key, part)
    return key


def completion_keys(
    seed: int, stream: int, epoch: int, rollout: int, prompts_B: torch.Tensor, generations_B: torch.Tensor
) -> torch.Tensor:
    """Keys of completions, shape (B,), int64.

    Args:
        stream: `TRAIN_STREAM` or `EVAL_STREAM`; keeps training and evaluation apart.
        epoch, rollout: index of the pass over the data, and of the generation phase in it.
        prompts_B: int64, position of the prompt in the rollout batch.
        generations_B: int64, index of the completion in its group.
    """
    start = torch.full_like(prompts_B, _signed(derive_key(seed, stream, epoch, rollout)))
    return mix(mix(start, prompts_B), generations_B)


def uniform(keys_B: torch.Tensor, positions_B: torch.Tensor | int) -> torch.Tensor:
    """Uniform numbers in [0, 1) with 53 random bits, float64, shape (B,), one per key and token position."""
    if keys_B.device.type == "mps":
        keys_B, positions_B = keys_B.cpu(), torch.as_tensor(positions_B).cpu()
    bits = _shift_right(mix(keys_B, positions_B), 11)
    return bits.to(torch.float64) * 2.0**-53


def choose(scores_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Sample one token per row by inverse transform; exactly the categorical of softmax(scores).

    A token of probability zero (score -inf) is never chosen. Computed in float64, so that neither the sum over a
    large vocabulary nor the boundary between two tokens carries float32 rounding.

    Args:
        scores_BV: logits after every filter, any float type.
        uniforms_B: float64 in [0, 1).

    Returns:
        int64 token ids, shape (B,); V, which is no token, where the scores are no distribution (not finite).
    """
    if scores_BV.device.type == "mps":  # which has no float64
        return choose(scores_BV.cpu(), uniforms_B.cpu()).to(scores_BV.device)
    probabilities_BV = torch.softmax(scores_BV.to(torch.float64), dim=-1)
    if scores_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return choose_by_integers(probabilities_BV, uniforms_B)
    cdf = probabilities_BV.cumsum(dim=-1)
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms_B.to(cdf)[:, None] * total, below_total)
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def choose_by_integers(probabilities_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """`choose` with a running sum of whole numbers, which is the same in every order, as CUDA's of floats is not.

    Probabilities are rounded down to multiples of 2**-52, float64's resolution at 1.

    Args:
        probabilities_BV: float64; a row that is not finite gives V.
        uniforms_B: float64 in [0, 1).
    """
    broken_B = ~probabilities_BV.isfinite().all(dim=-1)
    shares_BV = (probabilities_BV.nan_to_num() * 2.0**52).floor().long()
    cdf = shares_BV.cumsum(dim=-1)
    target_B = (uniforms_B.to(probabilities_BV) * cdf[:, -1]).floor().long().clamp(max=cdf[:, -1] - 1)
    chosen_B = torch.searchsorted(cdf, target_B[:, None], right=True).squeeze(1)
    return chosen_B.masked_fill(broken_B, probabilities_BV.size(-1))

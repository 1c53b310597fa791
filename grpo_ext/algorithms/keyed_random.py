"""Counter-based random numbers: the number of a token depends only on its key, never on a generator's history.

The key is (seed, stream, rollout, prompt, generation, row, position in the row); the mixer is SplitMix64's finaliser
(Steele, Lea, Flood, OOPSLA 2014), written with 64-bit integers that wrap around. Used by sampling.keyed and
forward.dropout. Shapes: B rows, N tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch

TRAIN_STREAM, EVAL_STREAM, ORDER_STREAM, FURTHER_STREAM, DROPOUT_STREAM = 1, 2, 3, 4, 5
_MASK64 = (1 << 64) - 1
_BLOCK = 128  # tokens; a divisor of most large vocabularies
GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# 32-bit mixing, "lowbias32" of C. Wellons, github.com/skeeto/hash-prospector; written as int32
CHANNEL, FIRST, SECOND = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32


def signed(x: int) -> int:
    """An unsigned 64-bit number as torch's int64 with the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: torch.Tensor, value: torch.Tensor | int) -> torch.Tensor:
    """Fold `value` into 64-bit keys (int64, any shape); wraps around, never overflows."""
    x = (key ^ value) + signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * signed(_MIX2)
    return x ^ _shift_right(x, 31)


def derive_key(*parts: int) -> int:
    """Unsigned, 64 bits; the order of the parts matters."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = mix(key, signed(part & _MASK64))
    return int(key) & _MASK64


def completion_keys(
    seed: int, stream: int, epoch: int, rollout: int, prompts_B: torch.Tensor, generations_B: torch.Tensor
) -> torch.Tensor:
    """Keys of completions, and of their first rows, (B,), int64; `stream` keeps training and evaluation apart."""
    start = torch.full_like(prompts_B, signed(derive_key(seed, stream, epoch, rollout)))
    return mix(mix(start, prompts_B), generations_B)


def row_keys(keys_B: torch.Tensor, row: int) -> torch.Tensor:
    """Keys of one row of each completion, (B,), for turns that begin a row. Row 0 has those of the completions.

    Positions begin at 0 in a row; its number is negative in the key, so that none of them is taken for it.
    """
    return mix(keys_B, -row) if row else keys_B


def token_keys(
    start: int,
    groups_B: Sequence[int | None],
    rows_B: Sequence[int],
    prompts_B: Sequence[int],
    completions_B: Sequence[int],
) -> torch.Tensor:
    """Keys of the tokens of rows, (N,), int64: from the group for those of prompts, from `rows_B` for completions.

    Without a group a prompt's are from `rows_B` too: the number of the completion, which may have several rows.
    `prompts_B` and `completions_B` are tokens; the position of a token is that in its row.
    """
    pairs = zip(groups_B, rows_B, strict=True)
    owners = [n for group, row in pairs for n in (2 * row + 1 if group is None else 2 * group, 2 * row + 1)]
    lengths = list(zip(prompts_B, completions_B, strict=True))
    keys = mix(torch.tensor(owners), signed(start)).repeat_interleave(torch.tensor(lengths).flatten())
    return mix(keys, torch.cat([torch.arange(prompt + completion) for prompt, completion in lengths]))


def uniform(keys_B: torch.Tensor, positions_B: torch.Tensor | int) -> torch.Tensor:
    """Numbers in [0, 1) with 53 random bits, float64, (B,), one per key and token position."""
    if keys_B.device.type == "mps":
        keys_B, positions_B = keys_B.cpu(), torch.as_tensor(positions_B).cpu()
    bits = _shift_right(mix(keys_B, positions_B), 11)
    return bits.to(torch.float64) * 2.0**-53


def choose(scores_BV: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row from softmax(scores), by inverse transform, in float64; never one of score -inf.

    Returns int64 ids, (B,), and the probabilities of all tokens, (B, V or more), float32 or float64. The id is V, which
    is not a token, where the scores are not a distribution (not finite).
    """
    if scores_BV.device.type == "mps":  # which has no float64
        tokens_B, probabilities_BV = choose(scores_BV.cpu(), uniforms_B.cpu())
        return tokens_B.to(scores_BV.device), probabilities_BV.float().to(scores_BV.device)
    if scores_BV.is_cuda:
        return choose_by_blocks(scores_BV, uniforms_B)
    probabilities_BV = torch.softmax(scores_BV.to(torch.float64), dim=-1)
    cdf = probabilities_BV.cumsum(dim=-1)
    target = uniforms_B.to(cdf)[:, None] * cdf[:, -1:]  # below the total of about 1, also for a uniform of 1 - 2**-53
    return torch.searchsorted(cdf, target, right=True).squeeze(1), probabilities_BV


def choose_by_blocks(scores_BV: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose` for CUDA: inverse transform over blocks of the vocabulary, then over the tokens of one block.

    Differs from `choose`: probabilities and the sums of blocks are float32, so tensors (B, V) are float32. Running sums
    are of integers, because CUDA's running sums of floats differ from run to run and may decrease. Boundaries between
    tokens move by float32's rounding of a block's sum (relative 2**-24 and a little), and by less than V * 2**-52.
    """
    vocabulary = scores_BV.size(-1)
    probabilities_BV = torch.softmax(scores_BV, dim=-1, dtype=torch.float32)
    if rest := -vocabulary % _BLOCK:
        probabilities_BV = torch.nn.functional.pad(probabilities_BV, (0, rest))
    blocks_BNK = probabilities_BV.unflatten(-1, (-1, _BLOCK))
    # in float32, as `sum(dtype=float64)` would cast all of (B, V) first; a product with a power of two is exact
    shares_BN = (blocks_BNK.sum(dim=-1).nan_to_num(0.0) * 2.0**52).long()
    cdf_BN = shares_BN.cumsum(dim=-1)
    total_B = cdf_BN[:, -1]
    # below the total: the product with a number below 1 is rounded down
    target_B1 = (uniforms_B * total_B).long()[:, None]
    block_B1 = torch.searchsorted(cdf_BN, target_B1, right=True).clamp(max=cdf_BN.size(-1) - 1)
    # the largest probability of a block that can be chosen is at least 2**-52 / _BLOCK, so not all shares are zero
    block_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    cdf_BK = (block_BK * 2.0**60).long().cumsum(dim=-1)
    inside_B1 = (target_B1 - (cdf_BN - shares_BN).gather(1, block_B1)) * 2**8
    token_B1 = torch.searchsorted(cdf_BK, torch.minimum(inside_B1, cdf_BK[:, -1:] - 1), right=True)
    tokens_B = torch.add(token_B1, block_B1, alpha=_BLOCK).squeeze(1).masked_fill(total_B == 0, vocabulary)
    return tokens_B, probabilities_BV

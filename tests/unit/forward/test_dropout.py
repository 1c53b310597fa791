"""Masks of dropout: the numbers they are made of, independence, the kernel, and which modules have them."""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_ext.algorithms.keyed_random import DROPOUT_STREAM, derive_key, signed, token_keys
from grpo_ext.errors import SplitDependentError
from grpo_ext.forward import carried, dropout
from grpo_ext.forward.carried import Carried, carrying
from grpo_ext.forward.dropout import dropped, keyed_dropout
from tests.support.launch import ROOT

WORD, LONG = 2**32 - 1, 2**64 - 1


def python_mix(key: int, value: int) -> int:
    """SplitMix64 in Python's integers."""
    x = ((key ^ value) + 0x9E3779B97F4A7C15) & LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & LONG
    return x ^ (x >> 31)


def python_is_dropped(token: int, module: str, call: int, channel: int, rate: float) -> bool:
    hasher = hashlib.blake2b(digest_size=8)
    for part in (module.encode(), str(call).encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    key = token ^ int(hasher.hexdigest(), 16)
    x = (key & WORD) ^ ((channel * 0x9E3779B9) & WORD)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x ^= key >> 32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return (x + 2**31) % 2**32 < rate * 2**32  # as a signed integer it is below


def below(rate: float) -> int:
    return round(rate * 2**32) - 2**31


def python_token(seed: int, step: int, group: int, row: int, position: int, prompt: int) -> int:
    key = 0
    for part in (seed, DROPOUT_STREAM, step):
        key = python_mix(key, part)
    key = python_mix(key, 2 * group if position < prompt else 2 * row + 1)
    return python_mix(key, position)


def test_masks_are_those_of_the_formula_in_pythons_integers():
    keys_N = token_keys(derive_key(42, DROPOUT_STREAM, 7), [3, 3], [5, 6], [4, 4], [2, 3])
    owners = [(3, 5, position) for position in range(6)] + [(3, 6, position) for position in range(7)]
    tokens = [python_token(42, 7, *owner, 4) for owner in owners]
    assert keys_N.tolist() == [signed(token) for token in tokens]
    mask_NC = dropped(keys_N ^ dropout._module_key("layers.0.drop", 1), 37, below(0.3))
    by_hand = [[python_is_dropped(token, "layers.0.drop", 1, c, 0.3) for c in range(37)] for token in tokens]
    assert mask_NC.tolist() == by_hand
    assert 0.2 < float(mask_NC.float().mean()) < 0.4


def test_copies_of_a_prompt_share_masks_and_completions_do_not():
    keys_N = token_keys(1, [0, 0, 1], [0, 1, 2], [5, 5, 5], [4, 4, 4])
    one, other, group = keys_N.split(9)
    assert torch.equal(one[:5], other[:5])
    assert not {*one[5:].tolist()} & {*other[5:].tolist()}
    assert not {*one.tolist()} & {*group.tolist()}


# ---- Statistics -----------------------------------------------------------------------------------------------------

PAIRS = ("token", "channel", "row", "group", "module", "call", "step", "seed")
SIZE = {"rows": 2, "prompt": 40, "completion": 60, "channels": 2048}


def mask(rate: float, seed: int, step: int, module: str = "a.q_proj", call: int = 0) -> torch.Tensor:
    """Of two rows of two groups, (rows, tokens, channels)."""
    rows, counts = range(SIZE["rows"]), [[SIZE[name]] * SIZE["rows"] for name in ("prompt", "completion")]
    keys_N = token_keys(derive_key(seed, DROPOUT_STREAM, step), rows, rows, *counts)
    mask_NC = dropped(keys_N ^ dropout._module_key(module, call), SIZE["channels"], below(rate))
    return mask_NC.double().view(SIZE["rows"], -1, SIZE["channels"])


def p_values(rate: float, seeds: int, steps: int) -> dict[str, float]:
    """Of the mean, and of the correlations of neighbours; 4e5 numbers of each seed and step."""
    sums, counts, variance = dict.fromkeys(("mean", *PAIRS), 0.0), dict.fromkeys(("mean", *PAIRS), 0), rate - rate**2

    def add(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        sums[name] += float(((one - rate) * (other - rate)).sum()) / variance
        counts[name] += one.numel()

    prompt = SIZE["prompt"]
    for seed in range(seeds):
        for step in range(1, 1 + steps):
            one = mask(rate, seed, step)
            sums["mean"] += float((one - rate).sum()) / math.sqrt(variance)
            counts["mean"] += one.numel()
            add("token", one[:, 1:], one[:, :-1])
            add("channel", one[..., 1:], one[..., :-1])
            add("row", one[0, prompt:], one[1, prompt:])
            add("group", one[0, :prompt], one[1, :prompt])
            add("module", one, mask(rate, seed, step, "a.v_proj"))
            add("call", one, mask(rate, seed, step, call=1))
            add("step", one, mask(rate, seed, step + 1))
            add("seed", one, mask(rate, seed + 1, step))
    return {name: math.erfc(abs(sums[name]) / math.sqrt(2 * counts[name])) for name in sums}


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_masks_have_their_rate_and_are_independent_of_neighbours(rate):
    found = p_values(rate, seeds=4, steps=7)
    assert min(found.values()) > 1e-3, found


def test_rows_and_columns_spread_as_independent_draws_do():
    rate, one = 0.1, mask(0.1, 0, 1).flatten(0, 1)
    for axis in (0, 1):
        size, count = one.size(axis), one.size(1 - axis)
        squares = (one.sum(axis) - size * rate).square().sum() / (size * rate * (1 - rate))
        # of chi-square's normal approximation
        assert abs(float(squares) - count) / math.sqrt(2 * count) < 3.3, axis


FAULTS: dict[str, Callable[..., Any]] = {
    "module": lambda patch: patch.setattr(dropout, "_module_key", lambda name, call: call),
    "call": lambda patch: patch.setattr(dropout, "_module_key", lambda name, call: len(name) + ord(name[2])),
    "row": lambda patch: patch.setitem(globals(), "token_keys", without_owners),
    "group": lambda patch: patch.setitem(globals(), "token_keys", without_owners),
    "channel": lambda patch: patch.setattr(dropout, "FIRST", 1) or patch.setattr(dropout, "SECOND", 1),
}


def without_owners(start: int, groups_B: Any, rows_B: Any, *lengths: Any) -> torch.Tensor:
    return token_keys_as_they_are(start, [0] * len(groups_B), [0] * len(rows_B), *lengths)


token_keys_as_they_are = token_keys


@pytest.mark.parametrize("lacking", FAULTS)
def test_the_control_a_key_that_lacks_a_part_is_found(monkeypatch, lacking):
    FAULTS[lacking](monkeypatch)
    assert p_values(0.1, seeds=1, steps=1)[lacking] < 1e-12


# ---- Modules --------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A dropout that runs twice, beside one that runs once."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.shared, self.other = nn.Dropout(0.5, inplace), nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.shared(values), self.shared(values), self.other(values)])


KEYS_BL = token_keys(9, [0, 0], [0, 1], [3, 3], [4, 4]).view(2, 7)


def run(module: nn.Module, values: torch.Tensor, keys_BL: torch.Tensor | None = KEYS_BL) -> torch.Tensor:
    with keyed_dropout(module, strict=True), carrying(module, Carried(keys_BL=keys_BL)):
        output: torch.Tensor = module(values)
    return output


def test_the_same_forward_has_the_same_masks_and_each_module_and_call_its_own():
    module, ones = Twice(), torch.ones(2, 7, 64)
    one = run(module, ones)
    assert torch.equal(one, run(module, ones))
    assert {*one.unique().tolist()} == {0.0, 2.0}
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < float((one[a] == one[b]).float().mean()) < 0.6
    assert torch.equal(one[:, 0, :3], one[:, 1, :3])  # the prompt of a group
    flat = nn.Sequential(nn.Flatten(0, 1), module, nn.Unflatten(1, (2, 7)))
    with keyed_dropout(module, strict=True), carrying(flat, Carried(keys_BL=KEYS_BL)):
        assert torch.equal(one, flat(ones))


def test_a_token_alone_has_the_mask_that_it_has_among_others():
    module, values = Twice(), torch.randn(2, 7, 64)
    whole = run(module, values)
    for row in range(2):
        for position in range(7):
            place = slice(row, row + 1), slice(position, position + 1)
            assert torch.equal(run(module, values[place], KEYS_BL[place]), whole[:, place[0], place[1]])


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_find_their_masks(reentrant):
    def gradient(model: nn.Module, **options: Any) -> torch.Tensor:
        values = torch.full((2, 7, 64), 1.0, requires_grad=True)
        for layer in model:
            layer._gradient_checkpointing_func = options.get("checkpoint")
        with keyed_dropout(model, strict=True):
            with carrying(model, Carried(keys_BL=KEYS_BL)):
                hidden = values
                for layer in model:
                    if layer._gradient_checkpointing_func is None:
                        hidden = layer(hidden)
                    else:
                        hidden = layer._gradient_checkpointing_func(layer.__call__, hidden)
            hidden.square().sum().backward()
        assert values.grad is not None
        return values.grad

    class Layer(nn.Module):
        def __init__(self, drop: nn.Module) -> None:
            super().__init__()
            self.drop = drop

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.drop(self.drop(values) ** 2)

    model = nn.ModuleList([Layer(nn.Dropout(0.2))])
    model.append(Layer(model[0].drop))  # layers that share a module
    plain = gradient(model)
    again = gradient(model, checkpoint=lambda *args: checkpoint(*args, use_reentrant=reentrant))
    assert torch.equal(plain, again)
    assert 0 < float((plain == 0).float().mean()) < 1


def test_the_control_a_recomputation_that_counts_on_has_other_masks(monkeypatch):
    class CountsOn(Carried):
        def __setattr__(self, name: str, value: Any) -> None:
            if name not in vars(self):
                super().__setattr__(name, value)

    monkeypatch.setitem(globals(), "Carried", CountsOn)
    with pytest.raises(AssertionError):
        test_layers_that_run_again_find_their_masks(False)


def test_a_backward_pass_makes_the_mask_again_and_keeps_none():
    values = torch.randn(2, 7, 4096, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = run(nn.Dropout(0.5), values)
    assert sum(tensor.numel() for tensor in saved) == KEYS_BL.numel()
    output.sum().backward()
    assert torch.equal(values.grad, torch.where(output == 0, 0.0, 2.0))


@pytest.mark.parametrize(("rate", "left"), [(0.0, 1.0), (1.0, 0.0)])
def test_rates_at_the_ends(rate, left):
    assert torch.equal(run(nn.Dropout(rate), torch.ones(2, 7, 8)), torch.full((2, 7, 8), left))


def test_forwards_that_carry_no_tokens_run_without_dropout_or_are_refused():
    module, ones = nn.Dropout(0.5), torch.ones(2, 7, 8)
    with torch.no_grad():
        assert torch.equal(run(module, ones, None), ones)  # sampling, scores
    with pytest.raises(
        SplitDependentError,
        match=r"runs on rows that are not those of a micro-batch.*disable_dropout=True.*allow_split_dependent=True",
    ):
        run(module, ones, None)
    assert torch.equal(run(module.eval(), ones, None), ones)
    assert "forward" not in vars(module)  # torch's own again
    assert float((module.train()(ones) == 0).float().mean()) > 0


@pytest.mark.parametrize("shape", [(2, 4, 7, 7), (5, 8), (1, 14, 8), (7, 2, 8)])
def test_an_input_without_the_tokens_is_refused_by_name(shape):
    module = Twice()
    with pytest.raises(SplitDependentError, match=r"shared \(p=0.5\) gets an input .* without an axis of the forward"):
        run(module, torch.ones(shape))
    with keyed_dropout(module, strict=False), carrying(module, Carried(keys_BL=KEYS_BL)):
        assert float((module(torch.ones(shape)) == 0).float().mean()) > 0  # torch's, which a user allowed


def test_nothing_is_carried_after_a_forward():
    with carrying(nn.Identity(), Carried(keys_BL=KEYS_BL)):
        assert carried.carried_now() is not None
    assert carried.carried_now() is None


# ---- The kernel -----------------------------------------------------------------------------------------------------

COMPARE = """
import torch
from grpo_ext.algorithms.keyed_random import token_keys
from grpo_ext.forward import dropout
from grpo_ext.forward.dropout_kernel import masked

keys_N = token_keys(5, [0, 0, 1], [0, 1, 2], [5, 5, 7], [3, 4, 9])
for name, call in (("a.q_proj", 0), ("a.v_proj", 3)):
    module = dropout._module_key(name, call)
    for rate in (0.0, 0.05, 0.5, 1.0):
        for channels in (1, 7, 1024, 1500):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                values = torch.randn(len(keys_N), channels).to(dtype)
                scale = 1 / (1 - rate) if rate < 1 else 0.0
                number = min(round(rate * 2**32), 2**32 - 1) - 2**31
                one = dropout._Masked.apply(values, keys_N, module, rate)
                other = masked(values, keys_N, module, number, scale)
                # the interpreter cuts bfloat16 off where a GPU rounds
                near = torch.allclose(one, other, rtol=2**-7) if dtype == torch.bfloat16 else torch.equal(one, other)
                assert near and torch.equal(one == 0, other == 0), (name, rate, channels, dtype)
print("equal")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with torch's CUDA build")
def test_the_kernel_has_the_same_bits():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]

"""Rows of tokens, and gradients of a loss in each form of the forward."""

import itertools
from typing import Any

import torch

from grpo_ext.algorithms.load_balancing import router_statistics
from grpo_ext.batching.micro_batches import Form
from grpo_ext.forward.architecture import base_model_of
from grpo_ext.forward.forms import in_form, run_rows
from grpo_ext.forward.lm_head import LogProbs, install
from grpo_ext.forward.rows import TokenRows
from tests.support.architectures import architecture

SHAPES = {  # tokens of the prompts, and of the completions of each
    "groups": ([7, 12, 3], [[4, 1, 9], [6, 6, 2], [11, 3, 5]]),
    "one": ([9], [[7]]),
    "masked_out": ([6, 4], [[5, 0, 3], [0, 0, 2]]),
    "first_tokens": ([6, 4], [[1, 1], [1, 0]]),
    "long": ([20], [[30, 2, 17, 9]]),
}


def scoring(kind: str, seed: int = 0, **settings: Any) -> Any:
    """An architecture whose head returns log-probabilities at temperature 0.9."""
    model = architecture(kind, seed, **settings)
    install(model, 0.9)
    return model


_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 16, "use_sliding_window": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_SHARED_EXPERT}
# by name the architecture and its settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "qwen3": ("qwen3", {}),
    "untied": ("qwen2", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {}),
    "window_larger": ("mistral", {"sliding_window": 100}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 4.0, "attn_implementation": "eager"}),
    "gemma3": ("gemma3_text", _WINDOWS),
    "moe": ("qwen3_moe", {}),
    "window_in_the_mask": ("qwen2_moe", {**_EXPERTS, **_WINDOWS}),
}
# grouped experts have no float64; eager attention masks with its smallest number
FLOAT32 = ("moe", "gemma2", "window_in_the_mask")


def model_of(kind: str) -> Any:
    name, settings = MODELS[kind]
    model = scoring(name, **{"initializer_range": 0.3, **settings})
    return model if kind in FLOAT32 else model.double()


def rows_of(prompts: list[int], completions: list[list[int]], seed: int = 0) -> TokenRows:
    """Rows with one group per prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[torch.Tensor] = []
    for prompt, lengths in zip(prompts, completions):
        tokens = torch.randint(3, 50, (prompt,), generator=generator)
        for length in lengths:
            ids += [tokens, torch.randint(3, 50, (length,), generator=generator)]
    own = [prompt for prompt, lengths in zip(prompts, completions) for _ in lengths]
    groups = [number for number, lengths in enumerate(completions) for _ in lengths]
    same = [before == after for before, after in itertools.pairwise(groups)]
    return TokenRows(torch.cat(ids), own, [length for lengths in completions for length in lengths], same)


def assert_same_as_padded(form: Form, model: Any, batch: Any, tolerance: float) -> None:
    """Log-probabilities, entropies and gradients in a form are those of the padded batch."""
    ours, theirs = run_rows(form, model, batch), run_rows("padded", model, batch)
    assert apart(ours.logps_S, theirs.logps_S) <= tolerance
    assert apart(ours.entropies_S, theirs.entropies_S) <= tolerance
    assert apart(gradient(form, model, batch), gradient("padded", model, batch)) <= tolerance


def assert_same_router_counts(form: Form, model: Any, batch: Any) -> None:
    """The router's statistics in a form are those of the padded batch."""
    found = []
    for each in ("padded", form):
        router = run_rows(each, model, batch, with_router=True).router
        found.append(router_statistics(router.logits, router.counts_BL, 2))
    (chosen, probs, rows), (our_chosen, our_probs, our_rows) = found
    assert rows == our_rows
    assert torch.equal(chosen, our_chosen)
    torch.testing.assert_close(our_probs, probs, rtol=1e-5, atol=1e-5)  # the router's softmax is float32


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative difference of two tensors."""
    assert one.shape == other.shape
    return float((one - other).detach().double().norm() / other.detach().double().norm())


def gradient(form: Form, model: Any, batch: Any) -> torch.Tensor:
    return with_gradient(form, model, batch)[1]


def with_gradient(form: Form, model: Any, batch: Any, **options: Any) -> tuple[LogProbs, torch.Tensor]:
    """What a forward returns, and the gradient of a loss on all of it; `options` are those of `lay_out`."""
    model.zero_grad()
    output = run_rows(form, model, batch, next(model.parameters()).device, **options)
    logps, entropies = output.logps_S, output.entropies_S
    weights = torch.linspace(0.5, 1.5, logps.numel(), dtype=logps.dtype, device=logps.device).view_as(logps)
    loss = (weights * logps).sum() + 0.3 * (weights * entropies).sum()
    if output.router is not None:
        loss = loss + output.router.aux_loss()
    with in_form(base_model_of(model), form):
        loss.backward()
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters() if p.requires_grad]
    return output, torch.cat([part.flatten() for part in parts])

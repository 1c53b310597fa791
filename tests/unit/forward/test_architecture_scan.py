"""Every causal architecture of the installed transformers: what the trainer runs is what a row by itself computes.

One process, one model at a time. A family that padding changes has to be noticed before training; one that does not
build at a tiny size is named with the reason.
"""

import functools
import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from accelerate import PartialState

from grpo_ext.batching.micro_batches import Form
from grpo_ext.config import forms_of
from grpo_ext.forward.architecture import base_model_of
from grpo_ext.forward.choice import ForwardChoice
from grpo_ext.forward.form_check import probe_rows
from grpo_ext.forward.forms import in_form, run_rows
from grpo_ext.forward.lm_head import install
from grpo_ext.forward.rows import TokenRows
from tests.support.packs import apart
from tests.support.shrunk import CAUSAL, shrunk
from tests.support.tiny import tiny_tokenizer

pytestmark = pytest.mark.full

PROMPT, COMPLETION, WIDTHS = 6, 7, (1, 7, 64)  # tokens
# of log-probabilities, entropies and gradients in float32, through steep random weights. Measured: up to 1.5e-4 (the
# delta rule of Qwen3.5), nearly all 1e-6; models that padding changes 0.08 and more
SAME = 5e-4
FEWEST_BUILT, FEWEST_BY_PACKS = 160, 90  # measured: 168 and 102
# forwards that are known to differ beside padding, so the scan can see that
PADDING_CHANGES = ("rwkv", "recurrent_gemma", "bart", "deepseek_v4")


class Rows:
    """Rows of text tokens; the first is the one that is compared."""

    def __init__(self, vocabulary: int) -> None:
        self._generator, self._vocabulary = torch.Generator().manual_seed(0), min(vocabulary, 56)
        self.prompt, self.completion = self.drawn(PROMPT), self.drawn(COMPLETION)

    def drawn(self, tokens: int) -> torch.Tensor:
        return torch.randint(3, self._vocabulary, (tokens,), generator=self._generator)

    def beside(self, *others: tuple[torch.Tensor, torch.Tensor]) -> TokenRows:
        pairs = [(self.prompt, self.completion), *others]
        same = [before is after for (before, _), (after, _) in itertools.pairwise(pairs)]
        ids = torch.cat([part for pair in pairs for part in pair])
        return TokenRows(ids, [len(prompt) for prompt, _ in pairs], [len(completion) for _, completion in pairs], same)


def of_first(form: Form, model: Any, rows: TokenRows) -> list[torch.Tensor]:
    """Log-probabilities and entropies of the first row, and the gradient of a loss on both."""
    model.zero_grad(set_to_none=True)
    output = run_rows(form, model, rows)
    logps, entropies = (values[:COMPLETION] for values in (output.logps_S, output.entropies_S))
    with in_form(base_model_of(model), form):
        ((torch.linspace(0.5, 1.5, COMPLETION, dtype=logps.dtype) * logps).sum() + 0.3 * entropies.sum()).backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [logps.detach(), entropies.detach(), torch.cat([part.flatten() for part in parts])]


def scanned(kind: str) -> tuple[str, float, float]:
    """How a family runs; how far that, and a padded batch, are from the row alone."""
    model = shrunk(kind).eval()
    install(model, 0.9)
    rows = Rows(model.config.get_text_config(decoder=True).vocab_size)
    alone = of_first("padded", model, rows.beside())
    assert alone[-1].norm() > 0

    def difference(form: Form, *others: tuple[torch.Tensor, torch.Tensor]) -> float:
        return max(map(apart, of_first(form, model, rows.beside(*others)), alone))

    choice = ForwardChoice(forms_of("auto"), torch.device("cpu"))
    with torch.no_grad():
        choice.compare(model, functools.partial(probe_rows, tokenizer=tiny_tokenizer()))
    form, batching = choice.form(model), choice.batching(model)
    padded = max(difference("padded", (rows.drawn(PROMPT + width), rows.drawn(4))) for width in WIDTHS)
    if form != "padded":
        other = (rows.prompt, rows.drawn(4)), (rows.drawn(9), rows.drawn(12))
        return f"{form}, {batching}", difference(form, *other), padded
    if batching == "single":
        return f"{form}, {batching}", 0.0, padded
    run = padded if batching == "any" else difference("padded", (rows.drawn(PROMPT), rows.drawn(COMPLETION)))
    return f"{form}, {batching}", run, padded


def test_every_architecture_runs_as_a_row_alone(capsys):
    PartialState()  # the logger asks it which process this is
    kinds, wrong, failing, padded = defaultdict(list), {}, {}, {}
    for kind in CAUSAL:
        try:
            way, difference, padded[kind] = scanned(kind)
        except Exception as error:
            failing[kind] = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:150]
            continue
        kinds[way].append(kind)
        if not difference <= SAME or ("any" in way and not padded[kind] <= SAME):
            wrong[kind] = f"{way}: {difference:.1e}, padded: {padded[kind]:.1e}"
    with capsys.disabled():
        for way, names in sorted(kinds.items()):
            print(f"\n{way}: {len(names)} families\n  {', '.join(names)}")
        print("\nnot run:", *(f"  {kind}: {reason}" for kind, reason in failing.items()), sep="\n")
    built = sum(map(len, kinds.values()))
    assert wrong == {}
    assert built >= FEWEST_BUILT, failing
    assert len(kinds["packed, any"]) >= FEWEST_BY_PACKS
    changed = {kind: padded.get(kind) for kind in PADDING_CHANGES}
    assert all(value is not None and value > 100 * SAME for value in changed.values()), changed

"""A policy whose completions can be enumerated, and exact gradients of what is said of them.

A transformer of 16 tokens that answers with at most 3 of them: 3,616 completions of each prompt, scored 0 or 1. Their
log-probabilities are computed in float64 under autograd, without anything of the trainer. Shapes: P prompts, N
completions, T tokens, V vocabulary, D parameters, C compositions of a group, G generations.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.support.tiny import tiny_model, tiny_tokenizer

PROMPTS = "abcd"
TOKENS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklm"]
END, LONGEST = 1, 3
_LEVELS = (1, 5, 9, 15)  # of 16, by prompt: pass rates of 0.05, 0.22, 0.67 and 0.95


def tokenizer() -> Any:
    return tiny_tokenizer(tokens=TOKENS)


def model() -> Any:
    """728 parameters, random; with this seed all lengths are common."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model("llama", 24, vocab_size=len(TOKENS), num_hidden_layers=1, initializer_range=0.5, **sizes)


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 where a sum of the tokens is below the prompt's level: it depends on every token, and so on the length."""
    sums = (sum(weight * token for weight, token in zip((7, 3, 5), ids)) % 16 for ids in completion_ids)
    return [float(value < _LEVELS[PROMPTS.index(prompt)]) for prompt, value in zip(prompts, sums)]


def all_completions() -> list[tuple[int, ...]]:
    """Every completion: it ends with the end token, or has `LONGEST` tokens."""
    open_tokens = [token for token in range(len(TOKENS)) if token != END]
    ended = [(*start, END) for length in range(LONGEST) for start in itertools.product(open_tokens, repeat=length)]
    return ended + list(itertools.product(open_tokens, repeat=LONGEST))


COMPLETIONS = all_completions()
LENGTHS_N = torch.tensor([len(ids) for ids in COMPLETIONS])
ENDED_N = torch.tensor([ids[-1] == END for ids in COMPLETIONS])
MASK_NT = torch.arange(LONGEST) < LENGTHS_N[:, None]
_IDS_NT = torch.tensor([[*ids, *[END] * (LONGEST - len(ids))] for ids in COMPLETIONS])
REWARDS_PN = torch.tensor([reward([p] * len(COMPLETIONS), [], COMPLETIONS) for p in PROMPTS]).double()


def flat_parameters() -> torch.Tensor:
    """The parameters of `model`, (D,), float64, in the order of `parameters()`."""
    return torch.cat([p.detach().double().flatten() for p in model().parameters()])


@dataclass(frozen=True)
class Distribution:
    """What a policy does with the prompts: log-probabilities of all tokens of all completions, and reference ones."""

    logps_PNT: torch.Tensor  # with the gradient; zero behind a completion's end
    reference_PNT: torch.Tensor

    @property
    def logps_PN(self) -> torch.Tensor:
        return self.logps_PNT.sum(-1)

    def mean(self, values_PN: torch.Tensor) -> torch.Tensor:
        """The expectation of a number per completion, (P,), with the gradient of the probabilities."""
        return (self.logps_PN.exp() * values_PN).sum(1)


Objective = Callable[[Distribution], torch.Tensor]


def log_probs(flat_D: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the tokens of all completions, (P, N, T), for a policy with these parameters and filters."""
    network = model().double()
    shapes = {name: p.shape for name, p in network.named_parameters()}
    pieces = flat_D.split([shape.numel() for shape in shapes.values()])
    parameters = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
    starts_P = torch.tensor(tokenizer()(list(PROMPTS))["input_ids"])
    ids = torch.cat([starts_P.repeat_interleave(len(COMPLETIONS), 0), _IDS_NT.repeat(len(PROMPTS), 1)], dim=1)
    logits = functional_call(network, parameters, args=(ids,)).logits[:, :-1]
    filters: list[Any] = [TemperatureLogitsWarper(temperature)]
    filters += [TopKLogitsWarper(top_k)] if top_k else []
    filters += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    kept = LogitsProcessorList(filters)(None, logits.flatten(0, 1)).view_as(logits).log_softmax(-1)
    logps_PNT = kept.gather(2, ids[:, 1:, None]).view(len(PROMPTS), len(COMPLETIONS), LONGEST)
    return logps_PNT.masked_fill(~MASK_NT, 0.0)


def gradient(
    objective: Objective,
    at_D: torch.Tensor,
    reference_D: torch.Tensor,
    sampled: dict[str, Any] | None = None,
    scored: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The exact gradient of an objective, (D,), float64, at these parameters.

    `sampled`: temperature and filters of the reference; `scored`: of the policy, by default the same.
    """
    flat_D = at_D.clone().requires_grad_()
    with torch.no_grad():
        reference_PNT = log_probs(reference_D, **(sampled or {}))
    logps_PNT = log_probs(flat_D, **(sampled or {} if scored is None else scored))
    return torch.autograd.grad(objective(Distribution(logps_PNT, reference_PNT)), flat_D)[0]

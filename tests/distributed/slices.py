"""What test_sequence_parallel.py runs on four processes, which share packs in pairs and all together.

`slices.py FOLDER` saves what each task returns. Every process compares a pack that it runs whole with the same pack of
which it holds a slice.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator

from grpo_ext import GRPOTrainer
from grpo_ext.batching.micro_batches import Form
from grpo_ext.errors import GrpoExtError
from grpo_ext.forward import form_check, forms
from grpo_ext.forward.columns import EXPERTS, KEPT_COUNTS, KEPT_IDS, Rows
from grpo_ext.forward.forms import in_form, run_rows
from grpo_ext.forward.routing import install_routers
from grpo_ext.run.record import STEP
from grpo_ext.runtime import sequence_group
from grpo_ext.runtime.sequence_group import SequenceGroup
from tests.distributed.tasks import RANK, save, trainer_of
from tests.support.architectures import VIEWING, architecture
from tests.support.images import image_model, image_processor
from tests.support.launch import leave
from tests.support.packs import MODELS, SHAPES, apart, model_of, rows_of, scoring, with_gradient
from tests.support.selection import FULL
from tests.support.trainers import make, passing_on

KINDS = (*MODELS, "gpt_oss", "deepseek_v3", *VIEWING)
LONG = ([16], [[48, 47, 31]])
SIZES = (2, 4)  # of groups
PACKED: Form = "packed"


def model(kind: str) -> Any:
    return model_of(kind) if kind in MODELS else scoring(kind, initializer_range=0.3)


def scores(policy: Any, rows: Any, group: SequenceGroup | None, **options: Any) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies and the gradient of a loss on both, summed over the members."""
    output, gradient = with_gradient(PACKED, policy, rows, group=group, **options)
    return output.logps_S, output.entropies_S, gradient if group is None else group.total(gradient)


def differences(policy: Any, rows: Any, group: SequenceGroup, **options: Any) -> list[float]:
    whole, sliced = scores(policy, rows, None, **options), scores(policy, rows, group, **options)
    return [apart(one, other) for one, other in zip(sliced, whole)]


def long_rope() -> Any:
    """Frequencies change with the longest sequence of a forward, which lies on one member."""
    ropes = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 24, "rope_theta": 1e4}
    ropes |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    return scoring("phi3", initializer_range=0.3, rope_parameters=ropes, original_max_position_embeddings=24)


def checkpointing() -> Any:
    policy = model("llama").train()
    policy.gradient_checkpointing_enable()
    return policy


# by kind and shape
CASES: dict[tuple[str, str], Callable[[], Any]] = {
    **{("qwen2", shape): partial(model, "qwen2") for shape in SHAPES},
    **{(kind, "groups"): partial(model, kind) for kind in KINDS if kind != "qwen2"},
    ("longrope", "long"): long_rope,
    ("checkpointing", "groups"): checkpointing,
    ("router", "masked_out"): partial(model, "moe"),
}


# what runs without --full in groups of two, and of four
FEW = {
    2: {
        *(("qwen2", shape) for shape in ("groups", "masked_out")),
        *((kind, "groups") for kind in ("gemma3", "checkpointing")),
    },
    4: {
        *(("qwen2", shape) for shape in ("one", "first_tokens")),
        *((kind, "groups") for kind in ("moe", "gpt_oss")),
        *{("longrope", "long"), ("router", "masked_out")},
    },
}


def cases_of(size: int, full: bool) -> list[tuple[str, str]]:
    """The cases that run in groups of a size: with --full all of them."""
    return [case for case in CASES if full or case in FEW[size]]


def of_kinds(group: SequenceGroup) -> dict[tuple[str, str], list[float]]:
    found = {}
    for kind, shape in cases_of(group.size, FULL in os.environ):
        policy, rows = CASES[kind, shape](), rows_of(*SHAPES[shape])
        found[kind, shape] = differences(policy, rows, group, with_router=kind == "router")
    return found


def replayed(group: SequenceGroup) -> dict[str, Any]:
    """Kept ids and recorded experts over slices; a replay counts the choices of all members."""
    rows = rows_of(*SHAPES["groups"])
    generator = torch.Generator().manual_seed(1)
    counts_B, ids_B = [], []
    for ids in rows.targets().split(list(rows.completions_B)):
        others = torch.randint(3, 50, (len(ids), 3), generator=generator)
        several = torch.cat([ids[:, None], others], dim=1).unique(dim=1)
        counts = torch.full((len(ids),), several.size(1), dtype=torch.int32)
        counts[0] = 0  # from the whole vocabulary
        counts_B.append(counts)
        ids_B.append(several[1:].flatten().int())
    masked = dataclasses.replace(rows, columns={KEPT_COUNTS: Rows.of(counts_B), KEPT_IDS: Rows.of(ids_B)})
    routed = model("moe")
    install_routers(routed)
    with torch.no_grad():
        recorded = [run_rows(PACKED, routed, rows, group=g, record_experts=True).experts_NC for g in (None, group)]
        others = rows.having(EXPERTS, (recorded[0].int() + 1).remainder(4).to(recorded[0].dtype))
        counts = [run_rows(PACKED, routed, others, group=g).routing.counts() for g in (None, group)]
    return {
        "masks": differences(model("qwen2"), masked, group),
        "unmasked": apart(*(scores(model("qwen2"), r, None)[0] for r in (masked, rows))),
        "experts": torch.equal(*recorded),
        "counts": [[int(count) for count in pair] for pair in counts],
        "routed": differences(routed, others, group),
    }


@contextmanager
def shifted() -> Iterator[None]:
    """Member 1 holds the tokens one place before its own."""
    cut = forms._sliced

    def wrong(layout: Any, group: SequenceGroup) -> Any:
        whole = dict(layout[0])
        (ours, *others), share = cut(layout, group)
        if group.member == 1:
            tokens = slice(share.tokens.start - 1, share.tokens.stop - 1)
            ours |= {name: whole[name][:, tokens] for name in ("input_ids", "position_ids")}
        return (ours, *others), share

    with mock.patch.object(forms, "_sliced", wrong):
        yield


@contextmanager
def summed_twice() -> Iterator[None]:
    """The gradient of a gathered value is that of all members, which each of them has whole."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * grad, None

    with mock.patch.object(sequence_group._Total, "backward", staticmethod(backward)):
        yield


def controls(group: SequenceGroup) -> dict[str, list[float]]:
    rows, found = rows_of(*SHAPES["groups"]), {}
    for name, wrong in {"shifted": shifted, "summed_twice": summed_twice}.items():
        with wrong():
            found[name] = differences(model("qwen2"), rows, group)
    return found


def why_refused(group: SequenceGroup) -> list[str | None]:
    """Of the comparison with padding: a model, and the same with the wrong tokens on a member."""
    policy, rows = scoring("qwen2", initializer_range=0.3), rows_of(*SHAPES["groups"])
    found = [form_check.why_form_fails(PACKED, form_check.RowsAlone(policy, rows), group=group)]
    with shifted():
        found.append(form_check.why_form_fails(PACKED, form_check.RowsAlone(policy, rows), group=group))
    return found


def exchanges(group: SequenceGroup) -> dict[str, Any]:
    """All-to-alls of a forward, and of a backward with and without recomputation: how many, and bytes sent by each."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(received: torch.Tensor, parts: torch.Tensor, **options: Any) -> Any:
        sent.append(parts.nbytes)
        return exchange(received, parts, **options)

    found: dict[str, Any] = {}
    with mock.patch.object(dist, "all_to_all_single", counted):
        for name in ("plain", "checkpointing"):
            policy = scoring("llama").train()
            if name == "checkpointing":
                policy.gradient_checkpointing_enable()
            output = run_rows(PACKED, policy, rows_of(*LONG), group=group)
            forward = [*sent]
            sent.clear()
            with in_form(policy, PACKED):
                output.logps_S.sum().backward()
            found[name] = forward, [*sent]
            sent.clear()
    return found


def saved_of_completion(group: SequenceGroup | None, tokens: int = 1024) -> int:
    """Bytes that autograd saves in a forward of one completion, weights left out."""
    policy = scoring("llama", max_position_embeddings=2048).train()
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    saved: dict[int, Any] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept alive, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        run_rows(PACKED, policy, rows_of([16], [[tokens]]), group=group)
    return sum(storage.nbytes() for storage in saved.values())


def refusals(folder: Path) -> dict[str, str]:
    """What is refused where two processes share each completion, before anything is sampled."""

    class OwnLoss(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            return 2 * super()._compute_loss(model, inputs)

    odd = architecture("qwen2", num_attention_heads=9, num_key_value_heads=3)
    asked: dict[str, dict[str, Any]] = {
        "loss": {"cls": OwnLoss},
        "log-probabilities": {"cls": passing_on("_get_per_token_logps_and_entropies")},
        "heads": {"model": odd},
        "convolution": {"model": architecture("lfm2")},
        "images": {"model": image_model("llava"), "processing_class": image_processor("llava")},
        "three": {"sequence_parallel_size": 3},
        "lag": {"rollout_lag": 1},
    }
    shared = {name: {"sequence_parallel_size": 2, **changes} for name, changes in asked.items()}
    messages = {name: message_of(partial(make, folder / name, **changes)) for name, changes in shared.items()}
    gaps = make(folder / "gaps", cls=Gaps, sequence_parallel_size=2, max_steps=1)
    return messages | {"gaps": message_of(gaps.train), "not finite": numbers_that_are_not_finite(folder / "nan")}


def step_again(folder: Path) -> tuple[str, list[dict[str, Any]], int]:
    """A step that runs again; and how often one process calls TRL's method for log-probabilities alone."""
    settings = {"sequence_parallel_size": 2, "max_steps": 2, "logging_steps": 1, "save_strategy": "steps"}
    trainer_of(folder, **settings, save_steps=1).train()
    again = trainer_of(folder, **settings, save_steps=1)
    rerun = again.rerun(2)
    rows = [json.loads(line) for line in (rerun.folder / STEP).read_text().splitlines()[1:]]
    calls = 0
    if RANK == 0:
        ids = torch.randint(3, 9, (4, 7))
        again._get_per_token_logps_and_entropies(again.model, ids, torch.ones_like(ids), 4)
        prompt, completion = ids[:, :3], ids[:, 3:]
        inputs = {"prompt_ids": prompt, "completion_ids": completion, "advantages": torch.linspace(-1, 1, 4)}
        inputs |= {"prompt_mask": torch.ones_like(prompt), "completion_mask": torch.ones_like(completion)}
        again._compute_loss(again.model, inputs | {"num_items_in_batch": torch.tensor(16.0)})
        calls = 2
    return rerun.text, rows, calls


def numbers_that_are_not_finite(folder: Path) -> str:
    """The error of a NaN that a module of the second member makes; the first gets it in the next attention."""
    trainer = trainer_of(folder, sequence_parallel_size=2)
    trainer._forwards.choose_forms(trainer._view.models)

    def steps() -> bool:
        return trainer._forwards._in_form is not None

    in_a_step = trainer.model.model.layers[0].mlp if RANK == 1 else torch.nn.Identity()
    in_a_step.register_forward_hook(lambda module, inputs, output: output * torch.nan if steps() else None)
    return message_of(trainer.train)


class Gaps(GRPOTrainer):
    """Attention that leaves out a token between others."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        scored["completion_mask"][:, 1] = 0
        return scored


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except GrpoExtError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


TASKS: dict[str, Callable[[SequenceGroup], Any]] = {
    "kinds": of_kinds,
    "replayed": replayed,
    "controls": controls,
    "exchanges": exchanges,
    "saved": saved_of_completion,
}

if __name__ == "__main__":
    folder, accelerator = Path(sys.argv[1]), Accelerator(cpu=True)
    groups = {size: SequenceGroup(accelerator, size, 60) for size in SIZES}
    result = {(name, size): task(group) for size, group in groups.items() for name, task in TASKS.items()}
    result |= {"refused": why_refused(groups[2]), "refusals": refusals(folder)}
    if FULL in os.environ:
        result["step again"] = step_again(folder)
    save(folder, result | {"saved whole": saved_of_completion(None)})
    leave(folder)

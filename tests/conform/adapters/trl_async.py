"""The loss of TRL's asynchronous trainer, with its planner and its collator; it trains on GPUs only.

Model and accelerator are stand-ins: a forward with a dense mask in the place of FlashAttention's tree, and processes
one after the other, their gradients averaged as DDP and FSDP do.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout, FixedCountBatcher

from tests.conform import exact
from tests.conform.adapters import trl as grpo
from tests.conform.given import GROUP, SPLITS, Gradient, Objective, Row, Split, gradient_of

NAME, VERSION = "TRL, asynchronous (loss only)", grpo.VERSION
ENTRY = "AsyncGRPOTrainer.compute_loss, FixedCountBatcher, DataCollatorForRollout"
OBJECTIVES = ("dapo",)
IN_ONE_PROCESS = True
SPLITS = tuple(split for split in SPLITS if split.rollouts == 1)
COUNTERS = [
    f"_step_{name}" for name in ("forward_s", "forward_tokens", "trained_tokens", "seq_len_weighted", "samples")
]
REASONS = {"dapo": "a mean over each micro-batch, then over their number; trl#7206, open"}


def sample(row: Row, number: int, advantage: float) -> dict[str, Any]:
    before = [0] * len(row.prompt_ids)
    return {
        "input_ids": torch.tensor(row.prompt_ids + row.ids),
        "completion_mask": torch.tensor(before + row.trained),
        "old_log_probs": torch.tensor(before + row.sampler_logps),
        "advantage": advantage,
        "group_id": number // GROUP,
        "metrics": {},
    }


def attended(inputs: dict[str, Any]) -> torch.Tensor:
    """Which tokens of a packed row each token attends to, bool (N, N)."""
    size = inputs["input_ids"].size(1)
    mask_NN = torch.zeros(size, size, dtype=torch.bool)
    starts, ends = inputs["tree_cu_seqlens_q"].tolist(), inputs["tree_cu_seqlens_k"].tolist()
    for segment in range(len(starts) - 1):
        path = inputs["tree_kv_index"][ends[segment] : ends[segment + 1]]
        for token in range(starts[segment], starts[segment + 1]):
            mask_NN[token, path[: len(path) - starts[segment + 1] + token + 1]] = True
    return mask_NN


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    steps = grpo.batch_sizes(split)["gradient_accumulation_steps"]
    advantages = exact.advantages(rows, exact.Definition())
    samples = [sample(row, number, advantages[number]) for number, row in enumerate(rows)]

    def forward(**inputs: Any) -> Any:
        ids, places = inputs["input_ids"], inputs["position_ids"]
        logps_NV = policy(input_ids=ids, position_ids=places, attention_mask=attended(inputs)[None, None]).logits[0]
        logps_NV = logps_NV.log_softmax(-1)
        labels = inputs["shift_labels"][0].clamp(min=0)[:, None]
        entropy = -(logps_NV.exp() * logps_NV).sum(-1)
        return SimpleNamespace(log_probs=logps_NV.gather(1, labels)[:, 0], entropy=entropy)

    def unreduced(value: Any, **_: Any) -> Any:
        return value

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=split.processes, reduce=unreduced, gather=unreduced),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=steps,
        _metrics={"train": defaultdict(list)},
        **dict.fromkeys(COUNTERS, 0.0),
    )
    collate = DataCollatorForRollout(pad_token_id=0, num_processes=split.processes)
    losses = []
    for micro_batch in FixedCountBatcher(samples, split.processes, grpo.STEP // steps):  # type: ignore[arg-type]
        batch = collate.torch_call([micro_batch])
        for process in range(split.processes):
            inputs = {name: value[process : process + 1] for name, value in batch.items()}
            losses.append(lambda inputs=inputs: AsyncGRPOTrainer.compute_loss(trainer, forward, inputs))
    return {name: value / split.processes for name, value in gradient_of(policy, *losses).items()}

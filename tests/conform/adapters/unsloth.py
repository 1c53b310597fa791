"""Unsloth's loss of a micro-batch, on a CPU, where its trainer is TRL's own.

`grpo_accumulated_loss` is Unsloth's, with its forward, its masks and its denominators. The trainer it asks is a
stand-in that gives what Unsloth's `compute_loss` passes on: TRL's count of tokens of a rollout, the accumulation steps,
the processes, which run one after the other and whose gradients are averaged.
"""

import os
import tempfile
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch

from tests.conform import exact, given
from tests.conform.adapters import trl
from tests.conform.given import (
    GROUP,
    MAX_LENGTH,
    PAD,
    Gradient,
    Objective,
    Row,
    Split,
    gradient_of,
    left_padded,
    log_probs,
    padded,
)

os.environ.update(UNSLOTH_ZOO_DISABLE_GPU_INIT="1", UNSLOTH_COMPILE_DISABLE="1")
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", f"{tempfile.gettempdir()}/unsloth_compiled_cache")

NAME, VERSION = "Unsloth", version("unsloth_zoo")
ENTRY = (
    "grpo_accumulated_loss, UnslothEfficientGRPO; the count of tokens and the mean over ranks are written here; the "
    "exact update has its bound of 10 on a token's KL"
)
OBJECTIVES = tuple(name for name in given.OBJECTIVES if name not in ("rloo", "dapo, load balance", "dapo, top entropy"))
IN_ONE_PROCESS = True
DEFINITION = exact.Definition(most_kl=10.0)
REASONS = {
    "bnpo": "by definition: a mean over the local batch, as TRL documents",
    "dapo, entropy": "the entropy is a mean over each micro-batch, as in TRL",
    "1 x 4, 2 rollouts": "each rollout is divided by its own tokens, the two are averaged, as in TRL",
}


def stand_in(objective: Objective, split: Split, policy: Any) -> Any:
    from trl import GRPOTrainer

    args = SimpleNamespace(
        unsloth_grpo_mini_batch=1,
        unsloth_logit_chunk_multiplier=None,
        top_entropy_quantile=1.0,
        use_bias_correction_kl=True,
        entropy_coef=objective.entropy,
        steps_per_generation=trl.batch_sizes(split)["steps_per_generation"],
        sapo_temperature_pos=exact.TEMPERATURES[0],
        sapo_temperature_neg=exact.TEMPERATURES[1],
    )
    return SimpleNamespace(
        args=args,
        model=policy,
        beta=objective.kl,
        entropy_coef=objective.entropy,
        use_vllm=False,
        mask_truncated_completions=objective.without_cut_off,
        num_generations=GROUP,
        _autocast_dtype=None,
        accelerator=SimpleNamespace(unwrap_model=lambda model, **_: model, scaler=None),
        processing_class=SimpleNamespace(pad_token_id=PAD),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    from unsloth_zoo import rl_replacements as zoo

    torch.compiler.set_stance("force_eager")
    steps = trl.batch_sizes(split)["gradient_accumulation_steps"]
    trainer, advantages = stand_in(objective, split, policy.train()), exact.advantages(rows, DEFINITION)
    masks = [objective.mask(row) for row in rows]
    part, high = len(rows) // split.rollouts, exact.HIGH if objective.loss == "cispo" else 0.2

    def loss(start: int) -> torch.Tensor:
        chosen = range(start, start + split.micro_batch)
        batch, of_rollout = [rows[number] for number in chosen], start // part * part
        prompts = left_padded([row.prompt_ids for row in batch])
        completions = padded([row.ids for row in batch], dtype=torch.long)
        kept = [[int(any(masks[number]))] * len(row.ids) for number, row in zip(chosen, batch, strict=True)]
        ids, mask = torch.cat([prompts, completions], 1), padded(kept, dtype=torch.long)
        before = zoo.calculate_pad_tokens_in_prompt(ids, MAX_LENGTH, PAD)
        most = int(before.max())
        packed = zoo.left_pack_padding(ids, PAD)[:, -(MAX_LENGTH + most) :]
        places = zoo.create_completion_attention_mask(packed, before, most, PAD)

        def aligned(logps: list[list[float]]) -> torch.Tensor:  # as Unsloth's own earlier forwards return them
            return zoo.align_logprobs_with_mask(padded(logps), places.long())

        with torch.no_grad():
            ref_logps = [log_probs(reference, row).tolist() for row in batch] if reference is not None else None
        return zoo.grpo_accumulated_loss(
            trainer,
            input_ids=ids,
            attention_mask=torch.cat([prompts != PAD, mask], 1),
            logits_to_keep=MAX_LENGTH,
            completion_mask=mask,
            tool_mask=padded([masks[number] for number in chosen], dtype=torch.long),
            advantages=torch.tensor([advantages[number] for number in chosen]),
            old_logps=aligned([row.sampler_logps for row in batch]),
            ref_logps=None if ref_logps is None else aligned(ref_logps),
            loss_type=objective.loss,
            epsilon_low=0.2,
            epsilon_high=high,
            delta=None,
            importance_sampling_level="sequence" if objective.sequence else "token",
            max_completion_length=MAX_LENGTH,
            temperature=1.0,
            num_processes=split.processes,
            num_items_in_batch=torch.tensor(float(sum(map(sum, masks[of_rollout : of_rollout + part])))),
            current_gradient_accumulation_steps=steps,
        )[0]

    summed = gradient_of(policy, *(partial(loss, start) for start in range(0, len(rows), split.micro_batch)))
    return {name: value / split.processes for name, value in summed.items()}

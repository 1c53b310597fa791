"""slime's loss function and its schedule of micro-batches, on a CPU.

`megatron.core.mpu` is a stand-in that says sizes: one tensor rank, one stage, the split's data-parallel ranks, run one
after the other. `loss_function` and all it calls is slime's. What Megatron then does is written here: losses per
completion are divided by the number of micro-batches and gradients averaged over ranks (`forward_step_calc_loss`,
`DistributedDataParallel`); losses per token are summed and the sum divided by all ranks' tokens
(`finalize_model_grads`). Losses need float32 logits.
"""

import importlib
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import torch

from tests.conform import exact
from tests.conform.given import Gradient, Objective, Refused, Row, Split, gradient_of, log_probs

NAME, VERSION = "slime", "0.3.1, commit 624b824a of 2026-08-21"
ENTRY = (
    "loss_function, build_dp_schedule, Megatron's division written here; --calculate-per-token-loss but for grpo, "
    "--use-rollout-logprobs, --use-unbiased-kl, --kl-loss-type k3, --eps-clip 1 for cispo"
)
OBJECTIVES = (
    *("grpo", "dapo", "cispo", "gspo", "dapo, truncated masked", "grpo, truncated masked"),
    *("grpo, KL", "dapo, KL", "dapo, entropy"),
)
DEFINITION = exact.Definition(epsilon=1e-6)
IN_ONE_PROCESS = True
REASONS = {
    "dapo, truncated masked": "a removed completion counts as one token (the update is 89/90 of the exact "
    "one); an open pull request mends the same line in a fork, radixark/miles#2796"
}
MPU: dict[str, Any] = {
    "get_tensor_model_parallel_group": None,
    "get_context_parallel_group": None,
    "get_context_parallel_world_size": 1,
    "get_context_parallel_rank": 0,
    "is_pipeline_last_stage": True,
}


def losses_module() -> Any:
    """`slime.backends.megatron_utils.loss` without the package's `__init__`, which patches Megatron."""
    import slime.backends

    folder, name = slime.backends.__path__[0], "slime.backends.megatron_utils"
    mpu, package = ModuleType("megatron.core.mpu"), ModuleType(name)
    for query, answer in MPU.items():
        setattr(mpu, query, lambda *_, answer=answer, **__: answer)
    package.__path__ = [f"{folder}/megatron_utils"]
    core = ModuleType("megatron.core")
    core.mpu = mpu  # type: ignore[attr-defined]
    found = {"megatron": ModuleType("megatron"), "megatron.core": core, "megatron.core.mpu": mpu, name: package}
    for key, module in found.items():
        sys.modules.setdefault(key, module)
    torch.compiler.set_stance("force_eager")
    return importlib.import_module(f"{name}.loss")


DEFAULTS: dict[str, Any] = {
    **{"loss_type": "policy_loss", "kl_coef": 0.0, "eps_clip_high": 0.2, "eps_clip_c": None},
    **{"rollout_top_p": 1.0, "rollout_temperature": 1.0, "log_probs_chunk_size": -1},
    "custom_advantage_function_path": None,
    **dict.fromkeys(("use_opsm", "use_opd", "use_tis", "get_mismatch_metrics", "normalize_advantages"), False),
    **dict.fromkeys(("use_dynamic_batch_size", "balance_by_flops", "balance_data"), False),
    **dict.fromkeys(("recompute_loss_function", "allgather_cp"), False),
}


def arguments(objective: Objective, split: Split) -> Namespace:
    """Those of the command line that the loss and the schedule read."""
    return Namespace(
        **DEFAULTS,
        advantage_estimator="cispo" if objective.loss == "cispo" else "gspo" if objective.sequence else "grpo",
        calculate_per_token_loss=objective.loss != "grpo",
        eps_clip=1.0 if objective.loss == "cispo" else 0.2,
        entropy_coef=objective.entropy,
        use_kl_loss=bool(objective.kl),
        kl_loss_coef=objective.kl,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        use_rollout_logprobs=True,
        micro_batch_size=split.micro_batch,
    )


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    if split.rollouts > 1:
        raise Refused("a step is of one rollout at most")
    losses, args = losses_module(), arguments(objective, split)
    mpu = sys.modules["megatron.core.mpu"]
    mpu.get_data_parallel_world_size = lambda **_: split.processes  # type: ignore[attr-defined]
    masks = [objective.mask(row) for row in rows]
    data: dict[str, list[Any]] = {
        "unconcat_tokens": [torch.tensor(row.prompt_ids + row.ids) for row in rows],
        "total_lengths": [len(row.prompt_ids) + len(row.ids) for row in rows],
        "response_lengths": [len(row.ids) for row in rows],
        "loss_masks": [torch.tensor(mask) for mask in masks],  # zeros: `Sample.remove_sample`
        "rollout_mask_sums": [torch.tensor(sum(mask)) for mask in masks],
        "rollout_log_probs": [torch.tensor(row.sampler_logps) for row in rows],
        "rewards": exact.advantages(rows, DEFINITION),
    }
    losses.compute_advantages_and_returns(args, data)
    if reference is not None:
        with torch.no_grad():
            data["ref_log_probs"] = [log_probs(reference, row).float() for row in rows]
    schedule = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    sizes = {"dp_size": split.processes, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, micro_batches, (steps,), (size,) = schedule(
        args, sizes, data["total_lengths"], global_batch_size=len(rows), rollout_indices=list(range(len(rows)))
    )
    counts: list[float] = []

    def loss(chosen: list[int]) -> torch.Tensor:
        batch = {name: [values[number] for number in chosen] for name, values in data.items() if name != "rewards"}
        logits = [policy(input_ids=ids[None]).logits for ids in batch["unconcat_tokens"]]
        found, count, _ = losses.loss_function(args, batch, steps, size, torch.cat(logits, 1).float())
        counts.append(float(count))
        return found if args.calculate_per_token_loss else found / count / steps

    chosen = [[part[i] for i in batch] for part, of in zip(partitions, micro_batches, strict=True) for batch in of]
    summed = gradient_of(policy, *[lambda batch=batch: loss(batch) for batch in chosen])
    over = sum(counts) if args.calculate_per_token_loss else split.processes
    return {name: value / over for name, value in summed.items()}

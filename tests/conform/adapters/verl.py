"""verl's FSDP engine: it makes micro-batches, counts tokens and averages over processes; the loss is the actor's.

The policy is wrapped by verl's `apply_fsdp2`; verl has no CPU platform, so one is set through its plugin interface.
"""

from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

from tests.conform.exact import Definition
from tests.conform.given import GROUP, MAX_LENGTH, Gradient, Objective, Refused, Row, Split, left_padded, padded


class OfCPU(PlatformCUDA):
    device_name = "cpu"

    def current_device(self) -> Any:
        return "cpu"


set_platform(OfCPU())

from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.fsdp_utils import apply_fsdp2  # noqa: E402
from verl.workers.config import ActorConfig, FSDPEngineConfig, PolicyLossConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding  # noqa: E402

NAME, VERSION = "verl", version("verl")
ENTRY = (
    "FSDPEngineWithLMHead.forward_backward_batch, ppo_loss; clip_ratio_low=1 for cispo, luspo is gspo with "
    "seq-mean-token-sum"
)
DEFINITION = Definition(epsilon=1e-6)
MODES = {  # `loss_mode` and `loss_agg_mode`
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "luspo": ("gspo", "seq-mean-token-sum"),
    "gspo": ("gspo", "seq-mean-token-mean"),
    "dapo, entropy": ("vanilla", "token-mean"),
}
OBJECTIVES = tuple(MODES)


def batch(rows: list[Row], dtype: torch.dtype) -> TensorDict:
    """A step's completions as verl's trainer has them before it drops padding: prompts end where answers start."""
    prompts = left_padded([row.prompt_ids for row in rows])
    of_prompts = left_padded([[1] * len(row.prompt_ids) for row in rows], 0)
    responses, attended = padded([row.ids for row in rows]), padded([[1] * len(row.ids) for row in rows])
    attention_mask, response_mask = torch.cat([of_prompts, attended], 1), padded([row.trained for row in rows])
    rewards = padded([[0.0] * (len(row.ids) - 1) + [row.reward] for row in rows], dtype=dtype)
    groups = [number // GROUP for number in range(len(rows))]
    found = {
        "input_ids": torch.cat([prompts, responses], 1),
        "prompts": prompts,
        "responses": responses,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "old_log_probs": padded([row.sampler_logps for row in rows], dtype=dtype),
        "advantages": compute_grpo_outcome_advantage(rewards, response_mask, groups, DEFINITION.epsilon)[0],  # type: ignore[arg-type]
    }
    return left_right_2_no_padding(TensorDict(found, batch_size=len(rows)))


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mode, over = MODES[objective.name]
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=GROUP,
        ppo_mini_batch_size=len(rows) // GROUP,
        ppo_micro_batch_size_per_gpu=split.micro_batch,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        loss_agg_mode=over,
        loss_scale_factor=MAX_LENGTH,
        entropy_coeff=objective.entropy,
        clip_ratio_low=1.0 if mode == "cispo" else 0.2,
        clip_ratio_c=1e9,
    )
    try:
        config.validate(split.processes, len(rows) // GROUP // split.rollouts)
    except ValueError as reason:
        raise Refused(str(reason)) from reason
    engine_config = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    engine = FSDPEngineWithLMHead(SimpleNamespace(use_remove_padding=False, lora_rank=0), engine_config, None, None)
    apply_fsdp2(policy, {"mesh": engine.device_mesh}, engine_config)
    engine.module, engine._autocast_dtype = policy, torch.float32  # no autocast
    data = tensordict_utils.chunk_tensordict(batch(rows, policy.dtype), split.processes)[dist.get_rank()]
    tensordict_utils.assign_non_tensor(
        data,
        global_batch_size=len(rows),
        micro_batch_size_per_gpu=split.micro_batch,
        use_dynamic_bsz=False,
        use_remove_padding=False,
        calculate_entropy=objective.entropy > 0,
        temperature=1.0,
    )
    try:
        engine.forward_backward_batch(data, partial(ppo_loss, config))
    except AssertionError as reason:
        if "divisible" not in str(reason):
            raise
        raise Refused(str(reason)) from reason
    return {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}

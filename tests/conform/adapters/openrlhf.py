"""OpenRLHF's actor trainer on its replay buffer, with DeepSpeed's engine.

What only a GPU has is absent: `flash_attn` and `vllm` are empty modules while OpenRLHF is imported, and CUDA's current
device is the CPU. DeepSpeed reduces no float64, so the numbers are float32's.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.conform import exact, given
from tests.conform.given import Gradient, Objective, Refused, Row, Split, log_probs, padded

# imported by OpenRLHF, and not called in training
ABSENT = ("aiohttp", "vllm", "vllm.inputs", "vllm.utils", "flash_attn", "flash_attn.bert_padding", "flash_attn.utils")
ABSENT += ("flash_attn.utils.distributed",)
sys.modules.update({name: mock.MagicMock(__spec__=ModuleSpec(name, None)) for name in ABSENT})
from openrlhf.models import Actor  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402

for name in ABSENT:
    del sys.modules[name]
torch._dynamo.config.disable = True  # its entropy is compiled

NAME, VERSION, ENTRY = "OpenRLHF", version("openrlhf"), "ActorPPOTrainer.ppo_train, kl.unbiased_gradient"
DTYPE = torch.float32  # DeepSpeed does not reduce float64
OBJECTIVES = "grpo", "dapo", "gspo", "grpo, KL", "dapo, KL", "dapo, entropy", "dapo, load balance"
DEFINITION = exact.Definition(epsilon=1e-9)  # of the estimator `group_norm`
SPLITS = tuple(split for split in given.SPLITS if split.rollouts == 1)  # steps of several rollouts were not measured
REASONS = {
    "grpo, KL": "by definition: `loss_agg_mode` is the policy loss's alone, the KL is a mean over the step's tokens",
    "dapo, load balance": "the loss of each micro-batch, as in transformers; arXiv 2501.11873",
}


def settings(objective: Objective) -> Any:
    """Arguments of `train_ppo_ray` that the actor's trainer reads."""
    advantage = SimpleNamespace(
        is_correction_level="off",
        is_correction_mode="mask",
        is_correction_gating="ratio",
        is_correction_threshold=(0.5, 5.0),
    )
    actor = SimpleNamespace(
        policy_loss_type="gspo" if objective.sequence else "ppo",
        loss_agg_mode="token-mean" if objective.loss in ("bnpo", "dapo") else "seq-mean-token-mean",
        eps_clip_low_high=(0.2, 0.2),
        dual_clip=None,
        entropy_coef=objective.entropy or None,
        aux_loss_coef=objective.router,
    )
    kl = SimpleNamespace(use_loss=objective.kl > 0, init_coef=objective.kl, estimator="k3", unbiased_gradient=True)
    train = {"max_epochs": 1, "dynamic_batch_enable": False, "colocate_all": False, "async_enable": False}
    return SimpleNamespace(
        actor=actor,
        algo=SimpleNamespace(advantage=advantage, kl=kl),
        train=SimpleNamespace(**train),
        ds=SimpleNamespace(packing_samples=False, param_dtype="bf16", tensor_parallel_size=1),
        vllm=SimpleNamespace(sync_backend="gloo"),
    )


def experience(rows: list[Row], advantages: list[float], dtype: torch.dtype, reference: Any) -> Experience:
    """Completions as the samples generator and the experience maker leave them: what is acted on is shifted by one."""
    before = [len(row.prompt_ids) - 1 for row in rows]
    reference_logps = [
        [0.0] * len(row.ids) if reference is None else log_probs(reference, row).tolist() for row in rows
    ]
    width = max(len(row.prompt_ids + row.ids) for row in rows)

    def acted(of_rows: list[Any], **options: Any) -> torch.Tensor:
        shifted = [[0] * places + list(of_row) for places, of_row in zip(before, of_rows, strict=True)]
        return padded(shifted, width - 1, **options)

    return Experience(
        sequences=padded([row.prompt_ids + row.ids for row in rows], width),
        attention_mask=padded([[1] * len(row.prompt_ids + row.ids) for row in rows], width),
        action_mask=acted([row.trained for row in rows]),
        action_log_probs=acted([row.sampler_logps for row in rows], dtype=dtype),
        rollout_log_probs=acted([row.sampler_logps for row in rows], dtype=dtype),
        base_action_log_probs=acted(reference_logps, dtype=dtype),
        advantages=acted([[a] * len(row.ids) for a, row in zip(advantages, rows, strict=True)], dtype=dtype),
    )


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    if len(rows) % (split.micro_batch * split.processes):
        raise Refused("the step is not divisible by the micro-batch")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        deepspeed.init_distributed("gloo")
    args = settings(objective)
    strategy = DeepspeedStrategy(micro_train_batch_size=split.micro_batch, train_batch_size=len(rows), args=args)
    strategy.world_size = split.processes
    strategy.accumulated_gradient = len(rows) // split.micro_batch // split.processes
    strategy.ds_device_mesh = init_device_mesh("cpu", (split.processes, 1, 1), mesh_dim_names=("dp", "sp", "tp"))
    actor = Actor(policy)
    actor.packing_samples = False
    actor.model, optimizer, _, _ = deepspeed.initialize(
        model=policy,
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": split.micro_batch,
            "train_batch_size": len(rows),
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,
        },
    )
    weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
    torch.manual_seed(strategy.seed)  # completions are shuffled
    schedule = SimpleNamespace(get_last_lr=lambda: [1.0])
    with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_device", return_value=0) as device:
        trainer = ActorPPOTrainer(
            strategy,
            actor,
            None,
            optimizer,
            schedule,
            micro_train_batch_size=split.micro_batch,
            dataloader_pin_memory=False,
        )
        device.return_value = "cpu"
        mine = slice(dist.get_rank(), None, split.processes)
        advantages = exact.advantages(rows, DEFINITION)[mine]
        trainer.replay_buffer.append(experience(rows[mine], advantages, policy.dtype, reference))
        trainer.ppo_train(objective.kl)
    return {name: weights[name] - p.detach() for name, p in policy.named_parameters()}

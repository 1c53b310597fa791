"""Stock TRL's GRPO trainer: completions by `rollout_func`, one step of SGD."""

import tempfile
from collections import Counter
from importlib.metadata import version
from typing import Any

import trl
from datasets import Dataset
from safetensors.torch import save_file

from tests.conform.exact import HIGH
from tests.conform.given import GROUP, MAX_LENGTH, Gradient, Objective, Refused, Row, Split, groups
from tests.support.tiny import tiny_tokenizer

NAME, VERSION, ENTRY = "TRL", version("trl"), "GRPOTrainer.train"
REASONS = {
    "bnpo": "by definition: TRL documents a mean over the local batch",
    "dapo, entropy": "the entropy is a mean over each micro-batch, which a comment in TRL's source says",
    "dapo, top entropy": "the threshold is that of each micro-batch, over all processes",
    "dapo, load balance": "the loss of each micro-batch, as in transformers; arXiv 2501.11873",
    "1 x 4, 2 rollouts": "each rollout is divided by its own tokens, the two are averaged; trl#6024 mended the scale",
}
STEP = 16  # completions
SGD = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}
ON_CPU = {"use_cpu": True, "bf16": False, "ddp_timeout": 120}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def settings(objective: Objective) -> dict[str, Any]:
    """Those of `trl.GRPOConfig` for an objective."""
    return {
        **SGD,
        **ON_CPU,
        **QUIET,
        "shuffle_dataset": False,
        "num_generations": GROUP,
        "max_completion_length": MAX_LENGTH,
        "loss_type": objective.loss,
        "beta": objective.kl,
        "entropy_coef": objective.entropy,
        "top_entropy_quantile": objective.top_entropy,
        "epsilon_high": HIGH if objective.loss == "cispo" else 0.2,
        "importance_sampling_level": "sequence" if objective.sequence else "token",
        "mask_truncated_completions": objective.without_cut_off,
    }


def batch_sizes(split: Split) -> dict[str, int]:
    steps, left = divmod(STEP, split.micro_batch * split.processes)
    if left:
        raise Refused("the step is not divisible by the micro-batch")
    return {
        "per_device_train_batch_size": split.micro_batch,
        "gradient_accumulation_steps": steps,
        "steps_per_generation": steps // split.rollouts,
    }


def with_old_logps(base: Any) -> Any:
    """A trainer that takes the sampler's log-probabilities for those of the policy that sampled."""

    class Given(base):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
            return output

    return Given


def update(trainer_class: Any, args: Any, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    """What a trainer subtracts from the weights of `policy` in a step with these completions."""
    of_prompts = groups(rows)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count, chosen = Counter[str](), []
        for prompt in prompts:
            chosen.append(of_prompts[int(prompt)][count[prompt] % GROUP])
            count[prompt] += 1
        return {
            "prompt_ids": [row.prompt_ids for row in chosen],
            "completion_ids": [row.ids for row in chosen],
            "logprobs": [row.sampler_logps for row in chosen],
            "env_mask": [row.trained for row in chosen],
        }

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        known = {(str(number), *row.ids): row.reward for number, group in enumerate(of_prompts) for row in group}
        return [known[prompt, *ids] for prompt, ids in zip(prompts, completion_ids, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        # where TRL loads a reference from, on every process; `save_pretrained` writes on the first
        policy.config.architectures = [type(policy).__name__]
        policy.config.save_pretrained(folder)
        save_file(policy.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        policy.config._name_or_path = folder
        trainer = trainer_class(
            model=policy,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(of_prompts))]}),
            processing_class=tiny_tokenizer(),
            rollout_func=rollout,
        )
    if reference is not None:
        trainer.ref_model.to(policy.dtype).load_state_dict(reference.state_dict())
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer.train()
    return {name: before[name] - p.detach() for name, p in policy.named_parameters()}


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(folder, **settings(objective), **batch_sizes(split))
        return update(with_old_logps(trl.GRPOTrainer), args, rows, policy, reference)

"""The matrix: what is trained, under which splits, and where stock TRL is known to differ.

Every case runs a few steps of a tiny transformer through the real trainer. `make test` takes those outside `FULL`, in
one process with one micro-batch and on several with a smaller one: the loss of GRPO, a user's loss, KL in bfloat16,
steps that cut groups, the prefix form, convolutions beside attention, images, LoRA with dropout, a rollout function.
`make test-full` takes all cases, each with one micro-batch size for each number of processes. That any partition of a
step adds up for every loss type and term is proved without a trainer (tests/unit/algorithms/test_losses.py).
"""

import dataclasses
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_ext.tools.check.runs import Run
from grpo_ext.tools.stock import OURS
from tests.support.architectures import PREFIXED, architecture
from tests.support.cuts import Cuts
from tests.support.images import FAMILIES, image_model, image_processor, image_rows, picture_reward
from tests.support.tiny import (
    TINY,
    gathering_rollout,
    generated_rollout,
    letter_reward,
    prompts,
    sparse_reward,
    tiny_model,
    tiny_tokenizer,
)
from tests.tolerances import ADAM_EPSILON

TWO_STEPS = {"rollout_batch_size": 32, "max_steps": 3}  # 22 prompts: rollouts of 8, 8 and 6 prompts
REUSED = {"rollout_batch_size": 32, "num_iterations": 2, "max_steps": 5}
# steps of 4+4+1, 3+4+2 and 2+4+3 completions; the fourth, of 1+4+4, would end the rollout batch
CUT = {"global_batch_size": 9, "rollout_batch_size": 36, "rollout_chunk_size": 12, "max_steps": 3}
FILTERED = {"top_p": 0.8, "sampling_mask": "replay"}
# half precision: the next rollout could take another token, and two runs from there
ONE_ROLLOUT = {"rollout_batch_size": 32, "max_steps": 2}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
DROPPING = {**LORA, "lora_dropout": 0.1, "init_lora_weights": False}


@dataclass(frozen=True)
class Case:
    """One thing to train."""

    config: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen2"
    peft: dict[str, Any] | None = None
    rewards: tuple[Any, ...] = (letter_reward,)
    teacher: str | None = None  # a kind of model
    prompts: int = 22
    evaluate: bool = False
    rollout_func: Any = None


# read in 4 or 8 bits from a folder that holds them so
BITS = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "8bit": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
QUANTISED = {
    f"lora_{kind}": Case({"beta": 0.1, **ONE_ROLLOUT}, kind, peft={**LORA, "lora_dropout": 0.1}) for kind in BITS
}
if find_spec("bitsandbytes") is None:
    QUANTISED = {}

# sampled ahead of training: losses with ratios, one and two rollout batches ahead
AHEAD = {
    "ahead_gspo": Case({"importance_sampling_level": "sequence", "rollout_lag": 2, "max_steps": 5, **FILTERED}),
    "ahead_cispo": Case({"loss_type": "cispo", "epsilon_high": 1.01, "rollout_lag": 1, **TWO_STEPS, "max_steps": 9}),
    "ahead_two_sided": Case(
        {"loss_type": "grpo", "delta": 1.02, "epsilon": 0.01, "rollout_lag": 2, **REUSED, "max_steps": 13}
    ),
    "ahead_kl_synced": Case(
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "rollout_lag": 1, "max_steps": 5}
    ),
    "ahead_kl_lora": Case({"beta": 0.1, "rollout_lag": 2, "max_steps": 5}, peft=LORA),
    "ahead_moe": Case({"routing_replay": True, "rollout_lag": 2, **TWO_STEPS}, model="moe"),
    "ahead_epochs": Case({"num_train_epochs": 2, "rollout_lag": 2, "max_steps": -1}, prompts=10),
    "ahead_dynamic": Case({"dynamic_sampling": True, "rollout_lag": 1, "max_steps": 5}, rewards=(sparse_reward,)),
    "ahead_hybrid": Case({"loss_type": "grpo", "rollout_lag": 1, "max_steps": 5}, model="lfm2"),
    "ahead_bf16": Case({"bf16": True, "rollout_lag": 1, **ONE_ROLLOUT, "rollout_batch_size": 16}),
    "ahead_images": Case({"rollout_lag": 2, "max_steps": 4}, "llava", rewards=(picture_reward,), prompts=8),
    "ahead_teacher": Case({"rollout_lag": 1, **TWO_STEPS, **FILTERED, "max_steps": 5}, teacher="llama"),
}

CASES = {
    "grpo": Case({"loss_type": "grpo"}),
    "bnpo": Case({"loss_type": "bnpo"}, model="llama"),
    "dr_grpo": Case({"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28, **TWO_STEPS, "max_steps": 5}),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0, **REUSED}),
    "sapo": Case({"loss_type": "sapo", **TWO_STEPS}, model="llama"),
    "luspo": Case({"loss_type": "luspo", "importance_sampling_level": "sequence", **TWO_STEPS}),
    "vespo": Case({"loss_type": "vespo", **REUSED}),
    "gspo": Case({"loss_type": "grpo", "importance_sampling_level": "sequence", **REUSED}),
    "two_sided": Case({"loss_type": "grpo", "delta": 1.2, **REUSED}),
    "kl": Case({"beta": 0.1, **REUSED}),
    "kl_bf16": Case({"beta": 0.1, "bf16": True, **ONE_ROLLOUT}),
    "kl_lora": Case({"beta": 0.1, **TWO_STEPS}, peft=LORA),
    # two steps: in the third a token of one split falls on the other side of rounding, and from there it is another run
    "truncated": Case({"mask_truncated_completions": True, "max_steps": 2}),
    "quantile": Case({"top_entropy_quantile": 0.25}),
    "quantile_bonus": Case({"top_entropy_quantile": 0.5, "entropy_coef": 0.05, **TWO_STEPS}),
    "entropy": Case({"entropy_coef": 0.05}),
    "adaptive": Case({"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.05}),
    "off_policy": Case({"off_policy_mask_threshold": 1e-4, **REUSED}),
    "moe": Case(model="moe"),
    "gpt2": Case({"beta": 0.05}, model="gpt2"),
    "two_rewards": Case(
        {"reward_weights": [1.0, 0.5], "scale_rewards": "batch"}, rewards=(letter_reward, sparse_reward)
    ),
    "gdpo": Case({"multi_objective_aggregation": "normalize_then_sum"}, rewards=(letter_reward, sparse_reward)),
    "reinforce_baseline": Case({"advantage_estimator": "reinforce_plus_plus_baseline"}, rewards=(sparse_reward,)),
    "prompt_mean": Case({"loss_aggregation": "prompt_mean", "mask_truncated_completions": True}),
    "sequence_sum": Case({"loss_aggregation": "sequence_sum_norm", "importance_sampling_level": "sequence"}),
    "dynamic_reused": Case(
        {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2, "advantage_estimator": "group_centered", **REUSED},
        rewards=(sparse_reward,),
    ),
    "checkpointing": Case({"gradient_checkpointing": True}, model="llama"),
    "token_budget": Case({"micro_batch_tokens": 40, "loss_type": "grpo"}),
    "hybrid": Case({"loss_type": "grpo", **REUSED}, model="lfm2"),
    "hybrid_kl": Case(
        {"beta": 0.1, "micro_batch_tokens": 60, "ddp_find_unused_parameters": True, **ONE_ROLLOUT}, model="lfm2"
    ),
    "hybrid_mamba": Case({"beta": 0.1, "micro_batch_tokens": 60, **TWO_STEPS}, model="falcon_h1"),
    "hybrid_moe": Case({"gradient_checkpointing": True, **TWO_STEPS}, model="qwen3_next"),
    "prefix": Case(
        {"forward": "prefix", "top_entropy_quantile": 0.5, "ddp_static_graph": True, **CUT, "max_steps": 5},
        model="llama",
    ),
    **QUANTISED,
    "images": Case({"beta": 0.1, "rollout_batch_size": 32}, "llava", rewards=(picture_reward,), prompts=8),
    # on four processes each samples one prompt, of which some have no image
    "images_apart": Case({"rollout_chunk_size": 4}, "llava", rewards=(picture_reward,), prompts=8),
    "images_tiled": Case({"loss_type": "grpo", **CUT}, "idefics3", rewards=(picture_reward,), prompts=9),
    "padded": Case({"forward": "padded", **TWO_STEPS}),
    "few_groups": Case({"global_batch_size": 8, "rollout_chunk_size": 4}),
    "sampling": Case({"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1}),
    "replayed": Case({**FILTERED, "temperature": 0.8, "beta": 0.1, **REUSED}),
    "routed": Case({"routing_replay": True, "gradient_checkpointing": True, **REUSED}, model="moe"),
    "rollout_func_few": Case(
        {"global_batch_size": 8, "rollout_chunk_size": 4, "beta": 0.1}, rollout_func=gathering_rollout
    ),
    "generated": Case({"rollout_chunk_size": 4, **FILTERED, **REUSED, "max_steps": 3}, rollout_func=generated_rollout),
    "evaluation": Case(
        {"per_device_eval_batch_size": 5, "num_generations_eval": 3, "eval_pass_threshold": 0.0, "max_steps": 2},
        evaluate=True,
    ),
    "cut": Case(
        {"global_batch_size": 10, "rollout_batch_size": 20, "rollout_chunk_size": 4, "max_steps": 5},
        prompts=8,
        evaluate=True,
    ),
    "cut_prompt_mean": Case({"loss_aggregation": "prompt_mean", "mask_truncated_completions": True, **CUT}),
    "cut_moe": Case(CUT, model="moe"),
    "cut_reused": Case(
        {"beta": 0.1, **REUSED, "global_batch_size": 6, "rollout_batch_size": 12, "rollout_chunk_size": 4}
    ),
    "cut_dynamic": Case({"dynamic_sampling": True, **CUT}, rewards=(sparse_reward,)),
    **AHEAD,
    "max_rl": Case({"advantage_estimator": "max_rl", "rollout_lag": 1, **TWO_STEPS}, rewards=(sparse_reward,)),
    "pass_at_k": Case(
        {"advantage_estimator": "pass_at_k", "advantage_k": 2, "dynamic_sampling": True, **REUSED},
        rewards=(sparse_reward,),
    ),
    "optimal_baseline": Case({"advantage_estimator": "optimal_baseline", **CUT}),
    # thresholds that leave out some tokens and completions, not all; probabilities of a vocabulary of 32 are small
    "trust_tv": Case(
        {
            "trust_region": "tv",
            "trust_region_threshold": 2e-3,
            "off_policy_mask_threshold": 1e-4,
            **REUSED,
            "max_steps": 3,
        }
    ),
    "trust_kl": Case(
        {"trust_region": "kl", "trust_region_threshold": 5e-5, "loss_type": "dr_grpo", "rollout_lag": 1, "max_steps": 5}
    ),
    "sequence_mask": Case({"sequence_mask_low": 0.97, "sequence_mask_high": 1.05, "beta": 0.1, **REUSED}),
    "own_loss": Case(
        {"loss_type": "topr_near", "loss_aggregation": "sequence_mean", **CUT, **REUSED, "rollout_batch_size": 36}
    ),
    "teacher": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, **REUSED, **FILTERED},
        teacher="llama",
    ),
    "teacher_alone": Case({"num_generations": 1, "teacher_kl_coef": 0.5, **TWO_STEPS}, rewards=(), teacher="llama"),
    "dropout": Case({"top_entropy_quantile": 0.5, **REUSED}, model="dropout"),
    "dropout_cut": Case({"gradient_checkpointing": True, "dynamic_sampling": True, **CUT}, model="dropout"),
    "dropout_ahead": Case({"rollout_lag": 1, "max_steps": 4}, model="dropout"),
    "lora_dropout": Case({"beta": 0.1, "gradient_checkpointing": True, **TWO_STEPS}, peft=DROPPING),
    "lora_dropout_bf16": Case({"bf16": True, **ONE_ROLLOUT}, peft=DROPPING),
    "lora_dropout_hybrid": Case({"loss_type": "grpo", **REUSED}, model="lfm2", peft=DROPPING),
    "dora_dropout": Case({"micro_batch_tokens": 60, **FILTERED, **TWO_STEPS}, peft={**DROPPING, "use_dora": True}),
}

FULL = (
    # losses and terms of a token or a sequence, whose partitions test_losses.py proves
    *("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gspo", "two_sided"),
    *("off_policy", "trust_tv", "trust_kl"),
    *("sequence_sum", "prompt_mean", "sequence_mask", "kl", "entropy", "adaptive", "quantile"),
    # advantages, which are computed of whole groups before a step is divided: test_advantages.py, test_pass_at_k.py
    *("gdpo", "two_rewards", "reinforce_baseline", "max_rl", "pass_at_k", "optimal_baseline", "dynamic_reused"),
    # what test_sequence_parallel.py or test_bitwise.py takes on several processes
    *("replayed", "cut_moe", "moe", "few_groups", "truncated"),
    # on one process: trainer/test_replay.py, trainer/test_teacher.py, trainer/test_quantised.py
    *("routed", "teacher", "teacher_alone", *QUANTISED),
    # with a lag: test_ahead.py
    *AHEAD,
    # another case of the same kind is taken
    *("quantile_bonus", "evaluation"),  # of evaluations: distributed/test_two_processes.py
    *("cut_prompt_mean", "cut_dynamic", "cut_reused", "hybrid", "hybrid_moe", "hybrid_mamba", "padded", "sampling"),
    *("gpt2", "kl_lora", "checkpointing", "token_budget", "images_apart", "images_tiled", "rollout_func_few"),
    *("dropout", "dropout_cut", "dropout_ahead", "lora_dropout_bf16", "lora_dropout_hybrid", "dora_dropout"),
)

SETTINGS = {
    "global_batch_size": 16,
    "rollout_chunk_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 2,  # two rollouts: the second by what the first has taught
    "learning_rate": 1e-3,
    "adam_epsilon": ADAM_EPSILON,
    "gradient_checkpointing": False,
    "seed": 3,
}


def quantised_model(bits: dict[str, Any], folder: Path) -> Any:
    """A tiny model of sizes that bitsandbytes' blocks divide; its weights are quantised when they are read."""
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    config = BitsAndBytesConfig(**bits)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@dataclass(frozen=True)
class CaseRun(Run):
    eval_path: str | None = None  # folder of a data set that is evaluated once, when training ends
    cuts: Cuts | None = None  # how completions are cut into rows


class Bench:
    """Makes the runs of the matrix over one folder of models and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, kind: str) -> str:
        path = self.folder / kind
        if not path.exists():
            if kind in FAMILIES:
                image_model(kind).save_pretrained(path)
                image_processor(kind).save_pretrained(path)
            elif kind in BITS:
                quantised_model(BITS[kind], self.folder / f"{kind}_of").save_pretrained(path)
                tiny_tokenizer().save_pretrained(path)
            elif kind == "dropout":
                tiny_model("gpt2", resid_pdrop=0.1, embd_pdrop=0.1).save_pretrained(path)
                tiny_tokenizer().save_pretrained(path)
            else:
                model = architecture(kind) if kind in PREFIXED and kind not in TINY else tiny_model(kind)
                model.save_pretrained(path)
                tiny_tokenizer().save_pretrained(path)
        return str(path)

    def data(self, count: int, images: bool = False) -> str:
        path = self.folder / f"{'images' if images else 'prompts'}_{count}"
        if not path.exists():
            rows = image_rows(count, (1, 0, 2), ((8, 8), (16, 8))) if images else prompts(count)
            rows.save_to_disk(str(path))
        return str(path)

    def run(self, case_name: str, micro_batch_size: int, trainer: str = OURS, **changes: Any) -> CaseRun:
        """The run of a case under one micro-batch size; `changes` replace fields of `CaseRun` or settings."""
        case = CASES[case_name]
        fields = {f.name for f in dataclasses.fields(CaseRun)}
        settings = {k: v for k, v in changes.items() if k not in fields}
        teacher = {} if case.teacher is None else {"teacher_model": self.model(case.teacher)}
        run = CaseRun(
            name=f"{case_name}-{trainer}-{micro_batch_size}",
            model_path=self.model(case.model),
            data_path=self.data(case.prompts, case.model in FAMILIES),
            rewards=case.rewards,
            config={**SETTINGS, **teacher, **case.config, "per_device_train_batch_size": micro_batch_size, **settings},
            trainer=trainer,
            peft=LoraConfig(**case.peft) if case.peft else None,
            eval_path=self.data(5) if case.evaluate else None,
            rollout_func=case.rollout_func,
        )
        return dataclasses.replace(run, **{k: v for k, v in changes.items() if k in fields})

"""Checks of the settings of sampling, replay, rewards and processes: errors, and warnings."""

from typing import Any

import torch
from transformers import StopStringCriteria

from ..algorithms.policy_losses import POLICY_LOSSES
from ..batching.sizes import BatchGeometry, EpochLayout, ceil_div
from ..errors import ConfigError
from ..forward.architecture import base_model_of
from ..rollouts.settings import LOGPS, SCORE, template_of
from ..sampling.keyed import own_generate, setting_of
from ..sampling.sampler import Sampler
from ..settings import named, refuse_excluded
from ..view import TrainerView

# Accelerate's names of the engines that are known to keep the promise
_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
# settings with which `generate` needs what rollouts do not give it, or returns something else
_FAIL = (
    *("assistant_early_exit", "constraints", "dola_layers", "force_words_ids", "is_assistant", "token_healing"),
    *("prompt_lookup_num_tokens", "return_dict_in_generate", "use_mtp"),
)


def check_generation(view: TrainerView, sampler: Sampler) -> None:
    if sampler.config is None or own_generate(view.model) is not None:
        return
    model, scores = base_model_of(view.model), torch.zeros(1, view.model.config.get_text_config().vocab_size)
    try:
        for name in _FAIL:
            if setting_of(model, view.generation_config, name):
                raise ValueError(f"{name} cannot be used to sample a batch of prompts")
        config, ids = model._prepare_generation_config(view.generation_config)[0], torch.zeros(1, 2).long()
        config.guidance_scale = None  # whose processor runs the model
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
        model._get_logits_processor(config, 2, ids, device="cpu", model_kwargs={})(ids, scores)
        if config.stop_strings:
            StopStringCriteria(view.tokenizer, config.stop_strings)
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"transformers cannot sample with these settings: {error}; change generation_kwargs or generation_config."
        ) from None


def check_ends(sampler: Sampler) -> None:
    if sampler.whole:
        return
    name, count = sampler.several
    if count not in (None, 1):
        raise ConfigError(
            f"{name}={count} in generation_kwargs, or in the model's generation_config: sampling would return {count} "
            "rows of each prompt, and every completion of a group is a row already; use 1, and num_generations."
        )
    if not (strings := sampler.stop_strings):
        return
    if not sampler.steps:
        raise ConfigError(
            f"stop_strings={strings!r}: use_transformers_continuous_batching=True does not support them; use "
            "eos_token_id in generation_kwargs, or turn it off."
        )
    if "" in ([strings] if isinstance(strings, str) else strings):
        raise ConfigError(f"stop_strings={strings!r}: an empty text would end every completion; leave it out.")


def check_replay(view: TrainerView, sampler: Sampler) -> None:
    if view.args.replay.masks:
        facts: dict[str, Any] = {
            "own_sampling": view.overridden(SCORE, "_generate_single_turn"),
            "own_log_probs": view.overridden(LOGPS),
            "foreign": None if "masks" in sampler.returns else sampler.other,
            "outside_masks": "" if sampler.config is None else "; ".join(sampler.changed),
        }
        remedy = "Leave one of the two out; sampling without top_p, top_k and min_p needs no masks."
        refuse_excluded("sampling_mask", "sampling_mask='replay'", facts, remedy)
    if view.args.replay.experts:
        plugin, config = getattr(view.accelerator.state, "fsdp_plugin", None), sampler.config
        facts = {
            "own_method": view.overridden(SCORE, LOGPS),
            "takes_images": view.takes_images,
            "torch_compile": view.args.torch_compile,
            "fsdp_checkpointing": getattr(plugin, "activation_checkpointing", False),
            "prefill_chunk_size": config is not None and config.prefill_chunk_size is not None,
        }
        refuse_excluded("routing_replay", "routing_replay=True", facts, "Leave one of the two out.")


def refuse_parallelism(accelerator: Any, tensor_parallel: int) -> None:
    engine, mesh = accelerator.distributed_type.value, accelerator.parallelism_config
    sizes = {} if mesh is None else {name: size for name, size in vars(mesh).items() if name.endswith("_size")}
    sizes["tp_size"] = max(tensor_parallel, sizes.get("tp_size", 1))
    unknown = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    unknown += [f"the engine {engine}"] if engine not in _ENGINES else []
    if getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) != 2:
        unknown.append("FSDP 1")
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: each process has its own rows here, and nothing else is known to add up to the "
            "right update; train with data parallelism, FSDP2 (fsdp_version: 2) or ZeRO, and share long completions "
            "between processes with sequence_parallel_size."
        )


def remarks(view: TrainerView, sampler: Sampler) -> list[str]:
    args, names = view.args, view.reward_func_names
    twice = {name for name in names if names.count(name) > 1}
    best = args.load_best_model_at_end and args.metric_for_best_model in ("loss", "eval_loss")
    thinks = "think_format_reward" in names and _end_of_prompt(view).endswith("<think>")
    own_limit = args.trust_region is not None or view.loss_type in POLICY_LOSSES
    old = "logps" in sampler.returns or args.rollout_lag or view.geometry.steps_per_rollout * view.num_iterations > 1
    limits = [name for name in named("limit") if getattr(args, name) is not None]
    sentences = {
        f"epsilon={args.epsilon:g} does nothing with this trust_region or loss_type, which has its own limit; leave it "
        "out.": own_limit and args.epsilon != type(args).epsilon,
        f"{', '.join(limits)} leaves nothing out: a rollout batch is trained once, by the policy that sampled it. Set "
        "rollout_lag or num_iterations, or a rollout_batch_size of several steps.": limits and not old,
        f"Several reward functions are named {', '.join(twice)}, so their metrics are merged; rename one.": twice,
        "dynamic_sampling=True replaces no group beside a teacher, from which groups with equal rewards learn too; "
        "leave it out.": args.dynamic_sampling and view.teacher_model is not None,
        "load_best_model_at_end=True loads the checkpoint with the lowest eval_loss, which does not follow the reward; "
        "set metric_for_best_model='eval_reward'.": best,
        "think_format_reward is always 0, because prompts end in the <think> that it looks for in the completion; use "
        "another reward or template.": thinks,
    }
    return [sentence for sentence, applies in sentences.items() if applies]


def _end_of_prompt(view: TrainerView) -> str:
    options, data = {**template_of(view), "tokenize": False, "add_generation_prompt": True}, view.train_dataset
    try:
        prompt = data[0]["prompt"] if hasattr(data, "__len__") else [{"role": "user", "content": "?"}]
        text = prompt if isinstance(prompt, str) else view.processing_class.apply_chat_template(prompt, **options)
        return text.rstrip()
    except Exception:  # no template, or one that refuses this prompt
        return ""


def check_equal_shares(geometry: BatchGeometry, num_prompts: int | None, drop_last: bool) -> None:
    """Raise a ConfigError for rollout batches, the last of an epoch too, that vLLM's processes cannot share evenly.

    Tensor parallel engines need equal shares; other engines have only been run with equal shares. `num_prompts` of the
    training set is None where unknown.
    """
    processes, prompts, tail = geometry.num_processes, geometry.prompts_per_rollout, 0
    if num_prompts is not None:
        trained = EpochLayout(geometry, num_prompts, drop_last).trained_completions
        tail = ceil_div(trained, geometry.num_generations) % prompts
    if processes > 1 and (prompts % processes or tail % processes):
        raise ConfigError(
            f"use_vllm needs equal shares: rollout batches of {prompts} prompts (last of an epoch: {tail or prompts})"
            f" on {processes} processes; choose a rollout_batch_size that is a multiple of num_generations * "
            f"{processes} = {geometry.num_generations * processes}, and a data set (or dataloader_drop_last=True) whose"
            " last rollout batch is one too."
        )

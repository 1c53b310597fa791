"""Checks of a trainer: before TRL's constructor (`check_arguments`), after it, and before training.

Differs from TRL: the errors come at construction, with the values, the rule and the remedy.
"""

import copy
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from transformers import ProcessorMixin

from .. import compat
from ..config import GRPOConfig
from ..errors import ConfigError, did_you_mean, refuse_split_dependence, shortened
from ..forward.architecture import base_model_of, layer_kinds
from ..forward.lm_head import refuse_unknown_head
from ..forward.quantised import outlier_thresholds
from ..forward.snapshot import refuse_replaced_forward, sharing_copy
from ..forward.token_slice import refuse_heads
from ..rollouts.settings import SCORE, advantage_rule, template_of
from ..rollouts.source import Rollouts
from ..rollouts.tools import check_names, check_tools
from ..run.checkpoint import create_output_dir
from ..run.optimizer import check_weights
from ..runtime.determinism import unfit_kernels
from ..runtime.messages import logger
from ..sampling.equal_shares import why_equal
from ..sampling.sampler import Sampler, suppressed_in
from ..sampling.vllm import SENT
from ..settings import named, refuse_excluded
from ..step.gradients import refuse_gradient_hooks
from ..upstream import argument_checks
from ..upstream.data_checks import Survey, check_prompts, named_sets, with_length
from ..upstream.reference import weight_sums
from ..view import TrainerView
from . import model as models
from . import settings
from .data import check_images, check_lengths, check_tokens

_UNUSED_HOOKS = (
    "_get_train_sampler",
    "_get_eval_sampler",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "get_gamma_weights",
)
# methods of sampling that users override
_SAMPLING_HOOKS = (SCORE, "_generate_single_turn")
# methods of TRL's that are not called, and what to use instead
_WITHDRAWN = {
    "_generate": "a rollout_func, which may call trainer.generate(prompts), or _generate_and_score_completions",
    "_tool_call_loop": "_generate_single_turn (called for every turn), or a rollout_func with tools of its own",
    "_tokenize_prompts": "a chat_template, or prompts that the data set has as they are to be tokenized",
    "_get_tool_suffix_ids": "a chat_template, which renders tools' answers",
    "_log_metric": "log_metric in reward functions, or log",
}


def check_arguments(
    config: GRPOConfig,
    model: Any,
    rewards: Any,
    data_sets: tuple[Any, Any],
    processing_class: Any,
    tools: Any,
    factories: Any,
) -> tuple[Any, dict[str, Survey]]:
    """Refuse arguments before anything is loaded; returns the tokenizer or processor, and surveys of the data sets."""
    argument_checks.check_generation_kwargs(config)
    sets = named_sets(*data_sets)
    load = cast(dict[str, Any], config.model_init_kwargs or {})
    if isinstance(model, str):
        argument_checks.find_model(model, load)
    else:
        argument_checks.refuse_compiled(model)
        argument_checks.check_causal_lm(model)
        if config.rollout_lag:
            refuse_replaced_forward(model, by_user=True)
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        if isinstance(reward, str):
            argument_checks.find_reward_model(reward, load)
    surveyed = {split: check_prompts(dataset, split) for split, dataset in sets.items() if factories is None}
    check_names([data for data in with_length(*data_sets) if hasattr(data, "select_columns")], factories)
    if processing_class is None:
        processing_class = compat.processing_class_of(model, config)
    if getattr(processing_class, "tokenizer", processing_class).eos_token_id is None:
        raise ConfigError("the tokenizer has no end token; set tokenizer.eos_token, and pass it as processing_class.")
    if tools or factories is not None:
        first_rows = [row for data in sets.values() for row in itertools.islice(data, 1)]
        check_tools(tools or [], processing_class, first_rows)
    if config.dynamic_sampling and data_sets[0] is not None and not hasattr(data_sets[0], "__len__"):
        raise ConfigError(
            "dynamic_sampling=True draws from the whole training set, and this one is a stream; use one with a length."
        )
    if config.should_save:
        create_output_dir(str(config.output_dir))
    return processing_class, {split: survey for split, survey in surveyed.items() if survey is not None}


def _refuse_settings(view: TrainerView, config: GRPOConfig) -> None:
    name, names = config.eval_pass_reward, view.reward_func_names
    if name is not None and (count := names.count(name)) != 1:
        remedy = did_you_mean(name, names, f"use one of {', '.join(names)}.")
        if count:
            remedy = (
                "wrap the one that is meant in a function (`def`) with a name of its own, or load a reward model from "
                "a folder with one."
            )
        raise ConfigError(f"eval_pass_reward={name!r} is the name of {count} reward functions of this run; {remedy}")
    if config.reward_workers and view.environment_factories is not None:
        raise ConfigError(
            f"reward_workers={config.reward_workers} with environment_factory, whose environments cannot leave the "
            "training process; use reward_workers=0."
        )
    accelerator = view.accelerator
    settings.refuse_parallelism(accelerator, view.get_tp_size())
    if not view.sharded and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ConfigError(
            "sync_each_batch=True sums gradients in every backward pass; leave it out of gradient_accumulation_kwargs."
        )
    if config.dynamic_sampling:
        _refuse_dynamic_sampling(view, config)
    kwargs: Any = config.gradient_checkpointing_kwargs or {}
    if view.aux_loss_enabled and config.gradient_checkpointing and kwargs.get("use_reentrant"):
        raise ConfigError(
            "router_aux_loss_coef with gradient_checkpointing_kwargs={'use_reentrant': True}: router logits have no "
            "gradient there, nor would the auxiliary loss; leave use_reentrant out, or set router_aux_loss_coef=0."
        )


def _refuse_dynamic_sampling(view: TrainerView, config: GRPOConfig) -> None:
    rows, prompts = len(view.train_dataset), config.geometry.prompts_per_rollout
    if rows <= prompts:
        raise ConfigError(
            f"dynamic_sampling=True draws further prompts from the rest of the training set, which has {rows} and "
            f"a rollout batch takes {prompts}; use more prompts, or a smaller rollout_batch_size."
        )
    if advantage_rule(view).depends_on_the_batch and (method := view.overridden("_generate_and_score_completions")):
        raise ConfigError(
            f"dynamic_sampling=True computes advantages over the batch once it is full, and the advantages of {method} "
            "would be lost; use an estimator that looks at one group at a time (the default does)."
        )


def _refuse_images_and_tools(view: TrainerView, rollouts: Rollouts) -> None:
    processes, prepare = view.accelerator.num_processes, rollouts.images.prepare
    may_be_shown = prepare is not None and bool(view.tools or view.environment_factories)
    if may_be_shown and view.sharded:
        raise ConfigError(
            "images with tools or an environment under FSDP or DeepSpeed: every process has to run the image tower in "
            "every forward or none, and tools may show an image to only one; train with DDP."
        )
    if may_be_shown and view.rollout_func is not None:
        raise ConfigError(
            "a rollout_func together with tools or an environment, and a model that takes images: TRL leaves out the "
            "images of prompts there; take the tools into rollout_func, or leave it out."
        )
    if view.tools and processes > 1 and (why := why_equal(view.args, False)) is not None:
        raise ConfigError(
            f"tools or an environment on {processes} processes: {why}, and in later turns they have not; use "
            "vllm_tensor_parallel_size=1, a server, or one process."
        )
    for data in with_length(view.train_dataset, view.eval_dataset):
        if not may_be_shown:
            check_images(data, prepare)


def check_trainer(
    view: TrainerView, rollouts: Rollouts, config: GRPOConfig, surveys: Mapping[str, Survey]
) -> list[str]:
    """Refuse a trainer that cannot be trained, and turn dropout off where asked; returns what is not covered."""
    policy = view.model
    if config.disable_dropout:
        for module in view.models:
            argument_checks.disable_random_parts(module)
    _refuse_settings(view, config)
    if method := view.overridden("_prepare_inputs"):
        raise ConfigError(
            f"{method} would be given a step's rows and return a RolloutBatch of all processes, not TRL's dictionary; "
            "override _generate_and_score_completions (rows -> the dictionary), or compute_loss (each micro-batch)."
        )
    sampler = rollouts.sampler
    settings.check_ends(sampler)
    refuse_overrides(view)
    settings.check_generation(view, sampler)
    check_tokens(view, sampler, surveys)
    _refuse_images_and_tools(view, rollouts)
    refuse_unknown_head(base_model_of(policy))
    argument_checks.refuse_adapters(policy)
    if method := view.overridden(*_UNUSED_HOOKS):
        logger.warning(
            f"{method} has no effect here, unless your own code calls it: stock TRL calls it, and grpo_ext does not. "
            "Loaders and losses are built in batching.prompt_order and algorithms.losses."
        )
    models.check_optimizer(view.optimizer, policy, view.sharded)
    check_weights(view.optimizer, policy)
    if not sampler.pads:
        settings.check_equal_shares(config.geometry, view.num_prompts, config.dataloader_drop_last)
    dependent = models.split_dependence(policy, config.neftune_noise_alpha)
    uncovered = refuse_split_dependence(dependent, config.allow_split_dependent)
    if config.bitwise_invariant:
        check_bitwise(view, rollouts)
    if not view.is_deepspeed_enabled:  # which trains float32 copies
        models.check_half_weights(policy, config.fp16)
    if config.rollout_lag:
        _check_ahead(view, config, sampler)
    settings.check_replay(view, sampler)
    if config.sequence_parallel_size > 1:
        _check_sequence_parallel(view, rollouts, config.sequence_parallel_size)
    once = functools.cache(logger.warning)
    rollouts.refuse_changes = functools.partial(refuse_changes, view, rollouts, built_for(view, rollouts), once)
    return uncovered + check_lengths(view, surveys.get("training"), config.allow_split_dependent)


def _check_ahead(view: TrainerView, config: GRPOConfig, sampler: Sampler) -> None:
    copied = [model for model in (view.model, view.teacher_model) if model is not None]
    noise = list(models.random_parts(view.model)) + (["neftune_noise_alpha"] if config.neftune_noise_alpha else [])
    facts = {
        "other_sampling": sampler.other,
        "noise": "".join(noise[:1]),
        "scales": any(map(outlier_thresholds, copied)),
        "shown_images": view.takes_images and bool(view.tools or view.environment_factories),
        "stream": not hasattr(view.train_dataset, "__len__"),
    }
    lag = f"rollout_lag={config.rollout_lag}"
    refuse_excluded("rollout_lag", lag, facts, "Change that, or use rollout_lag=0.")
    for model in copied:
        sharing_copy(model, set(), next(view.model.parameters()).device)  # raises where it cannot


def _check_sequence_parallel(view: TrainerView, rollouts: Rollouts, size: int) -> None:
    forwards = rollouts.worker.forwards
    for model in view.models:
        refuse_heads(base_model_of(model).config, size, view.accelerator.num_processes)
        forwards.refuse_other_than_packs(model, forwards.choice.planned(model))


def check_bitwise(view: TrainerView, rollouts: Rollouts) -> None:
    facts = unfit_kernels(view.accelerator.device, "linear_attention" in layer_kinds(view.model.config))
    facts |= _sampled_by(view, rollouts.sampler) | {"vllm_engine": not rollouts.worker.engine.has_same_bits()}
    refuse_excluded("bitwise_invariant", "bitwise_invariant=True", facts)


def _sampled_by(view: TrainerView, sampler: Sampler) -> dict[str, Any]:
    """What samples and scores completions, as facts for `refuse_excluded`."""
    scorers = [type(func).__name__ for func in view.reward_funcs if isinstance(func, nn.Module)]
    return {"other_sampling": sampler.other, "reward_models": ", ".join(scorers)}


def warn_before_training(view: TrainerView, rollouts: Rollouts, uncovered: list[str]) -> None:
    """Warn of what the promise leaves out; refuse parts that were replaced since the trainer was built."""
    compat.warn_of_untested_versions()
    refuse_overrides(view)
    refuse_gradient_hooks(view.model, view.sharded)  # before forms and buffers are compared
    if view.args.bitwise_invariant:
        check_bitwise(view, rollouts)
    # `accelerate launch` sets the address where it was asked for several processes, also where it then starts one
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and "WORLD_SIZE" not in os.environ and view.accelerator.num_processes == 1:
        logger.warning(
            "This process trains alone, but MASTER_ADDR is set. `accelerate launch` sets it for several processes, and "
            "then starts one where it finds no second accelerator. On a CPU use `torchrun --nproc_per_node 2`; for "
            "machines with one accelerator each add --multi_gpu. If you meant one process, ignore this."
        )
    sampler = rollouts.sampler
    for sentence in settings.remarks(view, sampler):
        logger.warning(sentence)
    for sentence in uncovered if sampler.uncovered is None else [*uncovered, sampler.uncovered]:
        logger.warning(f"The promise that the split does not matter does not cover this run: {sentence}.")


# ---- Changes since the trainer was built; settings not named here are read when a rollout batch begins ------------


def built_for(view: TrainerView, rollouts: Rollouts) -> dict[str, Any]:
    engine, prepare = view.vllm_generation, rollouts.images.prepare
    tokens = [ids.tolist() for ids in suppressed_in(view)] if view.use_vllm is view.args.use_vllm else None
    no_loop, lag = view.async_loop is None, view.args.rollout_lag
    values = {name: getattr(view, name) for mark in ("planned", "copied", "engine") for name in named(mark)} | {
        "sampling_mask or routing_replay": view.args.replay,
        "suppress_tokens or min_new_tokens (with sampling_mask)": tokens,
        "vllm_generation": engine,
        "pad_token_id": view.tokenizer.pad_token_id,
        "names in environment_factories": set(view.environment_factories or ()),
        "processing_class (a processor)": isinstance(view.processing_class, ProcessorMixin),
        "tools (asynchronous)": no_loop and any(map(inspect.iscoroutinefunction, view.standalone_tools)),
        "beta": not view.args.beta and view.ref_model is None and view.beta,
        "teacher_model": view.teacher_model,
        "args.steps_per_generation": view.args.steps_per_generation,
    }
    if prepare is not None:
        values["tools (of a model that takes images)"] = bool(view.tools or view.environment_factories)
        prompts = view.processing_class, template_of(view)
        values["processing_class or chat_template"] = prompts != (prepare.processor, prepare.template)
    if lag:  # the thread has a copy of the one, and reads the others while it samples
        values["ref_model"] = view.ref_model
        if not (view.args.sync_ref_model or view.sharded):
            # of two parameters, because this runs for every rollout batch; what moves a reference moves all of it
            values["the weights of ref_model"] = weight_sums(view.ref_model, ends=True)
        values |= {f"vllm_generation.{name}": copy.copy(getattr(engine, name, None)) for name in SENT}
    return values


def refuse_changes(
    view: TrainerView, rollouts: Rollouts, built: Mapping[str, Any], warn_once: Callable[[str], None]
) -> None:
    """Refuse a change since the trainer was built (`built`) that it cannot follow."""
    for name, value in built_for(view, rollouts).items():
        if value != built.get(name) and (view.model.training or name not in named("planned")):
            read_once = ", or change generation_config" if name in named("copied") else ""
            raise ConfigError(
                f"{name} was changed to {shortened(repr(value), 80)}, and the trainer was built with "
                f"{shortened(repr(built.get(name)), 80)}; set it in GRPOConfig, or pass it to the trainer{read_once}."
            )
    columns = {name: len(getattr(view, name)) for name in ("reward_funcs", "reward_func_names", "reward_weights")}
    if len(set(columns.values())) > 1:
        raise ConfigError(f"a change has left {columns}: change these together, to the same length.")
    sampler = rollouts.sampler
    settings.check_ends(sampler)
    if sampler.changed:
        warn_once(
            f"{'; '.join(sampler.changed)}: completions are sampled from other scores than those that training uses, "
            "which biases the gradient, as in TRL."
        )
    if view.model.training:
        refuse_overrides(view)
        settings.check_replay(view, sampler)
        for name in ("rollout_lag", "bitwise_invariant"):
            if value := getattr(view.args, name):
                refuse_excluded(name, f"{name}={value}", _sampled_by(view, sampler))


def refuse_overrides(view: TrainerView) -> None:
    size = view.args.sequence_parallel_size
    if size > 1 and (method := view.overridden("compute_loss", "_compute_loss", settings.LOGPS)):
        raise ConfigError(
            f"sequence_parallel_size={size} and {method}: each of {size} processes would add what it computes, and the "
            "gradient would count it that many times. Use sequence_parallel_size=1."
        )
    for name, remedy in _WITHDRAWN.items():
        if method := view.overridden(name):
            raise ConfigError(f"{method} would not be called: this trainer samples and logs by itself. Use {remedy}.")
    if view.args.rollout_lag and (method := view.overridden(*_SAMPLING_HOOKS)):
        raise ConfigError(
            f"rollout_lag={view.args.rollout_lag} and {method}: it would sample with the weights that are trained, "
            "on a thread beside training. Use rollout_lag=0; _calculate_rewards, compute_loss and "
            "_get_per_token_logps_and_entropies may be overridden with a lag too."
        )

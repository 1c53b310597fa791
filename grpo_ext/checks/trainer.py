"""What is checked of a trainer before and after TRL's constructor, and what the promise does not cover of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

from accelerate.logging import get_logger
from torch import nn
from transformers import ProcessorMixin

from .. import compat, contract
from ..algorithms.advantages import AdvantageRule
from ..batching.sizes import check_equal_slices
from ..config import GRPOConfig
from ..errors import ConfigError, DataError, did_you_mean
from ..forward.architecture import layer_kinds
from ..forward.images import images_of
from ..forward.lm_head import refuse_unknown_head
from ..forward.positions import settle_rope
from ..forward.reference import base_model_of
from ..rollouts.build import overridden, own_sampling, samples_by_key
from ..rollouts.decoding import own_generate
from ..rollouts.environments import check_names
from ..rollouts.rollout_func import why_equal
from ..rollouts.tools import check_tools
from ..runtime.collectives import shards_parameters
from ..runtime.determinism import check_kernels
from .ahead import check_ahead, refuse_overrides_ahead, refuse_own_forward
from .data import (
    check_data_sets,
    check_images,
    check_prompt_lengths,
    check_stream,
    first_rows,
    has_readable_prompts,
    iterate_prompts,
    with_length,
    with_rows,
)
from .model import (
    check_causal_lm,
    check_half_weights,
    check_optimizer,
    disable_random_parts,
    find_model,
    refuse,
    refuse_prompt_learning,
    split_dependence,
)

logger = get_logger(__name__)

_UNUSED_HOOKS = (
    "_get_train_sampler",
    "_get_eval_sampler",
    "get_high_entropy_mask",
    "get_gamma_weights",
    "get_off_policy_mask",
)


def check_arguments(
    config: GRPOConfig, model: Any, data_sets: tuple[Any, Any], processing_class: Any, tools: Any, factories: Any
) -> Any:
    """Everything that is refused of a constructor's arguments, before anything is loaded.

    Args:
        data_sets: for training and evaluation; factories: of environments.

    Returns:
        The tokenizer or processor, the model's where none is passed.

    Raises:
        ConfigError, DataError, ModelError: with the argument, the rule and the remedy.
    """
    if isinstance(model, str):
        find_model(model, cast(dict[str, Any], config.model_init_kwargs or {}))
    else:
        check_causal_lm(model)
    if config.rollout_lag:
        refuse_own_forward(model)
    if factories is None:
        check_data_sets(*data_sets)
    check_names(with_rows(*data_sets), factories)
    if processing_class is None:
        processing_class = compat.processing_class_of(model, config)
    answers = bool(tools or factories)
    if answers:
        check_tools(processing_class, first_rows(*data_sets))
    check_stream(data_sets[0], config.dynamic_sampling, isinstance(processing_class, ProcessorMixin) and not answers)
    return processing_class


def check_overrides(cls: type, ours: type) -> None:
    """Warn of methods a subclass overrides that TRL calls and this trainer does not."""
    unused = [name for name in _UNUSED_HOOKS if getattr(cls, name) is not getattr(ours, name)]
    if unused:
        logger.warning(
            f"{cls.__name__} overrides {', '.join(unused)}, which stock TRL calls and grpo_ext does not; the override"
            " has no effect here. Loaders and losses are built in batching.prompt_order and algorithms.losses."
        )


def refuse_overrides(trainer: Any) -> None:
    """Refuse overrides that would not be called, or not with the weights that sample.

    Raises:
        ConfigError: names the override and what to override instead.
    """
    if own := overridden(trainer, "_tool_call_loop"):
        raise ConfigError(
            f"{own} would not be called: this trainer answers tools transcript by transcript. Override "
            "_generate_single_turn (called for every turn) or _generate (makes whole completions) instead."
        )
    if trainer.args.rollout_lag:
        refuse_overrides_ahead(trainer)


def check_parallelism(tensor_parallel_size: int) -> None:
    """Refuse tensor parallelism, whose ranks would be given different rows.

    Raises:
        ConfigError: more than one rank holds parts of one layer.
    """
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor parallel size {tensor_parallel_size}: this trainer assigns rows to every process, and the ranks "
            "of one model replica need the same rows; train with data parallelism, FSDP or DeepSpeed ZeRO."
        )


def _check_rewards(trainer: Any, config: GRPOConfig) -> None:
    name, names = config.eval_pass_reward, trainer.reward_func_names
    if name is not None and names.count(name) != 1:
        meant = did_you_mean(name, names, f"use one of {', '.join(names)}.")
        how_many = "the name of several reward functions" if name in names else "no reward function of this run"
        raise ConfigError(f"eval_pass_reward={name!r} is {how_many}; {meant}")
    if config.reward_workers and trainer.environment_factories is not None:
        raise ConfigError(
            f"reward_workers={config.reward_workers} with environment_factory: reward functions are called with the "
            "environments, which cannot leave the training process; use reward_workers=0."
        )


def check_trainer(trainer: Any, config: GRPOConfig, ours: type) -> list[str]:
    """Everything that is refused of a trainer; what the promise does not cover of it, as sentences.

    Args:
        config: as the user gave it.
        ours: this package's trainer, which the class of `trainer` may be a subclass of.

    Raises:
        ConfigError, DataError, ModelError, SplitDependentError: before anything is trained.
    """
    policy, accelerator = trainer.model, trainer.accelerator
    if config.disable_dropout:
        for module in (policy, trainer.ref_model):
            if module is not None:
                disable_random_parts(module)
    _check_images_and_tools(trainer)
    _check_rewards(trainer, config)
    refuse_overrides(trainer)
    refuse_unknown_head(base_model_of(policy))
    refuse_prompt_learning(policy)
    check_overrides(type(trainer), ours)
    check_parallelism(trainer.get_tp_size())
    check_optimizer(trainer.optimizer, policy)
    if trainer.use_vllm:
        dataset = trainer.train_dataset
        length = len(dataset) if hasattr(dataset, "__len__") else None
        check_equal_slices(trainer.geometry, length, config.dataloader_drop_last)
    uncovered = refuse(split_dependence(policy, config.neftune_noise_alpha), config.allow_split_dependent)
    if not shards_parameters(accelerator) and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ConfigError(
            "sync_each_batch=True sums gradients over processes in every backward pass; this trainer sums them "
            "once, after the last. Leave it out of gradient_accumulation_kwargs."
        )
    if config.bitwise_invariant:
        check_bitwise(trainer)
    if not trainer.is_deepspeed_enabled:  # which trains float32 copies
        check_half_weights(policy, config.fp16)
    if config.dynamic_sampling:
        _check_dynamic_sampling(trainer, config)
    if config.rollout_lag:
        check_ahead(trainer, config)
    return uncovered + _check_lengths(trainer, config)


def _check_images_and_tools(trainer: Any) -> None:
    """Refuse images that nothing can be made of, and what cannot show or answer alike on every process."""
    accelerator = trainer.accelerator
    with_images = trainer._rollouts.images.prepare is not None
    may_be_shown = with_images and bool(trainer.tools or trainer.environment_factories)
    if may_be_shown and shards_parameters(accelerator):
        raise ConfigError(
            "images with tools or an environment under FSDP or DeepSpeed: every process has to run the image tower in "
            "every forward or none, and tools may show an image to one alone; train with DDP."
        )
    if may_be_shown and trainer.rollout_func is not None:
        raise ConfigError(
            "a rollout_func together with tools or an environment, and a model that takes images: TRL leaves out the "
            "images of prompts there; take the tools into rollout_func, or leave it out."
        )
    if trainer.tools and accelerator.num_processes > 1 and (why := why_equal(trainer.args, False)) is not None:
        raise ConfigError(
            f"tools or an environment on {accelerator.num_processes} processes: {why}, and in later turns they have "
            "not; use vllm_mode='colocate' with vllm_tensor_parallel_size=1, or one process."
        )
    readable = with_length(trainer.train_dataset, trainer.eval_dataset)
    if with_images and not may_be_shown:
        for data in readable:
            check_images(data, trainer._rollouts.images.prepare)
    if not with_images:
        _refuse_images(readable)


def _check_lengths(trainer: Any, config: GRPOConfig) -> list[str]:
    """Refuse prompts that do not fit; what depends on the length of a forward and is allowed, as sentences."""
    policy, dataset = trainer.model, trainer.train_dataset
    with_images = trainer._rollouts.images.prepare is not None
    lengths = functools.partial(_prompt_lengths, trainer)
    # tokens of a prompt with images are known once the images are prepared
    if trainer.environment_factories is None and hasattr(dataset, "__len__") and not with_images:
        longest = trainer.max_completion_length or 0  # None: as long as the model allows
        check_prompt_lengths(iterate_prompts(dataset), lengths, policy.config, longest, config.micro_batch_tokens)
    models = [base_model_of(model) for model in (policy, trainer.ref_model) if model is not None]
    done, dependent = settle_rope(models, functools.partial(_longest_sequence, trainer, lengths))
    if done is not None:
        logger.warning(done)
    return refuse([] if dependent is None else [dependent], config.allow_split_dependent)


def check_bitwise(trainer: Any) -> None:
    """Refuse what the same bits cannot be promised for.

    Raises:
        ConfigError: names it.
    """
    if models := [type(func).__name__ for func in trainer.reward_funcs if isinstance(func, nn.Module)]:
        raise ConfigError(
            f"bitwise_invariant=True cannot be kept with reward models ({', '.join(models)}): the bits of a score "
            "depend on the batch it is computed in. Use a function that scores one completion at a time."
        )
    own = own_sampling(trainer)
    if own is not None or not samples_by_key(trainer):
        own = own or own_generate(trainer.accelerator.unwrap_model(trainer.model))
        raise ConfigError(
            "bitwise_invariant=True needs this trainer's own sampling; rollout_func, beam search, do_sample=False and "
            f"a generate of one's own{'' if own is None else f' ({own})'} go through other code. Turn one of the two "
            "off."
        )
    check_kernels(trainer.accelerator.device, "linear_attention" in layer_kinds(trainer.model.config))


def warn_before_training(trainer: Any, uncovered: list[str]) -> None:
    """Warn of what a run is not covered for: a newer TRL, and what the promise leaves out.

    Args:
        uncovered: sentences of `check_trainer`.

    Raises:
        ConfigError, ModelError: for what has been replaced since the trainer was built, where that is not allowed.
    """
    refuse_overrides(trainer)
    if (untested := contract.untested()) is not None:
        logger.warning(untested)
    if trainer.args.bitwise_invariant:
        check_bitwise(trainer)
    for sentence in [*uncovered, *_uncovered_sampling(trainer)]:
        logger.warning(f"The promise that the split does not matter does not cover this run: {sentence}.")


def _uncovered_sampling(trainer: Any) -> list[str]:
    """What the promise does not cover of how completions are sampled, as sentences."""
    if own_sampling(trainer) is None and samples_by_key(trainer):
        return []
    if (own := own_sampling(trainer)) is not None:
        sentence = f"{own} may sample in its own way; only the update is covered"
        if own == "rollout_func":
            sentence += (
                ". A resumed run goes on with the completions of its checkpoint, and with the random numbers of "
                "Python, NumPy and torch where it has as many processes; what else rollout_func draws from is its own"
            )
        return [sentence]
    if trainer.use_vllm:
        return [
            "vLLM samples every completion with a seed of its own, but rounds by its batches, so now and then a "
            "completion differs"
        ]
    own = own_generate(trainer.accelerator.unwrap_model(trainer.model))
    if own is not None and not trainer.use_transformers_continuous_batching:
        return [f"{own} samples, and not by key; only the update is covered"]
    return ["this way of generating does not sample by key; only the update is covered"]


def _check_dynamic_sampling(trainer: Any, config: GRPOConfig) -> None:
    """Refuse dynamic sampling where there is nothing to draw from, or where it would undo a subclass's work."""
    rows, prompts = len(trainer.train_dataset), trainer.geometry.prompts_per_rollout
    if rows <= prompts:
        raise ConfigError(
            f"dynamic_sampling=True draws further prompts from the rest of the training set, which has {rows} and "
            f"a rollout batch takes {prompts}; use more prompts, or a smaller rollout_batch_size."
        )
    own = trainer._override_of("_generate_and_score_completions")
    rule = AdvantageRule(config.advantage_estimator, trainer.scale_rewards, trainer.multi_objective_aggregation)
    if own and rule.depends_on_the_batch:
        raise ConfigError(
            f"dynamic_sampling=True computes advantages over the batch once it is full, and {type(trainer).__name__} "
            "overrides _generate_and_score_completions, whose advantages would be lost; use an estimator that "
            "looks at one group at a time (the default does)."
        )


def _prompt_lengths(trainer: Any, prompts: list[Any]) -> list[int]:
    return [len(ids) for ids in trainer._tokenize_prompts(prompts)[0]]


def _refuse_images(readable: list[Any]) -> None:
    for data in readable:
        if images_of(data[0]):
            raise DataError(
                "the data has images, and the model is given a tokenizer, which makes nothing of them: pass the "
                "processor of a model that takes images as processing_class (its own, where none is given), or remove "
                "the columns image and images."
            )


def _longest_sequence(trainer: Any, lengths: Callable[[list[Any]], list[int]]) -> int | None:
    """Tokens of the longest prompt of all data sets and max_completion_length; None where it is not known."""
    train = trainer.train_dataset
    known = [data for data in with_length(train, trainer.eval_dataset) if has_readable_prompts(data)]
    unread = all(data is not train for data in known) or trainer.environment_factories is not None
    unread = unread or trainer._rollouts.images.prepare is not None
    if unread or not trainer.max_completion_length:
        return None
    prompts = itertools.chain.from_iterable(iterate_prompts(data) for data in known)
    longest = 0
    while some := list(itertools.islice(prompts, 256)):
        longest = max(longest, *lengths(some))
    return longest + trainer.max_completion_length

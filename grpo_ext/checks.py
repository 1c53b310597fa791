"""What is refused before training: models and data that cannot be trained on, or whose update depends on the split.

Differs from TRL: these are found at construction, with the values, the rule and the remedy. `check_trainer` holds what
is checked of a trainer that TRL's constructor has built; the rest can be asked before, or of other objects.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PretrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .batching.sizes import EpochLayout, check_equal_slices
from .config import GRPOConfig
from .errors import ConfigError, DataError, ModelError, SplitDependentError
from .forward.images import images_of
from .forward.lm_head import refuse_unknown_head
from .forward.positions import covered_length, longest_prompt, settle_rope
from .forward.quantised import outlier_thresholds
from .forward.reference import base_model_of
from .forward.snapshot import refuse_no_copy, refuse_replaced_forward
from .precision.loss_scaler import half_weights, refuse_half_weights
from .runtime.collectives import shards_parameters
from .runtime.determinism import refuse_batch_dependent_rewards, refuse_sharding
from .runtime.recompute import check_recompute
from .sampling.decoding import own_generate

logger = get_logger(__name__)

_RANDOM_ATTRIBUTES = ("dropout", "layerdrop", "drop_path", "pdrop", "jitter")

_ONCE_PER_IMAGE = ("lfm2_vl",)  # models with a layer that they run for each image apart

# what these kinds of PEFT adapters do in a forward pass
_SPLIT_DEPENDENT_ADAPTERS = {
    "LILY": "averages its router over the micro-batch",
    "PVERA": "draws noise for each micro-batch",
}


def check_causal_lm(model: Any) -> None:
    """Refuse what cannot generate and score text.

    Raises:
        ModelError: the object is no module, cannot `generate`, or has no language-model head.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {name}; pass a model id, a path, or a transformers causal language model.")
    remedy = "load it with AutoModelForCausalLM (a bare AutoModel has no language-model head)"
    if not callable(getattr(model, "generate", None)):
        raise ModelError(f"{name} has no `generate` method, so it cannot sample completions; {remedy}.")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ModelError(f"{name} has no output embeddings, so completions have no log-probabilities; {remedy}.")


def refuse_own_forward(model: Any) -> None:
    """With `rollout_lag`: refuse a model object whose forward somebody has replaced, before TRL puts its own around it.

    This package's head does not count, which an earlier trainer has left.

    Raises:
        ModelError: a copy of the model would lose it, or run the weights of the first.
    """
    parts = (model, base_model_of(model)) if isinstance(model, nn.Module) else ()
    found = [vars(part).get("forward") for part in parts]
    if any(forward is not None and not hasattr(forward, "of_grpo_ext") for forward in found):
        raise ModelError(
            "the model was given a forward of its own by hand, and a copy of the model would run the weights that are "
            "trained; rollout_lag needs the one of its class. Use rollout_lag=0."
        )


@contextmanager
def loading() -> Iterator[None]:
    """Inside, what transformers says of quantised weights and of GGUF files of an unknown kind is one of our errors.

    Raises:
        ConfigError, ModelError: in place of transformers' ImportError and ValueError.
    """
    try:
        yield
    except ImportError as error:
        if "quantiz" not in str(error) and "GGUF" not in str(error):
            raise
        raise ConfigError(f"the weights cannot be read without another library: {error}") from error
    except ValueError as error:
        if "fine-tuning on purely quantized models" in str(error):
            raise ConfigError(
                "weights in 4 or 8 bits are not trained themselves; train an adapter on them: --use_peft True, or "
                "peft_config=LoraConfig(...)."
            ) from error
        if not str(error).startswith("GGUF model with architecture"):
            raise
        raise ModelError(
            f"{str(error).rstrip('.')} by transformers; pass the original model's folder in place of the GGUF file."
        ) from error


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a module that are rates of random noise, and above zero; PEFT keeps some in a dict per adapter."""
    is_dropout = "dropout" in type(module).__name__.lower()
    for attribute, value in vars(module).items():
        if not any(word in attribute for word in _RANDOM_ATTRIBUTES) and not (is_dropout and attribute == "p"):
            continue
        values = value.values() if isinstance(value, dict) else (value,)
        if any(_is_rate(v) for v in values):
            yield attribute, value


def random_parts(model: nn.Module) -> Iterator[str]:
    """Names of the parts of a model that draw random numbers in training, with their rates."""
    for path, module in model.named_modules():
        for attribute, value in _rates(module):
            yield f"{path or 'model'} ({type(module).__name__}): {attribute}={value}"


def disable_random_parts(model: nn.Module) -> None:
    """Set every rate that `random_parts` finds to zero; TRL's `disable_dropout` reaches only `nn.Dropout` modules.

    Some models read a rate from their configuration in every forward, so it is set to zero there too.
    """
    for module in model.modules():
        for attribute, value in list(_rates(module)):
            setattr(module, attribute, dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0)
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for attribute, value in list(vars(config).items()):
                if any(word in attribute for word in _RANDOM_ATTRIBUTES) and _is_rate(value):
                    setattr(config, attribute, 0.0)


def split_dependence(model: nn.Module, neftune_noise_alpha: float | None) -> list[str]:
    """Everything in the model or settings that makes the update depend on the split, as sentences with remedies."""
    found = []
    parts = list(random_parts(model))
    if parts:
        shown = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
        found.append(f"dropout is on ({shown}): its noise is drawn per micro-batch; set disable_dropout=True")
    norms = [f"{path} ({type(m).__name__})" for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if norms:
        found.append(
            f"batch normalisation ({norms[0]}, {len(norms)} in all) computes statistics of the micro-batch; use a"
            " model with layer or group normalisation"
        )
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _SPLIT_DEPENDENT_ADAPTERS:
            found.append(f"adapter {adapter!r} ({kind}) {_SPLIT_DEPENDENT_ADAPTERS[kind]}; use another kind, e.g. LoRA")
    outliers = {path: size for path, size in outlier_thresholds(model).items() if size}
    if outliers:
        path, size = next(iter(outliers.items()))
        found.append(
            f"8-bit layers ({path}, {len(outliers)} in all; llm_int8_threshold={size:g}) pick outlier columns over the "
            "rows of a forward; load the model with quantization_config={'load_in_8bit': True, 'llm_int8_threshold': "
            "0.0} in model_init_kwargs (BitsAndBytesConfig takes the same), or in 4 bits"
        )
    if getattr(getattr(model, "config", None), "model_type", None) == "cpmant":
        found.append("CpmAnt puts its own prompt before the padding, which so moves the input; use another model")
    if neftune_noise_alpha:
        found.append(f"neftune_noise_alpha={neftune_noise_alpha} adds noise per micro-batch; remove it")
    return found


def refuse(found: list[str], allow: bool) -> list[str]:
    """Raise for what makes the update depend on the split, or return it as it is where that is allowed.

    Raises:
        SplitDependentError: there is something and `allow` is false.
    """
    if found and not allow:
        raise SplitDependentError(
            "the update would depend on the batch split: " + ". ".join(found) + ". To train all the same, set "
            "allow_split_dependent=True."
        )
    return found


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what updates the model during the backward pass; that of one micro-batch is not that of the step.

    Args:
        optimizer: as the user gave it, or None.

    Raises:
        ConfigError: names the optimizer, or the parameter that steps by itself.
    """
    reason = None
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer" or hasattr(optimizer, "fused_backward"):
        reason = f"the optimizer {type(optimizer).__name__} updates"
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(parameter, "_in_backward_optimizers"):
            reason = f"a hook on the gradient of {name} (of a layerwise optimizer, for example) works on"
            break
    if reason is not None:
        raise ConfigError(
            f"{reason} the model during the backward pass, before the step's gradient is complete; use an optimizer "
            "that acts in its step(), for example optim='adamw_torch', and remove such hooks."
        )


def said_of_half_weights(model: Any) -> str | None:
    """What it means that trained weights are in half precision, as a sentence; None where they are not."""
    if getattr(model, "is_quantized", False):  # TRL makes the adapters of a quantised model bfloat16
        return None
    half, trained = half_weights(model), sum(p.requires_grad for p in model.parameters())
    if not half:
        return None
    kind = str(next(iter(half.values()))).removeprefix("torch.")
    return (
        f"{len(half)} of {trained} trained tensors are {kind}, which rounds small updates away, and rounds them "
        "otherwise for another split. Load the model with dtype=torch.float32; bf16=True computes in bfloat16 all the "
        "same."
    )


_UNUSED_HOOKS = (
    "_get_train_sampler",
    "_get_eval_sampler",
    "get_high_entropy_mask",
    "get_gamma_weights",
    "get_off_policy_mask",
)


def check_overrides(cls: type, ours: type) -> None:
    """Warn of methods a subclass overrides that TRL calls and this trainer does not."""
    unused = [name for name in _UNUSED_HOOKS if getattr(cls, name) is not getattr(ours, name)]
    if unused:
        logger.warning(
            f"{cls.__name__} overrides {', '.join(unused)}, which stock TRL calls and grpo_ext does not; the override"
            " has no effect here. Loaders and losses are built in batching.prompt_order and algorithms.losses."
        )


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


def check_data_sets(train: Any, evaluation: Any) -> None:
    """`check_prompts` for the training set and every evaluation set.

    Raises:
        DataError: names the set.
    """
    for split, dataset in _named(train, evaluation).items():
        check_prompts(dataset, split)


def with_rows(train: Any, evaluation: Any) -> list[Any]:
    """Those of the data sets that have rows to look at: no streams, and none that is empty."""
    found = _named(train, evaluation).values()
    return [data for data in found if hasattr(data, "select_columns") and hasattr(data, "__len__") and len(data)]


def first_rows(train: Any, evaluation: Any) -> list[Any]:
    """The first row of every data set, of a stream too."""
    return [row for data in _named(train, evaluation).values() for row in itertools.islice(data, 1)]


def _named(train: Any, evaluation: Any) -> dict[str, Any]:
    named = {"training": train}
    if isinstance(evaluation, dict):
        named |= {f"evaluation '{name}'": dataset for name, dataset in evaluation.items()}
    else:
        named["evaluation"] = evaluation
    return {split: dataset for split, dataset in named.items() if dataset is not None}


def check_prompts(dataset: Any, split: str) -> None:
    """Refuse an empty set, a missing prompt column and empty prompts; a stream is checked when it is read.

    Raises:
        DataError: names the split, and the row where there is one.
    """
    if not hasattr(dataset, "select_columns") or not hasattr(dataset, "__len__"):
        return
    if len(dataset) == 0:
        raise DataError(f"the {split} data set is empty; it needs at least one row with a 'prompt' column.")
    if _is_transformed(dataset):  # the columns come into being row by row
        if "prompt" not in dataset[0]:
            raise DataError(
                f"the transform of the {split} data set gives no 'prompt'; it gives {', '.join(dataset[0])}."
            )
        return
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise DataError(
            f"the {split} data set has no 'prompt' column; it has {', '.join(columns)}; rename the column that holds"
            " the prompt, for example dataset.rename_column('question', 'prompt')."
        )
    for row, prompt in enumerate(iterate_prompts(dataset)):
        if not _has_text(prompt):
            raise DataError(
                f"row {row} of the {split} data set has an empty prompt ({prompt!r}); a completion needs something to "
                "complete; filter such rows out."
            )


def _is_transformed(dataset: Any) -> bool:
    return getattr(dataset, "format", {}).get("type") == "custom"


def has_readable_prompts(dataset: Any) -> bool:
    """Whether all prompts of a data set can be read before training: no stream, and no transform that makes them."""
    return hasattr(dataset, "select_columns") and hasattr(dataset, "__len__") and not _is_transformed(dataset)


def iterate_prompts(dataset: Any) -> Iterator[Any]:
    """The prompts of a map-style data set, read in blocks; none of a set with a transform, which runs in training."""
    if _is_transformed(dataset):
        return
    for block in dataset.select_columns("prompt").iter(batch_size=1000):
        yield from block["prompt"]


def _has_text(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and len(prompt) > 0


def model_length_limit(config: Any) -> tuple[int | None, bool]:
    """The longest input of a model in tokens, and whether it is absolute (learned position table).

    Rotary positions are taken as far as their scaling covers them.
    """
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None) is not None or getattr(text, "rope_theta", None) is not None
    return covered_length(config), not rotary


def check_chat_template(dataset: Any, tokenizer: Any) -> None:
    """Refuse conversational prompts for a tokenizer that cannot write them as text.

    Raises:
        DataError: names the remedy.
    """
    first = next(iter(iterate_prompts(dataset)), None)
    if isinstance(first, list) and getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "the prompts are messages, and the tokenizer has no chat template to write them with; use an instruct "
            "model, set chat_template_path, or give prompts as plain text (recipe: leave --conversational out)."
        )


def check_prompt_lengths(
    prompts: Iterable[Any],
    lengths_of: Any,
    config: Any,
    max_completion_length: int,
    micro_batch_tokens: int | None = None,
    batch: int = 256,
) -> None:
    """Refuse prompts that the model has no positions for, or the token budget no room.

    Only prompts long enough (in bytes) to be able to break the limit are tokenised.

    Args:
        lengths_of: function from a list of prompts to their lengths in tokens.

    Raises:
        DataError: names the row, its length and the limit.
    """
    limit, absolute = model_length_limit(config)
    positions = None if limit is None else limit - (max_completion_length if absolute else 0)
    budget = None if micro_batch_tokens is None else micro_batch_tokens - 1
    if positions is None and budget is None:
        return
    room = min(n for n in (positions, budget) if n is not None)
    suspects: list[tuple[int, Any]] = []

    def check() -> None:
        for (row, _), length in zip(suspects, lengths_of([p for _, p in suspects]) if suspects else []):
            if positions is not None and length > positions:
                less = f" - max_completion_length={max_completion_length}" if absolute else ", scaling included"
                raise DataError(
                    f"the prompt in row {row} has {length} tokens, but the model has room for {positions} "
                    f"(max_position_embeddings={limit}{less}); shorten or filter long prompts"
                    + (", or lower max_completion_length." if absolute else ".")
                )
            if budget is not None and length > budget:
                raise DataError(
                    f"the prompt in row {row} has {length} tokens, but micro_batch_tokens={micro_batch_tokens} has to "
                    f"hold a prompt and at least one token of its completion; set it to {length + 1} or more (prompt "
                    "plus max_completion_length holds every completion), or filter long prompts."
                )
        suspects.clear()

    for row, prompt in enumerate(prompts):
        # a token is at least one byte; the margin stands for what a chat template adds
        if len(str(prompt).encode()) + 512 > room:
            suspects.append((row, prompt))
        if len(suspects) == batch:
            check()
    check()


def check_stream(train: Any, dynamic_sampling: bool, with_images: bool) -> None:
    """Refuse a stream where rows are read that are not the next ones.

    Raises:
        ConfigError, DataError: names the remedy.
    """
    if train is None or hasattr(train, "__len__"):
        return
    if dynamic_sampling:
        raise ConfigError(
            "dynamic_sampling=True draws further prompts from the whole training set, and this one is a stream; "
            "use a data set with a length."
        )
    if with_images:
        raise DataError(
            "the data set is a stream, and a model that takes images reads the images of a row again when the row is "
            "trained on; use a data set with a length, or, where it has no images, pass the model's tokenizer as "
            "processing_class."
        )


def check_images(dataset: Any, prepare: Any) -> None:
    """Refuse a data set whose images cannot be read, or are others when a row is read again, as it is where it is run.

    A few rows are looked at.

    Raises:
        DataError: names the row.
    """
    for number in sorted({n * (len(dataset) - 1) // 3 for n in range(4)}):
        try:
            reads = [dataset[number] for _ in range(2)]
            is_text = isinstance(reads[0]["prompt"], str) and bool(images_of(reads[0]))
            one, other = ({} if is_text else prepare(row).tensors for row in reads)
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise DataError(
                f"the processor cannot read the images of row {number} ({error}); the prompt has to be messages, and "
                "`images` a list of images (or `image` one), as many as the prompt has places for, if it has any; "
                "dataset.cast_column('images', Sequence(Image())) decodes files and bytes."
            ) from error
        if is_text:
            raise DataError(
                f"row {number} of the data set has images and a prompt that is text; make it messages, for example "
                "[{'role': 'user', 'content': prompt}], which the chat template gives places for the images."
            )
        if any(not torch.equal(one[name], other[name]) for name in one):
            raise DataError(
                f"row {number} of the data set gives other images when it is read again (a transform that draws random "
                "numbers?), and a row is read wherever one of its completions is run; change images beforehand, with "
                "dataset.map."
            )


def why_logprobs(config: GRPOConfig) -> str | None:
    """Why a `rollout_func` has to return log-probabilities, as the rest of a sentence; None if it may not."""
    if not (config.use_vllm and config.vllm_importance_sampling_correction):
        return None
    return "vllm_importance_sampling_correction=True compares them with the trainer's; return them, or set it to False"


# ---- A trainer that is built ----------------------------------------------------------------------------------------


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
    with_images = trainer._sampler.prepare is not None
    if trainer._sampler.travelling and shards_parameters(accelerator):
        raise ConfigError(
            "images with tools or an environment under FSDP or DeepSpeed: every process has to run the image tower in "
            "every forward or none, and tools may show an image to one alone; train with DDP."
        )
    if trainer._sampler.travelling and trainer.rollout_func is not None:
        raise ConfigError(
            "a rollout_func together with tools or an environment, and a model that takes images: TRL leaves out the "
            "images of prompts there; take the tools into rollout_func, or leave it out."
        )
    if trainer.tools and accelerator.num_processes > 1 and (why := trainer._sampler.why_vllm_equal) is not None:
        raise ConfigError(
            f"tools or an environment on {accelerator.num_processes} processes: {why}, and in later turns they have "
            "not; use vllm_mode='colocate' with vllm_tensor_parallel_size=1, or one process."
        )
    if with_images and not trainer._sampler.travelling:
        for data in _data_sets(trainer):
            check_images(data, trainer._sampler.prepare)
    if not with_images:
        _refuse_images(trainer)
    if with_images and policy.config.model_type in _ONCE_PER_IMAGE and is_deepspeed_zero3_enabled():
        raise ModelError(
            f"{type(base_model_of(policy)).__name__} runs a layer once for each image or tile, ZeRO-3 gathers the "
            "layer's weights from all processes each time, and they do not have equally many images, so the run would "
            "hang; train it with ZeRO-2, FSDP2 or DDP."
        )
    refuse_unknown_head(base_model_of(policy))
    _refuse_dora_in_8_bits(policy)
    check_overrides(type(trainer), ours)
    check_parallelism(trainer.get_tp_size())
    check_optimizer(trainer.optimizer, policy)
    dataset = trainer.train_dataset
    if trainer.use_vllm:
        length = len(dataset) if hasattr(dataset, "__len__") else None
        check_equal_slices(trainer.geometry, length, config.dataloader_drop_last)
    uncovered = refuse(split_dependence(policy, config.neftune_noise_alpha), config.allow_split_dependent)
    sharded = shards_parameters(accelerator)
    if not sharded and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ConfigError(
            "sync_each_batch=True sums gradients over processes in every backward pass; this trainer sums them "
            "once, after the last. Leave it out of gradient_accumulation_kwargs."
        )
    check_recompute(vars(config), is_deepspeed_zero3_enabled())
    if config.bitwise_invariant:
        check_bitwise(trainer)
    if not trainer.is_deepspeed_enabled:  # which trains float32 copies
        if config.fp16:
            refuse_half_weights(policy)
        elif (sentence := said_of_half_weights(policy)) is not None:
            logger.warning(sentence)
    if config.dynamic_sampling:
        _check_dynamic_sampling(trainer, ours)
    if config.rollout_lag:
        _check_ahead(trainer, config)
    lengths = functools.partial(_prompt_lengths, trainer)
    # tokens of a prompt with images are known once the images are prepared
    if trainer.environment_factories is None and hasattr(dataset, "__len__") and not with_images:
        longest = trainer.max_completion_length or 0  # None: as long as the model allows
        check_chat_template(dataset, trainer._tokenizer)
        check_prompt_lengths(iterate_prompts(dataset), lengths, policy.config, longest, config.micro_batch_tokens)
    models = [base_model_of(model) for model in (policy, trainer.ref_model) if model is not None]
    done, dependent = settle_rope(models, functools.partial(_longest_sequence, trainer, lengths))
    if done is not None:
        logger.warning(done)
    return uncovered + refuse([] if dependent is None else [dependent], config.allow_split_dependent)


def refuse_frozen(model: nn.Module) -> None:
    """Refuse to train a model of which no parameter is trained.

    Raises:
        ModelError: an adapter that was loaded for inference, as a rule.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "no parameter of the model is trained (requires_grad is False for all of them); an adapter to go on with "
            "is loaded by PeftModel.from_pretrained(..., is_trainable=True)."
        )


def _refuse_dora_in_8_bits(policy: nn.Module) -> None:
    configs = getattr(policy, "peft_config", None) or {}
    if outlier_thresholds(policy) and any(getattr(config, "use_dora", False) for config in configs.values()):
        raise ConfigError(
            "use_dora=True on 8-bit weights, which PEFT reads before bitsandbytes has put them in place: the second "
            "forward fails; load the model in 4 bits, or set use_dora=False."
        )


def check_bitwise(trainer: Any) -> None:
    """Refuse what the same bits cannot be promised for.

    Raises:
        ConfigError, ModelError: names it.
    """
    accelerator = trainer.accelerator
    refuse_sharding(shards_parameters(accelerator), accelerator.num_processes, accelerator.distributed_type.value)
    refuse_batch_dependent_rewards(trainer.reward_funcs)
    own = trainer._own_sampling()
    if own is not None or not trainer._samples_by_key():
        own = own or own_generate(accelerator.unwrap_model(trainer.model))
        raise ConfigError(
            "bitwise_invariant=True needs this trainer's own sampling; rollout_func, beam search, do_sample=False and "
            f"a generate of one's own{'' if own is None else f' ({own})'} go through other code. Turn one of the two "
            "off."
        )


def uncovered_sampling(trainer: Any) -> list[str]:
    """What the promise does not cover of how completions are sampled, as sentences."""
    if trainer._own_sampling() is None and trainer._samples_by_key():
        return []
    if (own := trainer._own_sampling()) is not None:
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


def _check_dynamic_sampling(trainer: Any, ours: Any) -> None:
    """Refuse dynamic sampling where there is nothing to draw from, or where it would undo a subclass's work."""
    rows, prompts = len(trainer.train_dataset), trainer.geometry.prompts_per_rollout
    if rows <= prompts:
        raise ConfigError(
            f"dynamic_sampling=True draws further prompts from the rest of the training set, which has {rows} and "
            f"a rollout batch takes {prompts}; use more prompts, or a smaller rollout_batch_size."
        )
    own = type(trainer)._generate_and_score_completions is not ours._generate_and_score_completions
    if own and trainer._rewards.rule.depends_on_the_batch:
        raise ConfigError(
            f"dynamic_sampling=True computes advantages over the batch once it is full, and {type(trainer).__name__} "
            "overrides _generate_and_score_completions, whose advantages would be lost; use an estimator that "
            "looks at one group at a time (the default does)."
        )


def _check_ahead(trainer: Any, config: GRPOConfig) -> None:
    """Refuse what cannot be sampled on a thread of its own, or not before it is due."""
    lag, dataset = config.rollout_lag, trainer.train_dataset
    own = trainer._own_sampling() or own_generate(trainer.model)
    if own is not None or not (trainer.use_vllm or trainer._samples_by_key()):
        raise ConfigError(
            f"rollout_lag={lag} needs this trainer's own sampling; rollout_func, beam search, do_sample=False, a paged "
            f"cache and a generate of one's own{'' if own is None else f' ({own})'} would run on the weights that are "
            "trained. Use rollout_lag=0."
        )
    _check_model_ahead(trainer, config)
    _refuse_server_elsewhere(trainer, lag)
    if trainer._sampler.travelling:
        raise ConfigError(
            f"rollout_lag={lag} with tools or an environment, and a model that takes images: not built; use "
            "rollout_lag=0, or a model without images."
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"rollout_lag={lag} asks for rows before their step, and a stream gives them in its own order; use a data "
            "set with a length, or rollout_lag=0."
        )
    layout = EpochLayout(trainer.geometry, len(dataset), config.dataloader_drop_last)
    last = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * len(layout))
    steps = itertools.islice(itertools.cycle(range(len(layout))), last)
    batches = sum(1 for _ in itertools.islice((s for s in steps if layout[s].starts_rollout), lag + 1))
    if lag >= batches:
        raise ConfigError(
            f"rollout_lag={lag}, and the run has {batches} rollout batch(es), so all of them would be sampled with the "
            f"weights of the start; use rollout_lag={'0' if batches == 1 else f'{batches - 1} or less'}, or train for "
            "longer."
        )


def _check_model_ahead(trainer: Any, config: GRPOConfig) -> None:
    """Refuse models that cannot sample beside training, in a copy or by the weights that processes share."""
    lag = config.rollout_lag
    noise = list(random_parts(trainer.model)) + (["neftune_noise_alpha"] if config.neftune_noise_alpha else [])
    if noise:
        raise ConfigError(
            f"rollout_lag={lag} and {noise[0]}: two threads draw from one stream of random numbers, so speed would "
            "decide who gets which. Use disable_dropout=True, no NEFTune, or rollout_lag=0."
        )
    if outlier_thresholds(trainer.model):
        raise ConfigError(
            f"rollout_lag={lag} and weights in 8 bits: bitsandbytes hands their scales to the layer that runs first, "
            "so a copy and the model cannot share them. Use load_in_4bit, or rollout_lag=0."
        )
    if not trainer._scorer.sharded:
        refuse_replaced_forward(trainer.model, trainer.model, base_model_of(trainer.model))
        refuse_no_copy(trainer.model)
    elif trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise ConfigError(f"rollout_lag={lag} and FSDP 1: use FSDP 2 (fsdp_version: 2), or rollout_lag=0.")
    elif is_deepspeed_zero3_enabled() and any(isinstance(func, nn.Module) for func in trainer._reward_funcs):
        raise ConfigError(
            f"rollout_lag={lag} and a reward model under ZeRO-3, which processes share: it would run its collectives "
            "beside those of training. Use ZeRO-2, FSDP2, a function that asks a server, or rollout_lag=0."
        )
    elif trainer.is_deepspeed_enabled and (parts := _other_parts(trainer.accelerator)):
        raise ConfigError(f"rollout_lag={lag} and {parts} of DeepSpeed: not built; leave it out, or use rollout_lag=0.")


def _refuse_server_elsewhere(trainer: Any, lag: int) -> None:
    machines = trainer.args.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", trainer.args.world_size))
    here = trainer.args.vllm_server_host in ("0.0.0.0", "localhost", "127.0.0.1")
    if trainer.use_vllm and machines > 1 and here and not trainer.args.vllm_server_base_url:
        raise ConfigError(
            f"rollout_lag={lag} on {machines} machines: every process asks the vLLM server, and on most of them "
            f"vllm_server_host={trainer.args.vllm_server_host!r} is another machine; set vllm_server_base_url."
        )


def _other_parts(accelerator: Any) -> str:
    """Settings of ZeRO-3 by which weights lie elsewhere, too, than in a process's part of them."""
    zero = accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
    nvme = (zero.get("offload_param") or {}).get("device") == "nvme"
    found = {"zero_hpz_partition_size": zero.get("zero_hpz_partition_size", 1) > 1, "offload_param to NVMe": nvme}
    return " and ".join(name for name, is_set in found.items() if is_set)


def _prompt_lengths(trainer: Any, prompts: list[Any]) -> list[int]:
    return [len(ids) for ids in trainer._tokenize_prompts(prompts)[0]]


def _data_sets(trainer: Any) -> list[Any]:
    """The training set and those for evaluation, as far as they can be read before training."""
    evaluation = trainer.eval_dataset
    others = list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
    return [data for data in (trainer.train_dataset, *others) if hasattr(data, "__len__") and len(data)]


def _refuse_images(trainer: Any) -> None:
    for data in _data_sets(trainer):
        if images_of(data[0]):
            raise DataError(
                "the data has images, and the model is given a tokenizer, which makes nothing of them: pass the "
                "processor of a model that takes images as processing_class (its own, where none is given), or remove "
                "the columns image and images."
            )


def _longest_sequence(trainer: Any, lengths: Callable[[list[Any]], list[int]]) -> int | None:
    """Tokens of the longest prompt of all data sets and max_completion_length; None where it is not known."""
    train = trainer.train_dataset
    known = [data for data in _data_sets(trainer) if has_readable_prompts(data)]
    unread = all(data is not train for data in known) or trainer.environment_factories is not None
    unread = unread or trainer._sampler.prepare is not None
    if unread or not trainer.max_completion_length:
        return None
    prompts = itertools.chain.from_iterable(iterate_prompts(data) for data in known)
    return longest_prompt(prompts, lengths) + trainer.max_completion_length

"""`GRPOTrainer`: TRL's GRPO trainer with the update taken out of the hands of the hardware split.

Differs from TRL: one batch per optimizer step reaches the Trainer's loop; `training_step` runs all its micro-batches
(engine.window) with denominators counted over the whole step, and rollouts are keyed and shared (engine.rollouts).
Every override point stands in the contract of `compat`, which is verified when a trainer is built.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from . import checks, compat
from .algorithms.losses import adapted_entropy_coefficient
from .batching.micro_batches import oversized
from .batching.prompt_order import PromptOrder, Reserve, make_eval_loader, make_loader
from .batching.sizes import check_equal_shares, describe_plan
from .config import GRPOConfig
from .errors import ConfigError, MemoryShortageError, PrecisionError
from .forward.architecture import experts_per_token, token_cost
from .forward.attention import packed_attention, runs_packs
from .forward.lm_head import RouterOutput, RouterRequest, install, refuse_unknown_head
from .forward.packed import read_batch
from .forward.padded import Chunking, score_in_chunks, without_checkpointing
from .forward.positions import longest_prompt, settle_rope
from .forward.reference import ReferenceSource, base_model_of, build_reference, reference_source
from .forward.scorer import Forms
from .precision.loss_scaler import (
    DeepSpeedScale,
    LossScaler,
    install_loss_scaler,
    reduce_in_float32,
    refuse_half_weights,
)
from .precision.non_finite import FirstModule, bad_weight, explanation
from .resumable_trainer import ResumableTrainer
from .rewards.guard import Faults
from .run.fingerprint import check_names
from .run.recorded_completions import Samples, record
from .runtime.clock import PhaseClock
from .runtime.collectives import (
    any_process,
    first_of_all_processes,
    leave_in_order,
    max_over_processes,
)
from .runtime.determinism import align_memory, pinned, refuse_batch_dependent_rewards, refuse_sharding
from .runtime.out_of_memory import Halving, WindowLimits, WindowOutOfMemory, free_memory, is_out_of_memory
from .sampling.rollout import (
    Rollout,
    contributing_rows,
)
from .step.backward import clear_cache_every, run_window, survivable
from .step.gradients import FixedPointGradients, NativeGradients
from .step.loss import LossTerms, assemble_loss, loss_mask
from .step.metrics import StepMeter, StepWork
from .step.plan import Layout, MicroBatch, plan_window
from .step.statistics import StepContext, batch_context, keep_whole_batch, measure_step

logger = get_logger(__name__)
RewardFunc = str | PreTrainedModel | Callable[..., Any]  # as in TRL: a model's name, a model, or a function


class GRPOTrainer(ResumableTrainer):
    """Drop-in replacement for `trl.GRPOTrainer` whose update is the same for every hardware split.

    Takes the arguments of `trl.GRPOTrainer`; `args` may be a `grpo_ext.GRPOConfig` or a `trl.GRPOConfig`.

    What TRL supports and this class does not make split-invariant (images, `rollout_func`) trains through TRL's own
    code path, and a warning at the start says so.

    Example:

    ```python
    from grpo_ext import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=my_reward,
        args=GRPOConfig("runs/first", global_batch_size=64, per_device_train_batch_size=5),
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Raises:
        ConfigError, DataError, ModelError, SplitDependentError: at construction, before any training.
        RewardError: at the first call of a reward function that returns something else than rewards.
    """

    eval_dataset: Any
    num_generations: int
    num_generations_eval: int
    max_completion_length: int
    pad_to_multiple_of: Any
    current_gradient_accumulation_steps: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: trl.GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        compat.verify()
        if not isinstance(model, str):
            checks.check_causal_lm(model)
        config = GRPOConfig.for_model(args, model)
        check_names(config.allow_changed_on_resume, config.__dataclass_fields__)
        if environment_factory is None:
            checks.check_data_sets(train_dataset, eval_dataset)
        if config.dynamic_sampling and train_dataset is not None and not hasattr(train_dataset, "__len__"):
            raise ConfigError(
                "dynamic_sampling=True draws further prompts from the whole training set, and this one is a stream; "
                "use a data set with a length."
            )
        self._given_args = args
        self._uncovered: list[str] = []
        self._stock = rollout_func is not None
        self._begin_records()
        self._clock = PhaseClock()
        self._deepspeed_scale: DeepSpeedScale | None = None
        self._said_oversized = False
        self._limits = WindowLimits(config.per_device_train_batch_size, config.micro_batch_tokens)
        loop_args = config.for_trl() if self._stock else config.for_loop()
        reference = reference_source(model, loop_args, peft_config, quantization_config)
        if reference is not None:
            loop_args.beta, loop_args.sync_ref_model = 0.0, False  # TRL builds no reference; ours follows
        super().__init__(
            model=model,
            reward_funcs=list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs,
            args=loop_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        compat.verify_built(self)
        if reference is not None:
            self._add_reference(reference, config)
        self.geometry = config.geometry
        if not self._stock:
            self.args.steps_per_generation = self.geometry.steps_per_rollout
        if self._is_vlm and not self._stock:
            self._stock = True
            config.for_trl(onto=self.args)
        self._finish_init(config)

    def _add_reference(self, source: ReferenceSource, config: GRPOConfig) -> None:
        self.beta = self.args.beta = config.beta
        self.args.sync_ref_model = config.sync_ref_model
        self.ref_model = build_reference(source, self)
        if config.sync_ref_model:
            self.add_callback(compat.SyncRefModelCallback(self.ref_model, self.accelerator))

    def _finish_init(self, config: GRPOConfig) -> None:
        policy = self.model
        if not self._stock:
            self.add_callback(self._clock)
        self._watch_run()
        checks.check_causal_lm(policy)
        install(base_model_of(policy), self.temperature, self.args.cast_lm_head_to_fp32)
        if not self._stock:
            refuse_unknown_head(base_model_of(policy))
            checks.check_overrides(type(self), GRPOTrainer)
            checks.check_parallelism(self.get_tp_size())
            checks.check_optimizer(self.optimizer, policy)
            if self.use_vllm:
                length = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
                check_equal_shares(self.geometry, length, self.args.dataloader_drop_last)
        if config.disable_dropout:
            for module in (policy, self.ref_model):
                if module is not None:
                    checks.disable_random_parts(module)
        for sentence in checks.refuse_split_dependence(
            policy, config.neftune_noise_alpha, config.allow_split_dependent or self._stock
        ):
            self._uncovered.append(sentence)
        sharded = self._sharded
        if not sharded and not self._stock and self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
            raise ConfigError(
                "sync_each_batch=True sums gradients over processes in every backward pass; this trainer sums them "
                "once, after the last. Leave it out of gradient_accumulation_kwargs."
            )
        if config.bitwise_invariant:
            self._refuse_for_bitwise(sharded)
            align_memory(*(module for module in (policy, self.ref_model) if module is not None))
        may_cut = not (sharded or config.bitwise_invariant)
        self._scoring_memory = Halving(
            "scoring", "lower max_completion_length, or canonical_unit_size in bitwise mode", may_cut
        )
        self._sampling_memory = Halving(
            "generation", "lower rollout_chunk_size (fewer completions at a time), or max_completion_length", may_cut
        )
        if config.fp16 and not (self._stock or self.is_deepspeed_enabled):
            refuse_half_weights(policy)
        self._loss_config = config.loss_config()
        self._forms = Forms(
            config.packed_forward,
            config.score_completions_only,
            self.accelerator.device,
            not sharded,
            self.pad_to_multiple_of,
        )
        self._cost = token_cost(base_model_of(policy)) if config.balance_by_cost else None
        if self._stock:
            self._refuse_for_stock(config)
        if config.dynamic_sampling:
            self._check_dynamic_sampling()
        self._faults = Faults(config.reward_timeout, config.reward_retries, config.reward_on_failure)
        if self.environment_factories is None and not self._stock:
            self._check_prompt_lengths()
        if not self._stock:
            self._settle_rope(config)
        if self._stock:
            what = "rollout_func" if self.rollout_func is not None else "images"
            self._uncovered.append(f"{what}: trains through TRL's own code path")

    def _uncovered_sampling(self) -> str | None:
        """What the promise does not cover of how completions are sampled, as a sentence."""
        if self._stock:
            return None
        if self._own_sampling is not None:
            return f"{self._own_sampling} may sample in its own way; only the update is covered"
        if self._samples_by_key():
            return None
        if self._seeds_vllm():
            return (
                "vLLM samples every completion with a seed of its own, but rounds by its batches, so now and then a "
                "completion differs"
            )
        if self._own_generate is not None and not self.use_transformers_continuous_batching:
            return f"{self._own_generate} samples, and not by key; only the update is covered"
        return "this way of generating does not sample by key; only the update is covered"

    @staticmethod
    def _refuse_for_stock(config: GRPOConfig) -> None:
        ours = ("micro_batch_tokens", "advantage_estimator", "loss_aggregation", "dynamic_sampling")
        found = [name for name in ours if getattr(config, name) not in (None, False)]
        if found:
            raise ConfigError(
                f"{', '.join(found)}: images and rollout_func train through TRL's own code, which does not know of it; "
                "leave it out."
            )

    def _refuse_for_bitwise(self, sharded: bool) -> None:
        refuse_sharding(sharded, self.accelerator.num_processes, self.accelerator.distributed_type.value)
        refuse_batch_dependent_rewards(self.reward_funcs)
        own = self._own_sampling or self._own_generate
        if self._stock or self._own_sampling is not None or not self._samples_by_key():
            raise ConfigError(
                "bitwise_invariant=True needs this trainer's own sampling and window; images, rollout_func, beam "
                f"search, do_sample=False and a generate of one's own{'' if own is None else f' ({own})'} go through "
                "other code. Turn one of the two off."
            )

    def _check_prompt_lengths(self) -> None:
        if not hasattr(self.train_dataset, "__len__"):
            return
        checks.check_chat_template(self.train_dataset, self._tokenizer)
        checks.check_prompt_lengths(
            checks.iterate_prompts(self.train_dataset),
            self._prompt_lengths,
            self.model.config,
            self.max_completion_length or 0,  # None: as long as the model allows
            self.args.micro_batch_tokens,
        )

    def _settle_rope(self, config: GRPOConfig) -> None:
        models = [base_model_of(model) for model in (self.model, self.ref_model) if model is not None]
        done, dependent = settle_rope(models, self._longest_sequence)
        if done is not None:
            logger.warning(done)
        found = [] if dependent is None else [dependent]
        self._uncovered += checks.refuse_sentences(found, config.allow_split_dependent)

    def _longest_sequence(self) -> int | None:
        """Tokens of the longest prompt of all data sets and max_completion_length; None where it is not known."""
        train, evaluation = self.train_dataset, self.eval_dataset
        others = list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
        known = [data for data in (train, *others) if checks.has_readable_prompts(data)]
        unread = all(data is not train for data in known) or self.environment_factories is not None
        if unread or not self.max_completion_length:
            return None
        prompts = itertools.chain.from_iterable(checks.iterate_prompts(data) for data in known)
        return longest_prompt(prompts, self._prompt_lengths) + self.max_completion_length

    def _prompt_lengths(self, prompts: list[Any]) -> list[int]:
        return [len(ids) for ids in self._tokenize_prompts(prompts)[0]]

    # ---- Trainer set-up -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's, with this package's loss scaler in fp16."""
        super().create_accelerator_and_postprocess()
        leave_in_order()
        if self._stock:
            return
        reduce_in_float32(self.accelerator)
        if self.args.fp16:
            install_loss_scaler(self.accelerator, *self.args.loss_scale)
            self._deepspeed_scale = DeepSpeedScale(self.args.loss_scale[1]) if self.is_deepspeed_enabled else None

    def _announce(self) -> None:
        if (untested := compat.untested()) is not None:
            logger.warning(untested)
        if self.args.bitwise_invariant:
            self._refuse_for_bitwise(self._sharded)  # a `generate` may have been replaced since
        sampling = self._uncovered_sampling()
        for sentence in [*self._uncovered, *([] if sampling is None else [sampling])]:
            logger.warning(f"The promise that the split does not matter does not cover this run: {sentence}.")
        if self._stock or not self.accelerator.is_main_process:
            return
        prompts = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        epochs = None if self.args.max_steps > 0 else self.args.num_train_epochs
        plan = describe_plan(
            self.geometry, prompts, self.args.dataloader_drop_last, epochs, self.args.micro_batch_tokens
        )
        print(f"Plan (sizes over all processes unless they say otherwise)\n{plan}", flush=True)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Completions per optimizer step over all processes, for the Trainer's reports."""
        return super().get_total_train_batch_size(args) if self._stock else self.geometry.global_batch_size

    def get_train_dataloader(self) -> DataLoader:
        """One item per optimizer step; see `engine.prompt_order`."""
        if self._stock:
            return super().get_train_dataloader()
        dataset, args = self.train_dataset, self.args
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Training")
        rule = self._share_rule(self.num_generations)
        if args.dynamic_sampling:
            order = PromptOrder(len(dataset), args.seed, bool(self.shuffle_dataset))
            self._reserve = Reserve(dataset, rule, order, args.seed)
        return make_loader(
            dataset,
            self.geometry,
            rule,
            seed=args.seed,
            shuffle=bool(self.shuffle_dataset),
            drop_last=args.dataloader_drop_last,
            worker_options={
                "num_workers": args.dataloader_num_workers,
                "persistent_workers": args.dataloader_persistent_workers,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """One item, the whole evaluation set, cut into micro-batches like a training step."""
        if self._stock:
            return super().get_eval_dataloader(eval_dataset)
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate().")
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Evaluation")
        return make_eval_loader(dataset, self._share_rule(self.num_generations_eval))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As for evaluation; used by `predict`."""
        return super().get_test_dataloader(test_dataset) if self._stock else self.get_eval_dataloader(test_dataset)

    # ---- The window -----------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the window of one optimizer step; returns the loss of the whole step, on every process."""
        if self._stock:
            return super().training_step(model, inputs, num_items_in_batch)
        start = time.perf_counter()
        if self._deepspeed_scale is not None and self.state.global_step:
            self._deepspeed_scale.after_step(self.model_wrapped)  # the one before
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        rollout = self._prepare_inputs(inputs)
        context, work = self._survive(model, rollout)
        work.add_to(context.meter)
        loss = self._finish_step(context, work)
        if not math.isfinite(loss):
            self._explain_non_finite(model, rollout, context, loss)
        self._losses.append(loss)
        self._metrics["train"]["loss"].append(loss)  # the Trainer's own goes through a float32 mean of processes
        self._step += 1
        clear_cache_every(self.args.torch_empty_cache_steps, self.state.global_step)
        self._metrics["train"]["step_time"].append(time.perf_counter() - start)
        return torch.tensor(loss, device=self.accelerator.device)

    @property
    def _policy(self) -> Any:
        """The causal language model inside the wrappers of Accelerate and PEFT."""
        return base_model_of(self.accelerator.unwrap_model(self.model))

    @contextlib.contextmanager
    def _in_window(self) -> Iterator[None]:
        """Inside, forwards run packs where the model takes them."""
        policy = self._policy
        with packed_attention(policy, self._forms.packs(policy, self.model)):
            yield

    def _survive(self, model: Any, rollout: Rollout) -> tuple[StepContext, StepWork]:
        """Run the window, again with smaller micro-batches where one did not fit into memory."""
        gradients = self._gradients(model)
        for attempt in itertools.count():
            micro_batches, work = self._plan(rollout, self._limits.rows)
            try:
                with self._clock.phase("window"), self._in_window():
                    context = self._measure(rollout, micro_batches, gradients)
                    loss_of = functools.partial(self._micro_batch_loss, model, rollout, context)
                    run_window(self.accelerator, model, gradients, micro_batches, loss_of)
                return context, work
            except WindowOutOfMemory as shortage:
                reason = str(shortage)
            free_memory()
            self._shrink(rollout, micro_batches, reason, attempt)
        raise AssertionError  # the loop ends by itself

    def _explain_non_finite(self, model: Any, rollout: Rollout, context: StepContext, loss: float) -> None:
        """End a run whose loss is not finite, before the optimizer acts on it.

        Raises:
            PrecisionError: on every process, with the first module that produced the number.
        """
        policy, first = self.accelerator.unwrap_model(model), FirstModule()
        weight = None if self._sharded else bad_weight(policy)
        micro_batches, _ = self._plan(rollout, self._limits.rows)
        with torch.no_grad(), self._in_window(), first.watching(policy):
            for part in micro_batches:
                self._micro_batch_loss(model, rollout, context, part)
        module = first_of_all_processes(first.name)
        raise PrecisionError(
            f"the loss of step {self.state.global_step + 1} is {loss}: {explanation(weight, module, self.args.fp16)}."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, with the loss scale, and the loss of the whole run summed exactly at its end."""
        scaler = self.accelerator.scaler
        if "loss" in logs and isinstance(scaler, LossScaler):
            logs |= scaler.report()
        elif "loss" in logs and self._deepspeed_scale is not None:
            logs |= self._deepspeed_scale.report(self.model_wrapped)
        if self._losses and "train_loss" in logs:
            logs["train_loss"] = math.fsum(self._losses) / len(self._losses)
        super().log(logs, start_time)

    def _gradients(self, model: Any) -> NativeGradients | None:
        """How this step's gradients are added up; None where the engine does it."""
        if self._sharded:
            return None
        names, parameters = zip(*self.accelerator.unwrap_model(model).named_parameters())
        if not self.args.bitwise_invariant:
            return NativeGradients(parameters, self.accelerator)
        return FixedPointGradients(parameters, self.accelerator, names, self.args.bitwise_fraction_bits)

    def _shrink(self, rollout: Rollout, micro_batches: list[MicroBatch], reason: str, attempt: int) -> None:
        sizes = rollout.sizes(self.pad_to_multiple_of)
        if self.args.unit_rows is not None and attempt:
            raise MemoryShortageError(
                f"the window ran out of memory twice in one step ({reason}) with canonical units of "
                f"{self.args.unit_rows} completion(s), which bitwise_invariant=True does not cut. Helpful: a smaller "
                "canonical_unit_size (it belongs to what the run means), gradient_checkpointing=True, a smaller "
                "max_completion_length."
            )
        rows = max(len(part.rows) for part in micro_batches)
        packed = self._forms.packs(self._policy, self.model)
        tokens = max(sizes.tokens(part.rows, packed) for part in micro_batches)
        device = self.accelerator.device
        rows, tokens = max_over_processes(rows, device), max_over_processes(tokens, device)
        if self.args.unit_rows is not None:
            self._limits.failures += 1
            logger.warning(f"Out of memory in the window ({reason}); its units run again after freeing memory.")
            return
        allowed = self._limits.shrink(rows, tokens)
        logger.warning(
            f"Out of memory in the window ({reason}); it runs again with {allowed}, and so do all that follow. The "
            "update is the same."
        )

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of the whole evaluation set, on every process."""
        if self._stock:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad(), pinned(self._threads):
            rollout = self._prepare_inputs(inputs)
            micro_batches, _ = self._plan(rollout, self.args.per_device_eval_batch_size)
            context = self._measure(rollout, micro_batches)
            for part in micro_batches:
                self._micro_batch_loss(model, rollout, context, part)
            self._clock.take()  # the phases that are logged are those of training
            loss = self._finish_step(context)
            self._metrics["eval"]["loss"].append(loss)
            return torch.tensor(loss, device=self.accelerator.device), None, None

    def _plan(self, rollout: Rollout, max_rows: int) -> tuple[list[MicroBatch], StepWork]:
        """This process's micro-batches; before the first pack, both forms are compared on a few completions."""
        sizes = rollout.sizes(self.pad_to_multiple_of)

        def some(rows: slice) -> tuple[torch.Tensor, torch.Tensor, int]:
            batch = self._collate(rollout, MicroBatch(tuple(range(rows.start, rows.stop))))
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            return ids, batch["attention_mask"], batch["completion_ids"].size(1)

        if not self._forms.settled(self._policy):
            same = [before == after for before, after in zip(sizes.groups_B, sizes.groups_B[1:])]
            lengths = (sizes.prompts_B, sizes.completions_B, same)
            with self._scoring():
                self._forms.check(self.model, self._policy, self.model, lengths, some, everywhere=True)
        packed = self._forms.packs(self._policy, self.model)
        budget = self._limits.tokens
        if budget is not None and not self._said_oversized and (large := oversized(sizes, budget, packed)):
            self._said_oversized = True
            tokens = max(sizes.tokens([row], packed) for row in large)
            logger.warning(
                f"{len(large)} completion(s) of this step are larger with their prompt than "
                f"micro_batch_tokens={budget} (up to {tokens} tokens) and run alone, over the budget; "
                "max_completion_length bounds them."
            )
        layout = Layout(max_rows, budget, packed, self._cost, self.args.unit_rows)
        rows = contributing_rows(rollout) if self._skips_zeros() else range(len(rollout))
        planned = plan_window(self.accelerator, sizes, rows, layout)
        return planned, StepWork.of(sizes, rows, planned, packed)

    def _skips_zeros(self) -> bool:
        """Whether nothing but the policy loss, which is linear in the advantage, acts on a completion."""
        other_terms = (
            self.beta != 0.0
            or self._entropy_bonus_enabled
            or self.aux_loss_enabled
            or self.top_entropy_quantile < 1.0
            or self._loss_config.loss_type == "vespo"  # logs a weight of every sequence
            or self._overrides("compute_loss", "_compute_loss")
        )
        return self.args.skip_zero_contribution and self.model.training and not other_terms

    @contextlib.contextmanager
    def _scoring(self) -> Iterator[None]:
        plain = without_checkpointing(self.model, self._checkpointing_kwargs)
        with torch.no_grad(), plain, self.accelerator.autocast():
            yield

    def _measure(
        self, rollout: Rollout, micro_batches: list[MicroBatch], gradients: NativeGradients | None = None
    ) -> StepContext:
        """Everything step-wide that the loss of a micro-batch needs, before the first forward."""
        meter = StepMeter(self.accelerator.device)
        guard = functools.partial(survivable, self.accelerator, gradients.discard if gradients else None)

        def score(part: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, RouterOutput | None]:
            batch = self._collate(rollout, part)
            with self._scoring():
                _, entropies, router = self._score(self.model, batch)
            return entropies, loss_mask(batch), router

        return measure_step(
            rollout,
            micro_batches,
            score,
            meter,
            self.top_entropy_quantile,
            self.aux_loss_enabled,
            experts_per_token(self.model),
            guard,
        )

    def _collate(self, rollout: Rollout, part: MicroBatch) -> dict[str, Any]:
        rows = rollout.select(part.rows)
        padded = rows.collate(self._tokenizer.pad_token_id, self.pad_to_multiple_of)
        batch = {name: value.to(self.accelerator.device) for name, value in padded.items()}
        batch["attention_mask"] = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        return batch

    def _micro_batch_loss(self, model: Any, rollout: Rollout, context: StepContext, part: MicroBatch) -> torch.Tensor:
        inputs = self._collate(rollout, part)
        inputs["step"], inputs["weight"] = context, part.weight
        inputs["groups"] = [rollout.groups[row] for row in part.rows]
        if context.entropy_keep is not None:
            width = inputs["completion_mask"].size(1)
            inputs["entropy_keep"] = context.keep_mask(part.rows, width, self.accelerator.device)
        inputs["num_items_in_batch"] = self._items_in_batch(context, part)
        with self.compute_loss_context_manager(), self._scaled_by_rows(context, part):
            options = {"num_items_in_batch": None} if self.model.training else {}  # as transformers calls it
            loss = self.compute_loss(model, inputs, **options)
        loss = loss if part.weight else loss * 0.0  # a subclass's own term does not know the weight
        context.meter.add_total("loss", loss, 1.0)
        return loss

    @contextlib.contextmanager
    def _scaled_by_rows(self, context: StepContext, part: MicroBatch) -> Iterator[None]:
        """Inside, a loss that divides by the accumulation steps, as TRL wants of one, is divided for this micro-batch.

        What comes out of the micro-batches is added up. So the divisor is the step's completions over those of the
        micro-batch, which makes a mean over its completions a part of the mean over those of the step.
        """
        before = getattr(self, "current_gradient_accumulation_steps", 1)  # an evaluation may come before training
        self.current_gradient_accumulation_steps = context.counts.completions / len(part.rows)
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = before

    def _items_in_batch(self, context: StepContext, part: MicroBatch) -> torch.Tensor:
        """What TRL calls by that name, such that its rescaling to one step gives the loss tokens of this step."""
        items = float(context.counts.tokens * self.accelerator.num_processes)
        if self.model.training:
            items *= self.geometry.steps_per_rollout * len(part.rows) / context.counts.completions
        return torch.tensor(items, device=self.accelerator.device)

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass overrides any of these methods."""
        return any(getattr(type(self), name) is not getattr(GRPOTrainer, name) for name in names)

    @property
    def _own_sampling(self) -> str | None:
        """The name of a subclass's method that generates completions, or works on those that are generated."""
        names = (name for name in ("_generate", "_generate_single_turn") if self._overrides(name))
        return next((f"{type(self).__name__}.{name}" for name in names), None)

    def _score(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, RouterOutput | None]:
        """Log-probabilities and entropies (B, T) of a collated batch, and the router logits of a MoE model."""
        router = RouterRequest() if self.aux_loss_enabled else None
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            batch["attention_mask"],
            batch["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=router or False,
        )
        return logps, entropies, router.output if router else None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self._stock:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        wrapped = self.accelerator.unwrap_model(model)
        policy, sharded = base_model_of(wrapped), self._sharded

        def align(chunks: int) -> int:  # while a share is scored every forward is a collective there
            scoring = self._request is not None and sharded
            return max_over_processes(chunks, self.accelerator.device) if scoring else chunks

        scoring_share = not torch.is_grad_enabled() and self._request is not None
        with self._clock.phase("logps" if scoring_share else None), self.accelerator.autocast():
            if scoring_share and not self._forms.settled(policy):
                lengths = read_batch(input_ids, attention_mask, logits_to_keep)

                def some(rows: slice) -> tuple[torch.Tensor, torch.Tensor, int]:
                    return input_ids[rows], attention_mask[rows], logits_to_keep

                self._forms.check(model, policy, wrapped, lengths, some, everywhere=False)
            # micro-batches are planned within the budget already, and cutting one again would keep all its graphs
            budget = self._limits.tokens if scoring_share else None
            unit = self.args.unit_rows if scoring_share else None
            chunking = Chunking(
                self.pad_to_multiple_of,
                budget,
                self._forms.packs(policy, wrapped),
                align,
                None if unit is None else (self._group_size, unit),
                self._scoring_memory if scoring_share else None,
            )
            # a loss computed outside the window runs its backward pass where packs are off
            again = torch.is_grad_enabled() and policy.is_gradient_checkpointing and not runs_packs(policy)
            scorer = self._forms.scorer(policy, wrapped, super()._get_per_token_logps_and_entropies, again)
            return score_in_chunks(scorer, model, chunking, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """A micro-batch's part of the loss of the step: weights times per-token losses, summed.

        `inputs["step"]` carries the step-wide counts; without it the batch is taken as the whole step.
        """
        if self._stock:
            return super()._compute_loss(model, inputs)
        if "step" not in inputs:
            inputs = self._whole_batch(inputs)
        logps, entropies, router = self._score(model, inputs)
        return assemble_loss(self._loss_config, self._loss_terms(), inputs, logps, entropies, router)

    def _whole_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A scored batch that did not come through the window, with itself as its step."""
        inputs = batch_context(inputs, self.accelerator.device, experts_per_token(self.model), self._group_size)
        if self.top_entropy_quantile < 1.0:
            with torch.no_grad():
                _, entropies, _ = self._score(self.model, inputs)
            keep_whole_batch(inputs, entropies, self.top_entropy_quantile)
        return inputs

    def _record_samples(self) -> Samples | None:
        """Log-probabilities of a few completions under the policy as it is now, for a checkpoint."""
        rollout = self._rollout
        if rollout is None:
            return None

        def score(row: int) -> torch.Tensor:
            with self._scoring():
                return self._score(self.model, self._collate(rollout, MicroBatch((row,))))[0][0]

        half = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else None
        dtype = half or str(next(self.model.parameters()).dtype).removeprefix("torch.")
        quantised = bool(getattr(self._policy, "is_quantized", False))
        training, samples, failed = self.model.training, None, False
        self.model.eval()
        try:
            samples = record(rollout, score, dtype, self.temperature, quantised)
        except RuntimeError as error:  # a checkpoint without samples is better than none
            if self._sharded or not is_out_of_memory(error):
                raise
            failed = True
        finally:
            self.model.train(training)
        return None if not self._sharded and any_process(failed, self.accelerator.device) else samples

    def _loss_terms(self) -> LossTerms:
        bonus = self._entropy_coefficient() if self._entropy_bonus_enabled else None
        return LossTerms(bonus, self.router_aux_loss_coef if self.aux_loss_enabled else None)

    def _entropy_coefficient(self) -> float:
        """TRL's gate: the adaptive bonus acts only while the last step's entropy was at or below the target."""
        if self.use_adaptive_entropy and not self._last_world_entropy <= self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    def _finish_step(self, context: StepContext, work: StepWork | None = None) -> float:
        """Reduce what was metered, log it, move the entropy controller; returns the loss of the step."""
        mode = "train" if self.model.training else "eval"
        values = context.meter.reduce()
        # a subclass's own loss may leave out what is metered with ours
        loss, policy_loss = values.pop("loss", math.nan), values.pop("policy_loss", math.nan)
        if work is not None:
            seconds = self._clock.take()
            values |= work.shares(values, seconds.get("window", 0.0))
            values |= {f"time/{name}": value for name, value in seconds.items()}
        if self._entropy_bonus_enabled:
            self._metrics[mode]["policy_loss"].append(policy_loss)
            entropy = values.pop("bonus_entropy", math.nan)
            if mode == "train":
                if self.use_adaptive_entropy:
                    self._last_world_entropy = 0.0 if math.isnan(entropy) else entropy
                    self.entropy_coef = adapted_entropy_coefficient(
                        self.entropy_coef,
                        self._last_world_entropy,
                        target=self.args.entropy_target,
                        delta=self.args.entropy_coef_delta,
                        lowest=self.args.entropy_coef_min,
                        highest=self.args.entropy_coef_max,
                    )
                self._metrics[mode]["entropy_coef"].append(self.entropy_coef)
        for name, value in values.items():
            self._metrics[mode][name].append(value)
        return loss

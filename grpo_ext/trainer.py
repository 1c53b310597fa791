"""`GRPOTrainer`: TRL's GRPO trainer, whose update does not depend on the hardware split.

Each override hands over to a component of the trainer: `Rollouts` makes rollout batches (rollouts.source),
`ForwardRunner` computes log-probabilities (forward.runner), `StepPlanner` plans the micro-batches of a step
(step.optimizer_step), `RunKeeper` writes and reads checkpoints (run.keeper). docs/architecture.md follows a step
through them. compat.py lists the overrides, and compares them with the installed TRL.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import compat
from .algorithms.losses import adapted_entropy_coefficient
from .batching.prompt_order import StepRows, make_eval_loader, make_loader
from .checks.model import refuse_frozen
from .checks.trainer import check_arguments, check_trainer, warn_before_training
from .config import GRPOConfig
from .errors import ConfigError
from .forward.architecture import base_model_of, token_cost
from .forward.lm_head import install
from .forward.quantised import keep_4bit_weights, train_in_float32, trained_values
from .forward.reference import reference_loader, use_reference
from .forward.routing import install_routers
from .precision.loss_scaler import LossScaler, install_loss_scaler, reduce_in_float32
from .rollouts.batch import RolloutBatch
from .rollouts.build import build_rollouts, sampling_config, terms_of
from .rollouts.build_ahead import sample_ahead
from .rollouts.decoding import without_router_logits
from .rollouts.vllm_weights import engine_options
from .run.checkpoint import create_output_dir
from .run.completions import completions_logged
from .run.keeper import RunKeeper
from .run.loading import dtypes_kept, fill_missing_state, load_renamed
from .run.model_card import complete_card
from .runtime.attributes import assigned
from .runtime.clock import PhaseClock
from .runtime.collectives import leave_in_order, refused_alone
from .runtime.determinism import align_memory, computing_with, pinned
from .runtime.messages import show_messages
from .step.evaluation import PassAtK
from .step.gradients import accumulating, replicate
from .step.loss import assemble_loss
from .step.optimizer_step import StepPlanner
from .step.settings import loss_config_of, step_settings_of
from .step.statistics import CONTEXT_KEY, MicroBatchContext, args_in_loss

logger = get_logger(__name__)
RewardFunc = str | PreTrainedModel | Callable[..., Any]  # as in TRL: a model's name, a model, or a function


class GRPOTrainer(trl.GRPOTrainer):
    """Drop-in replacement for `trl.GRPOTrainer` whose update is the same for every hardware split.

    Takes the arguments of `trl.GRPOTrainer`; `args` may be a `grpo_ext.GRPOConfig` or a `trl.GRPOConfig`.

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
        RewardError: a reward function raised, or returned something else than rewards.
        RolloutError: a `rollout_func` returned something else than completions, or an environment's `reset` hangs
            (`tool_timeout`).
    """

    args: GRPOConfig  # the Hugging Face loop's copy: see GRPOConfig.for_loop
    model: Any
    eval_dataset: Any
    num_generations: int
    num_generations_eval: int
    _loads_from: str  # the checkpoint whose weights are being loaded

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
        compat.verify_overrides(GRPOTrainer)
        leave_in_order()
        config = GRPOConfig.for_model(args, model)
        data = (train_dataset, eval_dataset)
        processing_class = check_arguments(config, model, data, processing_class, tools, environment_factory)
        loop_args = config.for_loop()
        reference = reference_loader(model, loop_args, peft_config, quantization_config)
        if reference is not None:
            loop_args.beta, loop_args.sync_ref_model = 0.0, False  # TRL loads no reference; `use_reference` does
        if loop_args.should_save:
            create_output_dir(str(loop_args.output_dir))
        adapters = trained_values(model)
        with compat.hiding_old_names(), compat.engine_options(engine_options(config, model, peft_config, rollout_func)):
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
        train_in_float32(self.model, adapters)
        if reference is not None:
            use_reference(reference, self, config)
        self._build(config, args)

    def _build(self, config: GRPOConfig, user_args: trl.GRPOConfig | None) -> None:
        """Build the components, and check what is known once they are there."""
        show_messages()
        self._losses: list[float] = []  # of all steps
        self._clock = PhaseClock()
        self.geometry = config.geometry
        self.args.steps_per_generation = self.geometry.steps_per_rollout
        self.add_callback(self._clock)
        keep_4bit_weights(self.model)
        install(base_model_of(self.model), self.temperature, self.args.cast_lm_head_to_fp32)
        if self.args.replay.experts:
            install_routers(base_model_of(self.model))
        self._forwards, self._rollouts = build_rollouts(self, self._clock)
        self._step_planner = StepPlanner(
            accelerator=self.accelerator,
            args=self.args,
            forwards=self._forwards,
            clock=self._clock,
            images=self._rollouts.images,
            pad_token_id=self._rollouts.worker.settings.pad,
            cost=token_cost(base_model_of(self.model)),
        )
        self._keeper = RunKeeper(self, user_args)
        self.add_callback(self._keeper)
        self.add_callback(self._keeper.watch)
        self._pass_at_k = PassAtK(self.args)
        self._uncovered = check_trainer(self, config)
        if config.reward_workers:
            self._rollouts.worker.rewards.pack_functions(terms_of(self).rewards)
        if config.bitwise_invariant:
            align_memory(*(module for module in (self.model, self.ref_model) if module is not None))

    # ---- Trainer set-up -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Like TRL's method, with this package's loss scaler in fp16."""
        super().create_accelerator_and_postprocess()
        reduce_in_float32(self.accelerator)
        if self.is_fsdp_enabled:
            compat.forget_absent_layers(base_model_of(self.model))
        if self.args.fp16:
            install_loss_scaler(self.accelerator)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Like transformers' method; without DDP, see `step.gradients.replicate`."""
        model = super()._wrap_model(model, training, dataloader)
        return replicate(self.accelerator, model) if training else model

    def get_total_train_batch_size(self, args: Any) -> int:
        """Completions per optimizer step over all processes, for the Trainer's reports."""
        return self.geometry.global_batch_size

    def get_train_dataloader(self) -> DataLoader:
        """One item per optimizer step; see `batching.prompt_order`."""
        dataset = self.train_dataset
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Training")
        slices = self._rollouts.slices(self.num_generations)
        loader = make_loader(dataset, slices, self.args, bool(self.shuffle_dataset))
        self._rollouts.steps = loader.dataset
        self._rollouts.images.prompts[True] = getattr(loader.dataset, "prompts", None)  # a stream has none
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """One item, the whole evaluation set, cut into micro-batches like a training step."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ConfigError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate().")
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Evaluation")
        slices = self._rollouts.slices(self.num_generations_eval)
        loader = make_eval_loader(dataset, slices, self.args.per_device_eval_batch_size)
        self._rollouts.images.prompts[False] = loader.dataset.prompts  # type: ignore[attr-defined]
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As for evaluation; used by `predict`."""
        return self.get_eval_dataloader(test_dataset)

    # ---- One optimizer step ---------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Sample or select the completions, run their micro-batches, log; the loss of the step, on every process."""
        start = time.perf_counter()
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        completions = self._completions_of(inputs)
        settings = step_settings_of(self)
        # more than one where memory runs out, each with smaller micro-batches
        for attempt in self._step_planner.attempts(model, completions, settings):
            with attempt.running():
                attempt.measure(self.model)  # the denominators, before any forward with gradients
                # at its end one sum over the processes
                with accumulating(self.accelerator, attempt.gradients, len(attempt.plan)) as backward:
                    for micro_batch in self._with_events(map(attempt.micro_batch, attempt.plan)):
                        with self.accelerator.accumulate(model):  # FSDP decides in the forward whether to reduce
                            backward(self._loss_of(model, micro_batch))
        loss = self._log_step(attempt.log_values())
        attempt.refuse_not_finite(loss, self.state.global_step + 1, functools.partial(self._loss_of, model))
        self._losses.append(loss)
        self._step += 1
        if (steps := self.args.torch_empty_cache_steps) is not None and self.state.global_step % steps == 0:
            clear_device_cache()
        self._metrics["train"]["step_time"].append(time.perf_counter() - start)
        return torch.tensor(loss, device=self.accelerator.device)

    def _completions_of(self, inputs: Any) -> RolloutBatch:
        """The completions of a step; with a lag, further rollout batches are sampled while it trains."""
        sample_ahead(self, only_due=self.args.dynamic_sampling)
        completions = self._prepare_inputs(inputs)
        sample_ahead(self)
        if self._rollouts.ahead is not None:
            self._metrics["train"]["sampling/staleness"].append(self.state.global_step - self._rollouts.sampled_at)
        return completions

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of the whole evaluation set, on every process."""
        apart = assigned(self._clock, seconds=PhaseClock().seconds)  # only phases of training are logged
        with torch.no_grad(), pinned(self.args.pinned_threads), compat.hiding_old_names(), apart:
            completions = self._prepare_inputs(inputs)
            for attempt in self._step_planner.attempts(self.model, completions, step_settings_of(self)):
                with attempt.running():
                    attempt.measure(self.model)
                    for micro_batch in self._with_events(map(attempt.micro_batch, attempt.plan)):
                        self._loss_of(self.model, micro_batch)
            loss = self._log_step(attempt.context.metrics.reduce())
            return torch.tensor(loss, device=self.accelerator.device), None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Like transformers' method, with pass@k and mean@k of the whole set, under its prefix; for `predict` too."""
        options = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        with self._keeper.saving_on_failure():
            output: Any = super().evaluation_loop(dataloader, *options)
        pass_metrics = self._pass_at_k.metrics(self.num_generations_eval) if len(dataloader) else {}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in pass_metrics.items()})
        return output

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Like transformers' method. Its metrics are not logged, so they are cleared before the next evaluation."""
        output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        self._metrics["eval"].clear()
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Rows of the loader -> the `RolloutBatch` of this optimizer step, the same on every process."""
        batch = self._rollouts.completions_of(StepRows.checked(generation_batch), terms_of(self))
        if (terms := self._rollouts.scored_by) is not None and not terms.training:
            self._pass_at_k.observe(self._rollouts.rewards_BF, terms.weights_F, terms.rewards.names)
        return batch

    def _with_events(self, micro_batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Micro-batches, and between two the event of callbacks; to transformers' loop the step is one batch."""
        event = "on_substep_end" if self.model.training else "on_prediction_step"
        for number, inputs in enumerate(micro_batches):
            if number:
                self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)
            yield inputs

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """A micro-batch's part of the loss of the step, through TRL's `compute_loss` and a user's overrides of it."""
        context: MicroBatchContext = inputs[CONTEXT_KEY]
        options = {"num_items_in_batch": None} if self.model.training else {}  # as transformers calls it
        steps, args = context.accumulation_steps, args_in_loss(self.args, context, self.model.training)
        with assigned(self, current_gradient_accumulation_steps=steps, args=args), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, **options)
        return context.add_loss(loss)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """A micro-batch's part of the loss of the step; a batch without a context is a whole step."""
        # a dictionary that an override makes anew lacks it; inside `compute_loss`, `args_in_loss` has it
        if (context := inputs.get(CONTEXT_KEY, getattr(self.args, "micro_batch", None))) is None:
            inputs = self._step_planner.as_step(self.model, inputs, self._group_size, step_settings_of(self))
        else:
            inputs = {**inputs, CONTEXT_KEY: context}
        rows = self._step_planner.tokens_of(inputs, self.model.training)
        scores = self._forwards.micro_batch_log_probs(model, inputs, rows, self.aux_loss_enabled)
        return assemble_loss(loss_config_of(self), inputs, scores)

    def _log_step(self, values: dict[str, float]) -> float:
        """Log the values of a step, and move the entropy controller; returns the loss."""
        loss, entropy, args = values.pop("loss", math.nan), values.pop("bonus_entropy", math.nan), self.args
        if self._entropy_bonus_enabled and self.model.training:
            if self.use_adaptive_entropy:
                self._last_world_entropy = 0.0 if math.isnan(entropy) else entropy
                bounds = (args.entropy_target, args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max)
                self.entropy_coef = adapted_entropy_coefficient(self.entropy_coef, self._last_world_entropy, *bounds)
            values = {"entropy_coef": self.entropy_coef} | values
        # the loss too: transformers would log a float32 mean over processes
        for name, value in (values | {"loss": loss}).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return loss

    # ---- Log-probabilities ----------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Any:
        """Like TRL's method, in the model's form. A user's own tokens with images run through TRL's method."""
        arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
        forwards = self._forwards.of_this_thread
        if not forwards.knows(input_ids, attention_mask) and any(value is not None for value in images.values()):
            return super()._get_per_token_logps_and_entropies(*arguments, **images)
        scores = forwards.padded_log_probs(*arguments)
        return tuple(None if part is None else part.to(input_ids.device) for part in scores)

    # ---- Sampling: TRL's hooks, for those who override or call them ------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's: rows of this process -> its padded dictionary, with advantages over the whole rollout batch."""
        return self._rollouts.score(inputs, terms_of(self))

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's tuple of eight; called outside a user's `_generate`, TRL's own method."""
        worker = self._rollouts.worker
        return super()._generate(prompts) if worker.active_rollout is None else worker.generate_for_trl(prompts)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """TRL's: of rows of this process, the rewards of all processes (B, F), in global order."""
        return self._rollouts.rewards((inputs, prompts, completions, completion_ids_list), terms_of(self))

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's; called by a user's `_generate_single_turn`, this trainer's engine."""
        worker = self._rollouts.worker
        if worker.active_chunk is not None and not self.use_transformers_continuous_batching:
            config = None if self.use_vllm else sampling_config(self)
            return worker.turn_for_trl(prompt_ids, images, config, self._group_size)
        return self.trl_turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)

    def trl_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's own `_generate_single_turn`."""
        with without_router_logits(self.model.config):
            return super()._generate_single_turn(*args, **kwargs)

    # ---- Queries --------------------------------------------------------------------------------------------------

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _override_of(self, name: str) -> Any:
        """The method of a subclass, or one assigned to this trainer, that replaces ours; None without one."""
        overridden = name in vars(self) or getattr(type(self), name) is not getattr(GRPOTrainer, name)
        return getattr(self, name) if overridden else None

    # ---- Keeping the run ------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train; prints the plan once. Arguments and result are those of `transformers.Trainer.train`.

        `resume_from_checkpoint` may also be "latest", as True: the newest whole checkpoint of the run that started last
        in `output_dir`; or "auto": the same where there is one, and else a new run, for job scripts. An
        `output_dir` that already holds checkpoints of another run is left alone: with a warning, this run writes
        beside it. `args.resume_from_checkpoint` is for scripts and not read here, as in transformers.

        Raises:
            CheckpointError: there is no whole checkpoint to resume from, or it belongs to another run.
            TrainingInterrupted: a `SystemExit` with status 75, after SIGTERM or Ctrl-C, with the checkpoint written.
        """
        refuse_frozen(self.model)
        self._rollouts.forget_rollout()
        self._losses = []
        with contextlib.ExitStack() as ending:
            ending.callback(self._keeper.release_folder)
            if (reward_workers := self._rollouts.worker.rewards.workers) is not None:
                ending.callback(reward_workers.kill)
            checkpoint = self._keeper.begin(resume_from_checkpoint)
            warn_before_training(self, self._uncovered)
            with (
                compat.hiding_old_names(),
                pinned(self.args.pinned_threads),
                computing_with(self._rollouts.divide_threads()),
                refused_alone(self.accelerator),
                self._keeper.running(checkpoint),
                contextlib.closing(self._rollouts),
            ):
                result = super().train(checkpoint, trial, ignore_keys_for_eval)
            if (limits := self._step_planner.limits).failures:
                logger.info(limits.what_fits())
            if self._keeper.watch.stopping:
                raise self._keeper.interrupted(self._checkpoint_folder(None), self.state.global_step)
            return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Like TRL's method, with the loss scale, and the loss of the whole run summed exactly at its end."""
        if "loss" in logs and isinstance(scaler := self.accelerator.scaler, LossScaler):
            logs |= scaler.report()
        if self._losses and "train_loss" in logs:
            logs["train_loss"] = math.fsum(self._losses) / len(self._losses)
        with completions_logged(self):
            super().log(logs, start_time)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Like transformers' method, without its warning of another micro-batch size; says where a run resumes."""
        size = (self._keeper.resumed.train_batch_size or self.args.train_batch_size) // max(1, self.args.n_gpu)
        with assigned(self.args, per_device_train_batch_size=size):
            place = super()._init_training_state(*args, **kwargs)
        if self.state.global_step:
            logger.info(f"Going on after step {self.state.global_step} of {self.state.max_steps}.")
        return place

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Like transformers' method, which would train on where a finished run is resumed."""
        if (reason := self._keeper.why_finished()) is not None:
            logger.info(reason)
            self.control.should_training_stop = True
        elif not self._keeper.watch.evaluation_due:
            super()._run_epoch(*args, **kwargs)
        else:
            with tempfile.TemporaryDirectory() as states:
                self._evaluate_late(kwargs["trial"])
                self._save_rng_state(states)
                if not self.control.should_training_stop:  # a callback may stop the run after its evaluation
                    # of the checkpoint transformers' method reads the random states alone
                    super()._run_epoch(*args, **{**kwargs, "resume_from_checkpoint": states})

    def _evaluate_late(self, trial: Any) -> None:
        """Make the evaluation that an interrupt left, as the loop would have before it wrote the checkpoint."""
        self._keeper.watch.evaluation_due = False
        self._load_rng_state(self._keeper.checkpoint)
        best = self._determine_best_metric(self._evaluate(trial, None), trial)
        if best and self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = self._keeper.checkpoint

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Like transformers' method, but keeps the checkpoint that an interrupted run resumes from."""
        watch = self._keeper.watch
        if watch.evaluation_due and not watch.stopping:  # of the last step of all
            self._evaluate_late(trial)
        limit = None if watch.stopping else self.args.save_total_limit
        with assigned(self.args, save_total_limit=limit):
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Like transformers' method, and the weights that it leaves out."""
        with dtypes_kept(self.model), assigned(self, _loads_from=resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Like transformers' method, and the weights that it leaves out."""
        with dtypes_kept(self.model), assigned(self, _loads_from=self.state.best_model_checkpoint):
            super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load the weights that transformers' method only warns of: the files have them under other names."""
        load_renamed(self.model, self._loads_from, load_result.missing_keys)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that is whole or absent."""
        if self.is_fsdp_enabled:
            fill_missing_state(self.optimizer)
        final, push = self._checkpoint_folder(trial), self.args.push_to_hub
        with self._keeper.writing(final, self.state), assigned(self.args, push_to_hub=False):
            super()._save_checkpoint(model, trial)
        if push:  # once the checkpoint has its final name
            self._push_from_checkpoint(str(final))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Like TRL's method, with the base model's name and code that runs: see `run.model_card`."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir)).resolve()
            saved = "" if self._keeper.output_dir is None else f"/{self._checkpoint_folder(None).name}"
            complete_card(folder, self.hub_model_id or f"{folder.name}{saved}", self.model, self.processing_class)

    def _get_output_dir(self, trial: Any) -> str:
        """Like transformers' method; while a checkpoint is written, the folder in which it becomes whole."""
        return self._keeper.output_dir or super()._get_output_dir(trial)

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

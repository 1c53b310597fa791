"""`GRPOTrainer`: TRL's GRPO trainer, whose update does not depend on the hardware split.

Each override hands over to a component (components.py); docs/architecture.md follows a step through them. compat.py
lists the overrides, and compares them with the installed TRL.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import compat
from .batching.prompt_order import StepRows, make_eval_loader
from .batching.sizes import BatchGeometry
from .checks.teacher import check_teacher
from .checks.trainer import check_arguments, check_trainer, warn_before_training
from .components import Components
from .config import GRPOConfig
from .errors import ConfigError
from .forward.architecture import base_model_of
from .forward.dropout import keyed_dropout
from .forward.fixed_models import use_fixed_models
from .precision.loss_scaler import install_loss_scaler, reduce_in_float32
from .rollouts.ahead import divide_threads
from .rollouts.trl_methods import without_rows
from .run.cases import Case
from .run.rerun import Rerun, run_again
from .runtime.attributes import temporarily_set, temporarily_set_each
from .runtime.collectives import UsersAccelerator, leave_in_order
from .runtime.determinism import computing_with, pinned
from .runtime.messages import show_messages
from .runtime.tracebacks import hide_frames
from .sampling.decoding import without_router_logits
from .sampling.vllm_weights import starting_engine
from .step.gradients import replicate
from .step.inputs import LossInputs
from .step.loss import assemble_loss
from .step.settings import loss_config_of, next_entropy_coefficient
from .step.statistics import log_values
from .upstream.argument_checks import refuse_frozen
from .upstream.completions import completions_logged
from .upstream.loading import dtypes_kept, fill_missing_state, load_renamed
from .upstream.model_card import complete_card
from .upstream.reference import reference_loader
from .upstream.setup import forget_absent_layers, repair_set_up, trained_values
from .view import TrainerView

RewardFunc = str | PreTrainedModel | Callable[..., Any]  # as in TRL: a model's name, a model, or a function


class GRPOTrainer(trl.GRPOTrainer):
    """Drop-in replacement for `trl.GRPOTrainer` whose update is the same for every hardware split.

    Takes the arguments of `trl.GRPOTrainer` and a `teacher_model` to distil from; `args` may be TRL's GRPOConfig too.

    ```python
    from grpo_ext import GRPOConfig, GRPOTrainer
    config = GRPOConfig("runs/first", global_batch_size=64, per_device_train_batch_size=5)
    trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", my_reward, config, train_dataset=dataset)
    trainer.train()
    ```

    Raises:
        ConfigError, DataError, ModelError, SplitDependentError: at construction, before any training.
        RewardError: a reward function raised, or returned anything but rewards.
        RolloutError: a `rollout_func` returned no rollouts, or an environment's `reset` hangs (`tool_timeout`).
    """

    args: GRPOConfig  # the Hugging Face loop's copy: see GRPOConfig.for_loop
    model: Any
    num_generations_eval: int
    _loads_from: str  # the checkpoint whose weights are loaded, or were last

    @hide_frames
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
        teacher_model: Any = None,
        **added: Any,
    ) -> None:
        compat.verify_overrides(GRPOTrainer)
        show_messages()
        config = GRPOConfig.for_model(args, model)
        data, own = (train_dataset, eval_dataset), (processing_class, tools, environment_factory)
        processing_class, surveys = check_arguments(config, model, reward_funcs, data, *own)
        reward_funcs = check_teacher(config, model, teacher_model, processing_class, reward_funcs, environment_factory)
        loop_args = config.for_loop()
        reference = reference_loader(model, loop_args, peft_config, quantization_config)
        adapters, engine = trained_values(model), starting_engine(config, model, peft_config, rollout_func)
        hidden = {} if reference is None else {"beta": 0.0, "sync_ref_model": False}  # TRL would load a reference
        for_trl = temporarily_set(loop_args, steps_per_generation=config.geometry.micro_batches_sampled, **hidden)
        with compat.hiding_deprecations(), engine, for_trl:
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
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
                **added,
            )
        self._build(config, args, adapters, reference, teacher_model, surveys)

    def _build(self, config: GRPOConfig, args: Any, adapters: Any, reference: Any, teacher: Any, surveys: Any) -> None:
        repair_set_up(self, adapters)
        self._view = TrainerView(self, GRPOTrainer)
        self._view.verify()
        use_fixed_models(reference, teacher, self._view, config)
        self._assemble(args)
        self._uncovered = check_trainer(self._view, self._rollouts, config, surveys)

    def _assemble(self, args: Any) -> None:
        parts = Components(self._view, args)
        self._clock, self._forwards, self._rollouts = parts.clock, parts.forwards, parts.rollouts
        self._step_planner, self._loss_overrides = parts.step_planner, parts.loss_overrides
        self._trl_methods, self._pass_at_k, self._keeper = parts.trl_methods, parts.pass_at_k, parts.keeper

    # ---- Trainer set-up -------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self, **added: Any) -> None:
        """Like TRL's method, with an accelerator for users' code, and in fp16 with this package's loss scaler."""
        leave_in_order()
        super().create_accelerator_and_postprocess(**added)
        self.accelerator = UsersAccelerator.of(self.accelerator)
        reduce_in_float32(self.accelerator)
        if self.is_fsdp_enabled:
            forget_absent_layers(base_model_of(self.model))
        if self.args.fp16:
            install_loss_scaler(self.accelerator)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None, **added: Any) -> Any:
        if training:
            self._keeper.optimizer.identity()
        model = super()._wrap_model(model, training, dataloader, **added)
        return replicate(self.accelerator, model) if training else model

    @property
    def geometry(self) -> BatchGeometry:
        return self._keeper.geometry

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.geometry.global_batch_size

    def get_train_dataloader(self) -> DataLoader:
        dataset = self.train_dataset
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Training")
        return self._rollouts.training_loader(dataset, bool(self.shuffle_dataset))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """One item, the whole evaluation set, cut into micro-batches like a training step."""
        dataset = self._view.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self._view.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if dataset is None:
            raise ConfigError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate().")
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="Evaluation")
        slices = self._rollouts.slices(self.num_generations_eval)
        return make_eval_loader(dataset, slices, self.args.per_device_eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self.get_eval_dataloader(test_dataset)

    # ---- One optimizer step ---------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Sample or select the completions, run their micro-batches, log; the loss of the step, on every process."""
        start = time.perf_counter()
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        attempt = self._step_planner.add_gradients(model, self._prepare_inputs(inputs), self._with_events)
        values = log_values(attempt.plan, attempt.step.metrics, self._clock.pop_seconds())
        loss = self._log_step(values)
        attempt.end(loss)
        self._keeper.note_step(loss, values, attempt.step.counts, len(attempt.plan.rows))
        self._step += 1
        if (steps := self.args.torch_empty_cache_steps) is not None and self.state.global_step % steps == 0:
            clear_device_cache()
        self._metrics["train"]["step_time"].append(time.perf_counter() - start)
        return torch.tensor(loss, device=self.accelerator.device)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers' method, and checked; the trail of the run has the norm of every step."""
        norm = super()._get_grad_norm(*args, **kwargs)
        self._step_planner.check_gradient(self._keeper.note_norm(norm, self._get_learning_rate()))
        return norm

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Loss of the whole evaluation set, on every process."""
        with torch.no_grad(), pinned(self.args.pinned_threads), self._clock.stopped():
            completions = self._prepare_inputs(inputs)
            for attempt in self._step_planner.attempts(self.model, completions):
                with attempt.running():
                    attempt.measure(self.model)
                    for micro_batch in self._with_events(attempt.micro_batches()):
                        attempt.run(micro_batch)
            loss = self._log_step(attempt.step.metrics.reduce())
            return torch.tensor(loss, device=self.accelerator.device), None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **added: Any,
    ) -> Any:
        """Like transformers' method, with pass@k and mean@k of the whole set, under its prefix; for `predict` too."""
        with self._keeper.saving_on_failure(lambda: self._save_checkpoint(self.model, None)):
            output: Any = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix, **added
            )
        pass_metrics = self._pass_at_k.metrics(self.num_generations_eval) if len(dataloader) else {}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in pass_metrics.items()})
        return output

    @hide_frames
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)

    @hide_frames
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers' method. Its metrics are not logged, so they are cleared before the next evaluation."""
        output = super().predict(*args, **kwargs)
        self._metrics["eval"].clear()
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Rows of the loader -> the `RolloutBatch` of this optimizer step, the same on every process."""
        self._forwards.choose_forms(self._view.models)
        rows = StepRows.checked(generation_batch)
        if self.model.training:
            return self._rollouts.completions_of(rows)
        scored = self._rollouts.make(rows)
        self._pass_at_k.observe(scored.rewards_BF, scored.settings.rule.weights_F, scored.settings.functions.names)
        return scored.batch

    def _with_events(self, micro_batches: Iterator[LossInputs]) -> Iterator[LossInputs]:
        """Between two micro-batches, the event of callbacks; to transformers' loop the step is one batch."""
        event = "on_substep_end" if self.model.training else "on_prediction_step"
        for number, micro_batch in enumerate(micro_batches):
            if number:
                self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)
            yield micro_batch

    def _log_step(self, values: dict[str, float]) -> float:
        """Log the values of a step, and move TRL's entropy controller; returns the loss."""
        loss, entropy = values.pop("loss", math.nan), values.pop("bonus_entropy", math.nan)
        if self._entropy_bonus_enabled and self.model.training:
            if self.use_adaptive_entropy:
                self._last_world_entropy = 0.0 if math.isnan(entropy) else entropy
                self.entropy_coef = next_entropy_coefficient(self._view)
            values = {"entropy_coef": self.entropy_coef} | values
        # the loss too: transformers would log a float32 mean over processes
        for name, value in (values | {"loss": loss}).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        return loss

    def _loss_of(self, model: Any, micro_batch: LossInputs) -> torch.Tensor:
        """A micro-batch's part of the loss of the step, through a user's overrides where there are any."""
        if micro_batch.padded:
            options = {"num_items_in_batch": None} if self.model.training else {}  # as transformers calls it
            inputs, sizes = self._loss_overrides.dictionary(micro_batch), micro_batch.sizes(self.args)
            accumulation = {"current_gradient_accumulation_steps": micro_batch.accumulation_steps}
            with temporarily_set_each([(self, accumulation), (self.args, sizes)]), self.compute_loss_context_manager():
                return micro_batch.add_loss(self.compute_loss(model, inputs, **options))
        with self.compute_loss_context_manager(), compat.profiling_context(self, "compute_loss"):
            run, router = self._forwards.micro_batch_log_probs, self.aux_loss_enabled
            scores = run(model, micro_batch.rows, router, micro_batch.padded)
            return micro_batch.add_loss(assemble_loss(loss_config_of(self._view), micro_batch, scores))

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """What a dictionary adds to the loss of the step, as in TRL; outside a step it is a whole step."""
        return self._loss_overrides.loss(model, inputs)

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float, **added: Any) -> torch.Tensor:
        of_step = (known := vars(self).get("_loss_overrides")) and known.entropy_mask(entropies, mask, threshold)
        return super().get_high_entropy_mask(entropies, mask, threshold, **added) if of_step is None else of_step

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
        has_images = any(value is not None for value in images.values())
        given: Any = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
        if (scores := self._loss_overrides.log_probs(has_images, *given)) is None:
            return super()._get_per_token_logps_and_entropies(*given, **images)
        compat.refuse_unknown(images)
        return tuple(None if part is None else part.to(input_ids.device) for part in scores)

    # ---- Sampling: TRL's methods, for users who override or call them ---------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return self._trl_methods.score(inputs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        return self._trl_methods.rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample by this trainer's engine for the rows of `multimodal_fields`, else by TRL's method."""
        if (sampled := self._trl_methods.turn(prompt_ids, images, multimodal_fields)) is not None:
            return sampled
        given = (prompt_ids, images, without_rows(multimodal_fields), num_generations, *args)
        with without_router_logits(self.model.config):
            return compat.values_of("_generate_single_turn", super()._generate_single_turn(*given, **kwargs))

    def generate(self, prompts: list[Any]) -> dict[str, Any]:
        """Sample one completion for each prompt, a text or messages, by this trainer's engine and keys, without tools.

        Returns what a `rollout_func` may return: `prompt_ids`, `completion_ids`, `logprobs` (None where the engine has
        none) and `env_mask`, lists for each prompt; with `sampling_mask="replay"` also `kept_ids`, for each token.
        """
        return self._trl_methods.generate(prompts)

    # ---- Keeping the run ------------------------------------------------------------------------------------------

    @hide_frames
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
        **added: Any,
    ) -> Any:
        """Train; logs the plan once. Arguments and result are those of `transformers.Trainer.train`.

        `resume_from_checkpoint` may also be "latest", as True: the newest complete checkpoint of the newest run of
        `output_dir`; or "auto": the same where there is one, and else a new run. An `output_dir` that holds checkpoints
        of another run, or later ones, is left alone: with a warning, this run writes beside it.

        Raises:
            CheckpointError: there is no complete checkpoint to resume from, or it belongs to another run.
            TrainingInterrupted: a `SystemExit` with status 75, after SIGTERM or Ctrl-C, with the checkpoint written.
        """
        refuse_frozen(self.model)
        with contextlib.ExitStack() as ending:
            ending.callback(self._keeper.release_folder)
            ending.callback(self._rollouts.worker.rewards.kill_workers)
            checkpoint = self._keeper.begin(resume_from_checkpoint)
            threads, sampling_threads = divide_threads(self.args, self.accelerator.device)
            self._rollouts.begin(sampling_threads)
            warn_before_training(self._view, self._rollouts, self._uncovered)
            dropout = keyed_dropout(base_model_of(self.model), strict=not self.args.allow_split_dependent)
            with pinned(self.args.pinned_threads), computing_with(threads), dropout:
                if not self._forwards.sharded:  # else the loop prepares the models first
                    self._forwards.choose_forms(self._view.models)
                with self._keeper.running(checkpoint), contextlib.closing(self._rollouts):
                    return super().train(checkpoint, trial, ignore_keys_for_eval, **added)

    @hide_frames
    def rerun(
        self, step: int, *, gradients: bool = False, call_rewards: bool = False, cases: Sequence[Case] = ()
    ) -> Rerun:
        """Run a step of the run in `output_dir` again, instead of `train()`; see `run.rerun`, and `run.cases`."""
        return run_again(self._view, step, gradients, call_rewards, cases)

    def log(self, logs: dict[str, float], start_time: float | None = None, **added: Any) -> None:
        """Like TRL's method, with the loss scale, and the loss of the whole run summed exactly at its end."""
        logs |= self._keeper.values_for(logs)
        with completions_logged(self._view, logs):
            super().log(logs, start_time, **added)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Like transformers' method, without its warning of another micro-batch size."""
        size = (self._keeper.resumed.train_batch_size or self.args.train_batch_size) // max(1, self.args.n_gpu)
        with temporarily_set(self.args, per_device_train_batch_size=size):
            return super()._init_training_state(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Like transformers' method, which would train on where a finished run is resumed."""
        if self._keeper.has_steps_left():
            super()._run_epoch(*args, **kwargs)
            self._keeper.refuse_bad_weights()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Like transformers' method, but keeps the checkpoint that an interrupted run resumes from."""
        limit = None if self._keeper.watch.stopping else self.args.save_total_limit
        with temporarily_set(self.args, save_total_limit=limit):
            return super()._finalize_training(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None, **added: Any) -> None:
        with dtypes_kept(self.model):
            self._loads_from = resume_from_checkpoint
            super()._load_from_checkpoint(resume_from_checkpoint, model, **added)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None, **added: Any) -> None:
        changes = self._keeper.compare()  # `create_optimizer` may have built them since the checkpoint was read
        self._keeper.optimizer.load(partial(super()._load_optimizer_and_scheduler, checkpoint, **added), changes)

    def _load_best_model(self, **added: Any) -> None:
        self._loads_from = str(self.state.best_model_checkpoint)
        with dtypes_kept(self.model):
            super()._load_best_model(**added)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        load_renamed(self.model, self._loads_from, load_result.missing_keys)

    def _save_checkpoint(self, model: Any, trial: Any, **added: Any) -> None:
        final, push = self._checkpoint_folder(trial), self.args.push_to_hub
        if self._keeper.has_saved(final):  # a callback asks for it once more
            return
        if self.is_fsdp_enabled:
            fill_missing_state(self.optimizer)
        with self._keeper.saving(final), temporarily_set(self.args, push_to_hub=False):
            super()._save_checkpoint(model, trial, **added)
        if push:  # once the checkpoint has its final name
            self._push_from_checkpoint(str(final))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            complete_card(self._view, self._keeper.writing_to and self._checkpoint_folder(None).name)

    def _get_output_dir(self, trial: Any, **added: Any) -> str:
        """While a checkpoint is written, the folder in which it becomes complete."""
        return self._keeper.writing_to or super()._get_output_dir(trial, **added)

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

"""`SamplingTrainer`: TRL's GRPO trainer with rollouts that are the same on every number of processes.

Differs from TRL: completions are sampled by key in chunks cut by global order, rewards and advantages are computed over
the whole rollout batch on every process, and groups that teach nothing may be replaced (dynamic sampling).
`ResumableTrainer` and `GRPOTrainer` build on it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import trl
from accelerate.logging import get_logger

from .algorithms.advantages import depends_on_the_batch, estimated_advantages, group_advantages, groups_without_variance
from .algorithms.dynamic_sampling import fill_places
from .algorithms.exact import exact_mean
from .algorithms.keyed_random import EVAL_STREAM, TRAIN_STREAM
from .batching.prompt_order import Reserve, RolloutRequest, ShareRule, StepRows
from .compat import profiling_context, unwrapped_for_generation
from .config import GRPOConfig
from .errors import ConfigError, PrecisionError
from .forward.adapters import is_prompt_learning
from .precision.non_finite import FirstModule, bad_weight, explanation
from .rewards.calls import ShareCalls, add_columns, columns_of, gather_calls, metrics_of
from .rewards.guard import STRICT, check_reward_functions
from .runtime.clock import PhaseClock
from .runtime.collectives import (
    first_of_all_processes,
    max_over_processes,
    ragged_gather,
    ragged_scoring,
    shards_parameters,
)
from .runtime.out_of_memory import Halving
from .sampling.chunks import RowIdentity, ShareSampling
from .sampling.decoding import own_generate, why_not_compact, without_router_logits
from .sampling.generation import can_sample_by_key, request_keys, sample_chunk
from .sampling.rollout import Rollout, gather_rollout
from .sampling.rounds import Round, assemble, log_values
from .sampling.vllm_seeds import completion_seeds, sampling_metrics, seeded

logger = get_logger(__name__)


class SamplingTrainer(trl.GRPOTrainer):
    """See the module; the attributes are set by `GRPOTrainer` while it is built."""

    args: GRPOConfig  # the loop's copy: see GRPOConfig.for_loop
    model: Any
    geometry: Any
    num_generations: int
    num_generations_eval: int
    pad_to_multiple_of: Any
    _stock: bool
    _clock: PhaseClock
    _sampling_memory: Halving

    def _begin_sampling(self) -> None:
        """What the rest of the class needs before TRL's constructor."""
        self._rollout: Rollout | None = None
        self._rollout_name: tuple[int, int] | None = None  # epoch and index of the rollout batch that is held
        self._request: RolloutRequest | None = None
        self._identity: RowIdentity | None = None
        self._rewards_BF = torch.zeros(0)  # of the rollout batch that was scored last, all processes
        self._reserve: Reserve | None = None
        self._faults = STRICT
        self._logged: dict[str, list[float]] = {}  # what the reward functions logged of it, every value
        self._said_columns: set[tuple[str, str]] = set()

    @property
    def _sharded(self) -> bool:
        return shards_parameters(self.accelerator)

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _samples_by_key(self) -> bool:
        if self._stock or self.use_vllm or self.use_transformers_continuous_batching:
            return False
        return self._own_generate is None and can_sample_by_key(self.generation_config)

    @property
    def _own_generate(self) -> str | None:
        """The name of a `generate` of the model's own, which may be replaced at any time."""
        return own_generate(self.accelerator.unwrap_model(self.model))

    @property
    def _checkpointing_kwargs(self) -> Any:
        return self.args.gradient_checkpointing_kwargs

    def _share_rule(self, num_generations: int) -> ShareRule:
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        # an inference server batches by itself, and needs equal shares: there a chunk is one group
        chunk = num_generations if self.use_vllm else self.geometry.rollout_chunk_size
        return ShareRule(num_generations, chunk, processes, rank)

    # ---- Rollouts -------------------------------------------------------------------------------------------------

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        turn = super()._generate_single_turn
        stock = functools.partial(turn, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        if self._request is None or self.use_transformers_continuous_batching:
            with without_router_logits(self.model.config):
                return stock()
        request, identity = self._request, self._identity
        rows = list(range(len(prompt_ids))) if identity is None else identity.match(prompt_ids)
        with self._clock.phase("rollout"), without_router_logits(self.model.config):
            if self._seeds_vllm():
                if identity is None:
                    self._refuse_unequal_shares(0 if request.ghost else len(rows))
                keys = self._keys(request)[torch.tensor(rows)]
                index = torch.tensor(rows)
                offsets = torch.zeros_like(index) if identity is None else identity.offsets(index, prompt_ids)
                seeds = completion_seeds(keys, offsets, request.num_generations)
                with seeded(self.vllm_generation, seeds, num_generations):
                    completions, logps = stock()
            elif self._samples_by_key():
                completions, logps = self._sample_rows(request, prompt_ids, rows), None
            else:

                def sample(part: list[int]) -> list[list[int]]:
                    fields = {
                        name: values[part] if isinstance(values, torch.Tensor) else [values[i] for i in part]
                        for name, values in multimodal_fields.items()
                    }
                    return turn([prompt_ids[i] for i in part], images, fields, num_generations, *args, **kwargs)[0]

                share, logps = self._share_sampling(request), None
                completions = share.chunk_by_chunk(sample, prompt_ids, rows, self._tokenizer.eos_token_id)
        if identity is None:
            self._identity = RowIdentity(prompt_ids, completions)
        else:
            identity.extend(rows, prompt_ids, completions)
        return completions, logps

    def _refuse_unequal_shares(self, rows: int) -> None:
        """Where TRL cuts what several processes sampled together, it does so as if all had as many rows.

        Raises:
            ConfigError: on every process.
        """
        device = self.accelerator.device
        most, fewest = max_over_processes(rows, device), -max_over_processes(-rows, device)
        together = self.vllm_generation.mode == "server" or self.vllm_generation.tensor_parallel_size > 1
        if together and most != fewest:
            raise ConfigError(
                "with a vLLM server or tensor parallel engines every process needs as many prompts, and here they have "
                f"{fewest} to {most} completions; use a number of prompts (also for evaluation) that "
                f"{self.accelerator.num_processes} processes share evenly."
            )

    def _seeds_vllm(self) -> bool:
        return self.use_vllm and not self._stock

    def _keys(self, request: RolloutRequest) -> torch.Tensor:
        return request_keys(request, self.args.seed, TRAIN_STREAM if self.model.training else EVAL_STREAM)

    def _share_sampling(self, request: RolloutRequest) -> ShareSampling:
        def calls(own: int) -> int:  # where generate is a collective, every process makes the same number of calls
            return max_over_processes(own, self.accelerator.device) if self._sharded else own

        # virtual tokens stand before the padding, so there is none
        alike = is_prompt_learning(self.accelerator.unwrap_model(self.model))
        chunk = self.geometry.rollout_chunk_size
        return ShareSampling(request, self._identity, self._keys(request), chunk, calls, alike)

    def _sample_rows(self, request: RolloutRequest, prompt_ids: Any, rows: list[int]) -> list[list[int]]:
        def sample(model: Any, prompts: Any, keys: torch.Tensor, offsets: torch.Tensor) -> list[list[int]]:
            config, eos, device = self.generation_config, self.eos_token_ids, self.accelerator.device
            compact = self.args.compact_rollouts and not self._sharded
            compact = compact and why_not_compact(model, config) is None
            multiple = None if share.alike else self.pad_to_multiple_of
            chunk = (prompts, keys, offsets, config, eos, device, multiple, compact)
            try:
                return sample_chunk(model, *chunk)
            except PrecisionError as error:
                if self._sharded:  # the other processes would not come along
                    raise
                first = FirstModule()
                with first.watching(model), contextlib.suppress(PrecisionError):
                    sample_chunk(model, *chunk)
                raise PrecisionError(
                    f"{error}: {explanation(bad_weight(model), first.name, self.args.fp16)}."
                ) from None

        share = self._share_sampling(request)

        def fitting(model: Any, prompts: Any, keys: torch.Tensor, offsets: torch.Tensor) -> list[list[int]]:
            def work(part: Sequence[int]) -> list[list[int]]:
                index = torch.tensor(part)
                return sample(model, [prompts[i] for i in part], keys[index], offsets[index])

            return [row for piece in self._sampling_memory.run(range(len(prompts)), work) for row in piece]

        found: list[list[int]] = []
        failure = None
        try:
            with self._generating() as model:
                eos = self._tokenizer.eos_token_id
                found = share.run(lambda *chunk: fitting(model, *chunk), prompt_ids, rows, eos)
        except PrecisionError as error:
            failure = str(error)
        if self._identity is None:  # every process comes here once: none waits for one that failed
            failure = first_of_all_processes(failure)
        if failure is not None:
            raise PrecisionError(failure)
        return found

    @contextlib.contextmanager
    def _generating(self) -> Iterator[Any]:
        # the same contexts as TRL's transformers branch: unwrapped, without gradients, parameters gathered
        with (
            profiling_context(self, "transformers.generate"),
            unwrapped_for_generation(
                self.model_wrapped,
                self.accelerator,
                self._checkpointing_kwargs,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._request is None or self._stock:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._request.ghost:
            return ragged_gather(torch.zeros(0, len(self.reward_funcs), device=self.accelerator.device))
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's scoring of this process's share, with this share's part of the advantages of the whole rollout batch.

        The rewards are those that reach TRL's own code, so a subclass may shape them in `_calculate_rewards`.
        """
        if self._stock or not isinstance(inputs, StepRows):
            with self._checked_rewards(None):
                return super()._generate_and_score_completions(inputs)
        request, rewards = inputs.request, []
        first = request.share.start * request.num_generations
        calls = self._share_calls(request, first)
        calculate = self._calculate_rewards

        def remember(*args: Any) -> torch.Tensor:
            rewards.append(calculate(*args))
            return rewards[-1]

        self._request, self._identity = request, None
        try:
            with (
                ragged_scoring(self.accelerator, request.ghost),
                mock.patch.object(self, "_calculate_rewards", remember),
                self._checked_rewards(calls),
                self._columns_apart() as columns,
            ):
                scored = super()._generate_and_score_completions(list(inputs))
        finally:
            self._request, self._identity = None, None
        self._rewards_BF = rewards[-1]
        self._log_calls(calls, columns, len(self._rewards_BF))
        advantages = self._advantages(rewards[-1], request.num_generations)
        if self.args.advantage_estimator is not None:
            shown: Any = self._logs["advantages"]  # TRL's own, as far as the table holds them
            for _ in range(min(len(shown), len(advantages))):
                shown.pop()
            shown.extend(advantages.tolist())
        # TRL cuts its slice as if all shares were equal
        scored["advantages"] = advantages[first : first + len(inputs)]
        return scored

    def _share_calls(self, request: RolloutRequest, first: int) -> ShareCalls:
        # vLLM's shares are as many for every process, and no whole chunks
        group = request.num_generations
        chunk = None if self.use_vllm else max(1, self.geometry.rollout_chunk_size // group) * group
        return ShareCalls(first, chunk)

    @contextlib.contextmanager
    def _checked_rewards(self, calls: ShareCalls | None) -> Iterator[None]:
        """Inside, reward functions are checked and called by chunks; outside they are the user's own objects."""
        functions = self.reward_funcs
        self.reward_funcs = check_reward_functions(functions, self.reward_func_names, self._faults, calls)
        try:
            yield
        finally:
            self.reward_funcs = functions

    @contextlib.contextmanager
    def _columns_apart(self) -> Iterator[dict[str, list[Any]]]:
        """What is added to the completions table inside, besides what the reward functions' calls keep."""
        kept: Any = self._logs["extra"]
        inside: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
        self._logs["extra"] = inside
        try:
            yield inside
        finally:
            self._logs["extra"] = kept

    def _log_calls(self, calls: ShareCalls, columns: dict[str, list[Any]], rows: int) -> None:
        """Put what the reward functions of all processes logged where TRL's log and table look for it."""
        made = gather_calls(calls.made)
        self._logged = metrics_of(made)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in self._logged.items():
            metrics[name].append(exact_mean(values))
        table: Any = self._logs
        add_columns(table["extra"], columns | columns_of(made, rows, self._said_columns), rows, len(table["prompt"]))

    def _advantages(self, rewards_BF: torch.Tensor, num_generations: int) -> torch.Tensor:
        weights_F = self.reward_weights.to(rewards_BF.device)
        if self.args.advantage_estimator is not None:
            return estimated_advantages(self.args.advantage_estimator, rewards_BF, weights_F, num_generations)
        modes = (self.scale_rewards, self.multi_objective_aggregation)
        return group_advantages(rewards_BF, weights_F, num_generations, *modes)

    def _score_round(self, rows: StepRows) -> Rollout:
        """Sample and score these rows of every process."""
        scored = self._generate_and_score_completions(rows)
        own = 0 if rows.request.ghost else len(rows)
        rollout = gather_rollout(scored, own, rows.request.num_generations)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self._sampling_metrics([rollout]).items():
            metrics[name][-1:] = [value]  # TRL's is a mean of the processes' means, and 0 for one without tokens
        return rollout

    def _sampling_metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        if not self.use_vllm:
            return {}
        return sampling_metrics(rollouts, self.vllm_importance_sampling_mode.startswith("sequence"))

    def _sample_rollout(self, rows: StepRows) -> Rollout:
        """The rollout batch of these rows; with dynamic sampling, groups without variance replaced."""
        if self._reserve is None or not self.model.training:
            rollout = self._score_round(rows)
            self._warn_if_unscored(self._rewards_BF)
            return rollout
        request, reserve, group = rows.request, self._reserve, rows.request.num_generations
        weights_F = self.reward_weights.to(self._rewards_BF.device)
        rounds: list[Round] = []
        teaches: list[list[bool]] = []
        more: StepRows | None = rows
        places: list[tuple[int, int]] = []
        free = taken = 0
        while more is not None and len(rounds) <= self.args.dynamic_sampling_max_rounds:
            with self._metrics_apart() as metrics:
                rollout = self._score_round(more)
            logged = {name: values[-1] for name, values in metrics.items()}
            rounds.append(Round(rollout, self._rewards_BF, logged, self._logged))
            dull = groups_without_variance(self._rewards_BF, weights_F, group, self.multi_objective_aggregation)
            teaches.append([not value for value in dull.tolist()])
            taken += len(dull) if len(rounds) > 1 else 0
            places, free = fill_places(teaches)
            more = reserve.rows(request, taken, free) if free else None
        values = log_values(rounds, places, free, weights_F, self.reward_func_names, group)
        values |= self._sampling_metrics([part.rollout for part in rounds])
        for name, value in values.items():
            if name == "num_tokens":
                self._metrics["train"][name] = [value]
            else:
                self._metrics["train"][name].append(value)
        rollout, rewards_BF = assemble(rounds, places, group)
        if len(rounds) > 1 and self._advantages_of_batch():
            rollout.fields["advantages"] = list(self._advantages(rewards_BF, group).cpu().view(-1, 1))
        self._warn_if_unscored(rewards_BF)
        return rollout

    def _advantages_of_batch(self) -> bool:
        modes = (self.scale_rewards, self.multi_objective_aggregation)
        return depends_on_the_batch(self.args.advantage_estimator, *modes)

    def _warn_if_unscored(self, rewards_BF: torch.Tensor) -> None:
        if torch.isnan(rewards_BF).all():
            names = ", ".join(self.reward_func_names)
            logger.warning(
                f"No completion of this rollout was scored: {names} returned None for all of them, so nothing is"
                " learned from it; check that the reward functions fit the data."
            )

    def _check_dynamic_sampling(self) -> None:
        """Refuse dynamic sampling where there is nothing to draw from, or where it would undo a subclass's work.

        Raises:
            ConfigError: on every process.
        """
        dataset: Any = self.train_dataset
        rows, prompts = len(dataset), self.geometry.prompts_per_rollout
        if rows <= prompts:
            raise ConfigError(
                f"dynamic_sampling=True draws further prompts from the rest of the training set, which has {rows} and "
                f"a rollout batch takes {prompts}; use more prompts, or a smaller rollout_batch_size."
            )
        own = type(self)._generate_and_score_completions is not SamplingTrainer._generate_and_score_completions
        if own and self._advantages_of_batch():
            raise ConfigError(
                f"dynamic_sampling=True computes advantages over the batch once it is full, and {type(self).__name__} "
                "overrides _generate_and_score_completions, whose advantages would be lost; use an estimator that "
                "looks at one group at a time (the default does)."
            )

    @contextlib.contextmanager
    def _metrics_apart(self) -> Iterator[dict[str, list[float]]]:
        """What is logged of training inside, kept out of the log."""
        kept: Any = self._metrics["train"]
        inside: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        self._metrics["train"] = inside
        try:
            yield inside
        finally:
            self._metrics["train"] = kept

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Rows of the loader -> the completions of this optimizer step, the same on every process (a `Rollout`)."""
        if self._stock:
            return super()._prepare_inputs(generation_batch)
        if not isinstance(generation_batch, StepRows):
            raise ConfigError(
                f"the loader gave a {type(generation_batch).__name__}, but steps are read as StepRows; a subclass that "
                "overrides get_train_dataloader or get_eval_dataloader should change the data set instead."
            )
        request = generation_batch.request
        name = (request.epoch, request.layout.rollout)
        if self.model.training and self._rollout is not None and self._rollout_name == name:
            rollout = self._rollout
        else:
            rollout = self._sample_rollout(generation_batch)
        if not self.model.training:
            return rollout
        self._rollout, self._rollout_name = rollout, name
        return rollout.select(request.layout.step_rows)

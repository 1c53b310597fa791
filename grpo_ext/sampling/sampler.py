"""The rollout batch: this process's prompts are sampled and scored by TRL, and what all processes have is gathered.

Differs from TRL: completions are sampled by key in chunks cut by global order, rewards and advantages are computed over
the whole rollout batch on every process, and groups that teach nothing may be replaced (dynamic sampling). TRL's
scoring calls back for generation and rewards; what those calls have to know stands in `RolloutSampler.call`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import GenerationConfig

from ..algorithms.advantages import AdvantageRule, groups_without_variance
from ..algorithms.dynamic_sampling import fill_places
from ..algorithms.exact import exact_mean
from ..algorithms.keyed_random import EVAL_STREAM, TRAIN_STREAM
from ..batching.prompt_order import FurtherPrompts, ProcessSlices, RolloutRequest, StepRows
from ..batching.sizes import BatchGeometry
from ..compat import on_view
from ..config import GRPOConfig
from ..errors import ConfigError, DataError, PrecisionError
from ..forward.adapters import is_prompt_learning
from ..forward.images import (
    PromptProcessor,
    RowImages,
    WithoutImages,
    count_images,
    images_of,
    messages_of,
)
from ..precision.non_finite import FirstModule, bad_weight, explanation
from ..rewards.calls import RewardCalls, add_columns, columns_of, gather_calls, metrics_of
from ..rewards.guard import Faults, check_reward_functions
from ..runtime.collectives import (
    any_process,
    first_of_all_processes,
    max_over_processes,
    ragged_gather,
    ragged_scoring,
    shards_parameters,
)
from ..runtime.out_of_memory import Halving
from .chunks import ChunkedGeneration, RowTokens, rows_continued
from .decoding import own_generate, why_not_compact
from .generation import can_sample_by_key, request_keys, sample_chunk
from .rollout import ROW_IMAGES, ROW_NUMBER, Rollout, gather_parts, gather_rollout, padded
from .rounds import Round, assemble, log_values
from .shown_images import ShownImages, rows_of_packed
from .vllm_seeds import completion_seeds, sampling_metrics, seeded

logger = get_logger(__name__)
Metrics = MutableMapping[str, list[float]]  # TRL's record of training or of evaluation


@dataclass(frozen=True)
class RewardSettings:
    """What rewards become.

    Attributes:
        names, weights_F: of the reward functions.
        rule: from rewards to advantages.
    """

    names: list[str]
    weights_F: torch.Tensor
    rule: AdvantageRule


@dataclass(frozen=True)
class Generation:
    """How TRL was told to generate.

    Attributes:
        model: the policy, as PEFT wraps it; training: whether it trains, or evaluates.
        generating: the contexts of TRL's generation with transformers; gives the model.
        config: transformers' settings, without vLLM; vllm: TRL's `VLLMGeneration`, with it.
        eos_token_ids: any of these ends a completion.
        filler: the token of rows that no result contains.
    """

    model: Any
    training: bool
    generating: Callable[[], contextlib.AbstractContextManager[Any]]
    config: GenerationConfig | None
    vllm: Any
    eos_token_ids: Sequence[int]
    filler: int
    pad_to_multiple_of: int | None


@dataclass
class ScoringCall:
    """One call of TRL's scoring.

    Attributes:
        request: what this process samples.
        calls: how reward functions are called, and what they log.
        read: images of its rows, where they are read from the data set; shown: where tools or environments may show
            some. Neither for a model that takes none.
        prompt_lengths: tokens of each row's prompt; None before the first turn.
        rewards_BF: of all processes; None before they are known.
        logged: what the reward functions of all processes logged, every value.
    """

    request: RolloutRequest
    calls: RewardCalls
    read: RowImages | None = None
    shown: ShownImages | None = None
    prompt_lengths: list[int] | None = None
    rewards_BF: torch.Tensor | None = None
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def images(self) -> RowImages | None:
        """The images of its rows, as far as they have come; None for a model that takes none."""
        return self.read if self.shown is None else self.shown.rows

    def rows_of(self, prompt_ids: Sequence[Sequence[int]]) -> list[int]:
        """Which rows of this process a turn goes on with."""
        return list(range(len(prompt_ids))) if self.prompt_lengths is None else rows_continued(prompt_ids)

    def offsets_of(self, rows: Sequence[int], prompt_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token position of the next token in the completion of each row, tools' tokens counted, int64 (B,)."""
        lengths = self.prompt_lengths
        return torch.tensor([0 if lengths is None else len(ids) - lengths[row] for row, ids in zip(rows, prompt_ids)])

    def remember(self, prompt_ids: Sequence[Sequence[int]], completions: list[list[int]]) -> list[list[int]]:
        """The completions of a turn, by which a later turn knows its rows again."""
        rows = self.rows_of(prompt_ids)
        if self.prompt_lengths is None:
            self.prompt_lengths = [len(ids) for ids in prompt_ids]
        return [RowTokens(row, ids) for row, ids in zip(rows, completions)]


class RolloutSampler:
    """Makes rollout batches and holds the one that is trained on.

    Args:
        args: the loop's configuration.
        geometry: the batch sizes.
        prepare: makes of a row what a model that takes images is given; None for other models.
        travelling: images travel with their rows, as tools or environments may bring some.

    Attributes:
        prompts: the data set of the loader made last, by whether it is for training.
        rollout, rollout_name: the rollout batch that is held; its epoch and its index in the epoch.
        call, checked: TRL's scoring, while it runs, and the reward functions as it calls them.
        last_call: the one that ended last.
        further: prompts for dynamic sampling, once the training loader is made.
        memory: the number of completions that fit into one `generate`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        geometry: BatchGeometry,
        prepare: PromptProcessor | None = None,
        travelling: bool = False,
    ) -> None:
        self.accelerator, self.args, self.geometry = accelerator, args, geometry
        self.prepare, self.travelling = prepare, travelling
        self.prompts: dict[bool, Any] = {}
        self.sharded = shards_parameters(accelerator)
        self.rollout: Rollout | None = None
        self.rollout_name: tuple[int, int] | None = None
        self.call: ScoringCall | None = None
        self.last_call: ScoringCall | None = None
        self.checked: list[Any] | None = None
        self.further: FurtherPrompts | None = None
        self._fetch: Callable[[RolloutRequest], StepRows] | None = None
        remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
        self.memory = Halving("generation", remedy, not (self.sharded or args.bitwise_invariant))
        self.faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
        self._said_columns: set[tuple[str, str]] = set()

    def images(self, fields: Mapping[str, Any], training: bool) -> RowImages | None:
        """The images of completions, from the fields of a rollout; None for a model that takes none."""
        if (prepare := self.prepare) is None:
            return None
        if ROW_IMAGES in fields:
            return rows_of_packed(prepare, fields[ROW_IMAGES])
        if ROW_NUMBER not in fields:  # a batch of the user's own
            return None
        prompts, numbers = self.prompts[training], torch.cat(list(fields[ROW_NUMBER])).tolist()
        return RowImages(numbers, lambda number: prepare(prompts[number]))

    def slices(self, num_generations: int) -> ProcessSlices:
        """How a rollout batch is cut for the processes to sample."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        # an inference server batches by itself, and needs as many from every process: there a chunk is one group
        chunk = num_generations if self.args.use_vllm else self.geometry.rollout_chunk_size
        return ProcessSlices(num_generations, chunk, processes, rank)

    def hold(self, rollout: Rollout | None, name: tuple[int, int] | None) -> None:
        """Go on with a rollout batch that was sampled before; with None, sample anew."""
        self.rollout, self.rollout_name = rollout, name

    def read_from(self, prompts: Any, steps: Any, further: FurtherPrompts | None) -> None:
        """The training data, the loader's data set of steps, and further prompts with dynamic sampling."""
        self.prompts[True], self._fetch, self.further = prompts, getattr(steps, "rows", None), further

    # ---- The rollout batch ----------------------------------------------------------------------------------------

    def completions_of_step(self, rows: StepRows, sample: Callable[[StepRows], Rollout]) -> Rollout:
        """The completions of an optimizer step; its rollout batch is sampled where it is not the one that is held.

        Args:
            rows: of this process; none in a step that does not begin a rollout batch.
            sample: from this process's rows to the rollout batch.
        """
        request = rows.request
        name = (request.epoch, request.layout.rollout)
        if self.rollout is None or self.rollout_name != name:
            if not rows and self._fetch is not None:  # a run that was resumed without its rollout batch
                rows = self._fetch(request)
            self.rollout, self.rollout_name = sample(rows), name
        return self.rollout.select(request.layout.step_rows)

    def sample(
        self,
        rows: StepRows,
        score: Callable[[StepRows], dict[str, Any]],
        metrics: Metrics,
        rewards: RewardSettings,
        replaces: bool = False,
        vllm_level: str | None = None,
    ) -> Rollout:
        """Sample and score these rows of every process; the rollout batch, on every process.

        Args:
            score: TRL's scoring of this process's rows, with a user's overrides.
            metrics: TRL's record, which it writes to.
            replaces: groups without variance are replaced by those of further prompts (dynamic sampling).
            vllm_level: TRL's `vllm_importance_sampling_mode` with vLLM, else None.
        """
        if replaces:
            rollout, rewards_BF = self._sample_in_rounds(rows, score, metrics, rewards, vllm_level)
        else:
            only = self._round(rows, score)
            rollout, rewards_BF = only.rollout, only.rewards_BF
            for name, value in sampling_metrics([rollout], vllm_level).items():
                metrics[name][-1:] = [value]  # TRL's is a mean of the processes' means, and 0 for one without tokens
        if torch.isnan(rewards_BF).all():
            logger.warning(
                f"No completion of this rollout was scored: {', '.join(rewards.names)} returned None for all of them, "
                "so nothing is learned from it; check that the reward functions fit the data."
            )
        return rollout

    def _sample_in_rounds(
        self,
        rows: StepRows,
        score: Callable[[StepRows], dict[str, Any]],
        metrics: Metrics,
        rewards: RewardSettings,
        vllm_level: str | None,
    ) -> tuple[Rollout, torch.Tensor]:
        """Dynamic sampling: the rollout batch and its rewards, logged as one."""
        assert self.further is not None
        request, group, rule = rows.request, rows.request.num_generations, rewards.rule
        weights_F = rewards.weights_F
        rounds: list[Round] = []
        teaches: list[list[bool]] = []
        more: StepRows | None = rows
        places: list[tuple[int, int]] = []
        free = taken = 0
        while more is not None and len(rounds) <= self.args.dynamic_sampling_max_rounds:
            with _apart(metrics) as logged:
                rounds.append(self._round(more, score, logged))
            rewards_BF = rounds[-1].rewards_BF
            dull = groups_without_variance(rewards_BF, weights_F.to(rewards_BF.device), group, rule.aggregation)
            teaches.append([not value for value in dull.tolist()])
            taken += len(dull) if len(rounds) > 1 else 0
            places, free = fill_places(teaches)
            more = self.further.rows(request, taken, free) if free else None
        weights_F = weights_F.to(rounds[0].rewards_BF.device)
        values = log_values(rounds, places, free, weights_F, rewards.names, group)
        values |= sampling_metrics([part.rollout for part in rounds], vllm_level)
        for name, value in values.items():
            metrics[name] = [value] if name == "num_tokens" else [*metrics[name], value]
        rollout, rewards_BF = assemble(rounds, places, group)
        if len(rounds) > 1 and rule.depends_on_the_batch:
            rollout.fields["advantages"] = list(rule.advantages(rewards_BF, weights_F, group).cpu().view(-1, 1))
        return rollout, rewards_BF

    def _round(
        self, rows: StepRows, score: Callable[[StepRows], dict[str, Any]], record: Metrics | None = None
    ) -> Round:
        """One round, of all processes; `record` holds what TRL logs of it."""
        scored, call = score(rows), self.last_call
        assert call is not None
        assert call.rewards_BF is not None
        self.last_call, own, device = None, 0 if rows.request.empty else len(rows), self.accelerator.device
        if call.read is not None:
            scored[ROW_NUMBER] = torch.tensor(call.read.numbers_B, device=device)
        rollout = gather_rollout(scored, own, rows.request.num_generations)
        if call.shown is not None:
            rollout.fields[ROW_IMAGES] = gather_parts([images.to(device) for images in call.shown.packed], own)
        values = {name: found[-1] for name, found in (record or {}).items()}
        return Round(rollout, call.rewards_BF, values, call.logged)

    # ---- TRL's scoring, and what it calls back ---------------------------------------------------------------------

    def score_with_trl(
        self,
        rows: StepRows,
        trl_scoring: Any,
        functions: list[Any],
        calculate_rewards: Callable[..., torch.Tensor],
        metrics: Metrics,
        logs: dict[str, Any],
        rewards: RewardSettings,
    ) -> dict[str, Any]:
        """TRL's scoring of this process's rows, with their part of the advantages of the whole rollout batch.

        Args:
            trl_scoring: TRL's `_generate_and_score_completions`, bound to the trainer.
            functions: the reward functions.
            calculate_rewards: the trainer's, with a user's overrides: a subclass may shape the rewards there.
            metrics, logs: TRL's records, which it writes to.
        """
        request, group = rows.request, rows.request.num_generations
        first = request.prompts.start * group
        # vLLM's are as many for every process, and no whole chunks
        chunk = None if self.args.use_vllm else max(1, self.geometry.rollout_chunk_size // group) * group
        self._refuse_missing_images(rows)
        self.call = call = ScoringCall(request, RewardCalls(first, chunk))
        if (prepare := self.prepare) is not None and self.travelling:
            call.shown = ShownImages(prepare, [images_of(row) for row in rows])
        elif prepare is not None:
            prompts = dict(zip(rows.numbers, rows))
            call.read = RowImages(rows.numbers, lambda number: prepare(prompts[number]))

        def remember(*args: Any) -> torch.Tensor:
            call.rewards_BF = calculate_rewards(*args)
            return call.rewards_BF

        # TRL computes advantages within a process's rows, and cuts them as if all processes had as many
        own_logs = {**logs, "advantages": deque(), "extra": defaultdict(list)}
        try:
            with (
                ragged_scoring(self.accelerator, request.empty),
                self.checking(functions, rewards.names, call.calls),
            ):
                seen = {"_calculate_rewards": remember, "_logs": own_logs}
                if self.prepare is not None:
                    seen["processing_class"] = WithoutImages(self.prepare.processor, {})
                scored = on_view(trl_scoring, seen, list(rows))
        finally:
            self.call = None
        assert call.rewards_BF is not None
        self.last_call = call
        self._log_calls(call, own_logs["extra"], len(call.rewards_BF), metrics, logs)
        weights_F = rewards.weights_F.to(call.rewards_BF.device)
        advantages = rewards.rule.advantages(call.rewards_BF, weights_F, group)
        shown = advantages if rewards.rule.estimator is not None else own_logs["advantages"]
        logs["advantages"].extend(shown.tolist() if isinstance(shown, torch.Tensor) else shown)
        scored["advantages"] = advantages[first : first + len(rows)]
        return scored

    def _refuse_missing_images(self, rows: StepRows) -> None:
        """Where a forward is a collective, all run what a model has for images, or none does.

        Raises:
            DataError: on every process.
        """
        if self.prepare is None or not self.sharded:
            return
        device, prompts = self.accelerator.device, dict(zip(rows.numbers, rows)).values()
        counts = [count_images(messages_of(row)) if isinstance(row["prompt"], list) else 0 for row in prompts]
        if any_process(any(counts), device) and any_process(not all(counts), device):
            raise DataError(
                "prompts with and without images are in one rollout batch of a model whose weights the processes share "
                "(FSDP, DeepSpeed), where every process has to run the image tower in every forward or none; give each "
                "prompt an image, or train with DDP."
            )

    def _log_calls(
        self, call: ScoringCall, columns: dict[str, list[Any]], rows: int, metrics: Metrics, logs: dict[str, Any]
    ) -> None:
        """Put what the reward functions of all processes logged where TRL's log and table look for it."""
        made = gather_calls(call.calls.made)
        call.logged = metrics_of(made)
        for name, values in call.logged.items():
            metrics[name].append(exact_mean(values))
        add_columns(logs["extra"], columns | columns_of(made, rows, self._said_columns), rows, len(logs["prompt"]))

    @contextlib.contextmanager
    def checking(self, functions: list[Any], names: list[str], calls: RewardCalls | None = None) -> Iterator[None]:
        """Inside, `checked` are the reward functions, checked, and called as `calls` has it."""
        self.checked = check_reward_functions(functions, names, self.faults, calls)
        try:
            yield
        finally:
            self.checked = None

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, generation and scoring are the user's own, and no part of the rollout batch."""
        call, self.call = self.call, None
        try:
            yield
        finally:
            self.call = call

    def no_rewards(self, functions: int) -> torch.Tensor:
        """The rewards (B, F) of all processes, on one without prompts."""
        return ragged_gather(torch.zeros(0, functions, device=self.accelerator.device))

    @property
    def why_equal(self) -> str | None:
        """Why processes need as many prompts to generate together, as the rest of a sentence; None if they do not."""
        return "a forward of a sharded model is a collective" if self.sharded else self.why_vllm_equal

    @property
    def why_vllm_equal(self) -> str | None:
        """The same of vLLM alone, in every turn."""
        args = self.args
        if args.use_vllm and (args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1):
            return "vLLM cuts what several processes sampled together as if all had as many"
        return None

    # ---- Generation of one turn -----------------------------------------------------------------------------------

    def samples_by_key(self, how: Generation) -> bool:
        """Whether the random number of every token follows from its key."""
        plain = how.vllm is None and how.config is not None and can_sample_by_key(how.config)
        return plain and own_generate(how.model) is None

    def generate(
        self, trl_turn: Any, how: Generation, prompt_ids: list[list[int]], fields: tuple[Any, ...], options: Any
    ) -> tuple[list[list[int]], Any]:
        """The new token ids of each row of a turn, and their log-probabilities where vLLM tells them.

        Args:
            trl_turn: TRL's `_generate_single_turn`, bound to the trainer.
            fields, options: what follows the prompts in its arguments.
        """
        call = self.call
        assert call is not None
        logps, own = None, call.rows_of(prompt_ids)
        if call.shown is not None and fields[0] is not None:
            call.shown.so_far(fields[0], own)
        if how.vllm is not None:
            seen = {"vllm_generation": self._with_seeds(call, how, prompt_ids, fields[2])}
            plain = [list(ids) for ids in prompt_ids]  # they are sent to other processes
            completions, logps = on_view(trl_turn, seen, plain, *fields, **options)
        elif self.samples_by_key(how):
            completions = self.by_key(call, how, prompt_ids)
        else:
            images, _, *rest = fields

            def generate(rows: list[int]) -> list[list[int]]:
                prompts, part = [prompt_ids[i] for i in rows], {}
                if call.images is not None:
                    tokens = [torch.tensor(row) for row in prompts]
                    ids = padded(tokens, how.filler, "left", how.pad_to_multiple_of).to(self.accelerator.device)
                    chosen = [own[i] for i in rows]
                    part = call.images.of(chosen).inputs(range(len(rows)), ids, list(map(len, prompts)), ids.size(1))
                # which makes TRL add types of tokens, which `part` has
                told = {name: value for name, value in options.items() if name != "has_tool_images"}
                return trl_turn(prompts, images, part, *rest, **told)[0]

            completions = self._chunked(call, how).plan(prompt_ids, own).run(generate, how.filler)
        return call.remember(prompt_ids, completions), logps

    def by_key(self, call: ScoringCall, how: Generation, prompt_ids: list[list[int]]) -> list[list[int]]:
        """New token ids of each row, sampled by key.

        Raises:
            PrecisionError: on every process, where the model's scores are no distribution on one.
        """
        rows, found, failure = call.rows_of(prompt_ids), list[list[int]](), None
        chunked = self._chunked(call, how)
        keys_B, offsets_B = chunked.keys_B[torch.tensor(rows)], call.offsets_of(rows, prompt_ids)
        # before parameters are gathered: a process that keeps others company learns here whether there is a turn
        plan = chunked.plan(prompt_ids, rows)
        try:
            with how.generating() as model:

                def work(part: Sequence[int]) -> list[list[int]]:
                    index = torch.tensor(part)
                    images = None if call.images is None else call.images.of([rows[i] for i in part])
                    chunk = ([prompt_ids[i] for i in part], keys_B[index], offsets_B[index], images)
                    return self._sample_chunk(model, how, chunked.alike, *chunk)

                def fitting(chunk: list[int]) -> list[list[int]]:
                    return [row for piece in self.memory.run(chunk, work) for row in piece]

                found = plan.run(fitting, how.filler)
        except PrecisionError as error:
            failure = str(error)
        if call.prompt_lengths is None:  # every process comes here once: none waits for one that failed
            failure = first_of_all_processes(failure)
        if failure is not None:
            raise PrecisionError(failure)
        return found

    def _sample_chunk(
        self, model: Any, how: Generation, alike: bool, prompts: Any, keys: Any, offsets: Any, images: RowImages | None
    ) -> list[list[int]]:
        config, device = how.config, self.accelerator.device
        assert config is not None
        compact = self.args.compact_rollouts and not self.sharded
        compact = compact and why_not_compact(model, config) is None
        multiple = None if alike else how.pad_to_multiple_of
        chunk = (prompts, keys, offsets, config, how.eos_token_ids, device, multiple, compact, images)
        try:
            return sample_chunk(model, *chunk)
        except PrecisionError as error:
            if self.sharded:  # the other processes would not come along
                raise
            first = FirstModule()
            with first.watching(model), contextlib.suppress(PrecisionError):
                sample_chunk(model, *chunk)
            raise PrecisionError(f"{error}: {explanation(bad_weight(model), first.name, self.args.fp16)}.") from None

    def _with_seeds(self, call: ScoringCall, how: Generation, prompt_ids: Any, num_generations: int) -> Any:
        """TRL's `VLLMGeneration`, seen with one seed for each row of this process."""
        rows = call.rows_of(prompt_ids)
        if call.prompt_lengths is None:
            self.refuse_unequal_slices(how.vllm, 0 if call.request.empty else len(rows))
        keys = self._keys(call.request, how.training)[torch.tensor(rows)]
        seeds = completion_seeds(keys, call.offsets_of(rows, prompt_ids), call.request.num_generations)
        return seeded(how.vllm, seeds, num_generations)

    def refuse_unequal_slices(self, generation: Any, rows: int) -> None:
        """Where TRL cuts what several processes sampled together, it does so as if all had as many rows.

        Raises:
            ConfigError: on every process.
        """
        device = self.accelerator.device
        most, fewest = max_over_processes(rows, device), -max_over_processes(-rows, device)
        together = generation.mode == "server" or generation.tensor_parallel_size > 1
        if together and most != fewest:
            raise ConfigError(
                "with a vLLM server or tensor parallel engines every process needs as many prompts, and here they have "
                f"{fewest} to {most} completions; use a number of prompts (also for evaluation) that "
                f"{self.accelerator.num_processes} processes share evenly."
            )

    def _keys(self, request: RolloutRequest, training: bool) -> torch.Tensor:
        return request_keys(request, self.args.seed, TRAIN_STREAM if training else EVAL_STREAM)

    def _chunked(self, call: ScoringCall, how: Generation) -> ChunkedGeneration:
        def calls(own: int) -> int:  # where generate is a collective, every process makes the same number of calls
            return max_over_processes(own, self.accelerator.device) if self.sharded else own

        # virtual tokens stand before the padding, so there is none: `alike`
        alike, chunk = is_prompt_learning(how.model), self.geometry.rollout_chunk_size
        return ChunkedGeneration(call.request, self._keys(call.request, how.training), chunk, calls, alike)

    def keep_company(self, trl_turn: Any, how: Generation, num_generations: int) -> None:
        """Take part in the turns of other processes while the rows of this one are done, where generation is shared."""
        call, prompt = self.call, [[how.filler]]
        if call is None or not self.sharded or how.vllm is not None:
            return
        keys_B, first = self._keys(call.request, how.training)[:1], torch.zeros(1, dtype=torch.long)
        while calls := max_over_processes(0, self.accelerator.device):
            if not self.samples_by_key(how):
                for _ in range(calls):
                    trl_turn(prompt, None, {}, num_generations)
                continue
            with how.generating() as model:
                for _ in range(calls):
                    self._sample_chunk(model, how, False, prompt, keys_B, first, None)


@contextlib.contextmanager
def _apart(record: Metrics) -> Iterator[Metrics]:
    """What is added to a record inside, kept out of it."""
    kept = dict(record)
    record.clear()
    try:
        yield record
    finally:
        record.clear()
        record.update(kept)

"""The rollout batch: this process's prompts are sampled and scored by TRL, and what all processes have is gathered.

Differs from TRL: completions are sampled by key in chunks cut by global order, rewards and advantages are computed over
the whole rollout batch on every process, and groups that teach nothing may be replaced (dynamic sampling). TRL's
scoring calls back for generation (sampling.turns) and rewards; what those have to know stands in `RolloutSampler.call`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..algorithms.advantages import AdvantageRule, groups_without_variance
from ..algorithms.dynamic_sampling import fill_places
from ..algorithms.exact import exact_mean
from ..batching.prompt_order import FurtherPrompts, ProcessSlices, RolloutRequest, StepRows
from ..batching.sizes import BatchGeometry
from ..compat import View, on_view
from ..config import GRPOConfig
from ..errors import DataError
from ..forward.images import (
    PromptProcessor,
    RowImages,
    WithoutImages,
    count_images,
    images_of,
    messages_of,
)
from ..rewards.calls import RewardCalls, add_columns, columns_of, gather_calls, metrics_of
from ..rewards.guard import Faults, check_reward_functions
from ..rewards.workers import RewardWorkers
from ..runtime.collectives import (
    any_process,
    gather_lists,
    ragged_gather,
    ragged_scoring,
)
from .recording import Recording
from .rollout import ROW_IMAGES, ROW_NUMBER, Rollout, gather_parts, gather_rollout
from .rounds import Round, assemble, log_values
from .shown_images import ShownImages, rows_of_packed
from .turns import ScoringCall, TurnSampler
from .vllm_seeds import sampling_metrics

logger = get_logger(__name__)
Metrics = MutableMapping[str, list[float]]  # TRL's record of training or of evaluation
GOLD = ("answer", "solution", "ground_truth", "golden_answer", "gold", "target")  # columns, the first that a row has


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
class TrlScoring:
    """TRL's scoring of a process's rows.

    Attributes:
        run: its `_generate_and_score_completions`, bound to the trainer.
        functions, names: the reward functions.
        calculate_rewards: the trainer's, with a user's overrides: a subclass may shape the rewards there.
        logs: TRL's record, which it writes to.
    """

    run: Any
    functions: list[Any]
    names: list[str]
    calculate_rewards: Callable[..., torch.Tensor]
    logs: dict[str, Any]


class RolloutSampler(TurnSampler):
    """Makes rollout batches and holds the one that is trained on.

    Args:
        args: the loop's configuration.
        geometry: the batch sizes.
        prepare: makes of a row what a model that takes images is given; None for other models.
        travelling: images travel with their rows, as tools or environments may bring some.

    Attributes:
        prompts: the data set of the loader made last, by whether it is for training.
        rollout, rollout_name: the rollout batch that is held; its epoch and its index in the epoch.
        rewards_BF: of the completions that were sampled last, training's or an evaluation's.
        checked: the reward functions as TRL's scoring calls them, while it runs.
        workers: the processes that reward functions run in, where there are any.
        last_call: the scoring that ended last.
        steps, further: the loader's data set of steps, and prompts for dynamic sampling, once the training loader is
            made.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        geometry: BatchGeometry,
        prepare: PromptProcessor | None = None,
        travelling: bool = False,
    ) -> None:
        super().__init__(accelerator, args, geometry)
        self.prepare, self.travelling = prepare, travelling
        self.prompts: dict[bool, Any] = {}
        self.rollout: Rollout | None = None
        self.rollout_name: tuple[int, int] | None = None
        self.rewards_BF = torch.empty(0)
        self.last_call: ScoringCall | None = None
        self.checked: list[Any] | None = None
        self.workers: RewardWorkers | None = None
        self.further: FurtherPrompts | None = None
        self.steps: Any = None
        self._fetch: Callable[[RolloutRequest], StepRows] | None = None
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

    def twin(self, accelerator: Accelerator, processor: Any) -> RolloutSampler:
        """One for another thread, with an accelerator and a processor of its own."""
        prepare = self.prepare
        if prepare is not None:
            prepare = PromptProcessor(processor, prepare.template, prepare.image_token)
        twin = RolloutSampler(accelerator, self.args, self.geometry, prepare, self.travelling)
        twin.prompts, twin.memory, twin.workers = self.prompts, self.memory, self.workers
        return twin

    def start_workers(self, functions: list[Any], names: list[str]) -> None:
        """Start the processes that reward functions run in.

        Raises:
            ConfigError: a function cannot be sent there, or loaded there.
        """
        self.workers = RewardWorkers(self.args.reward_workers, self.args.seed)
        check_reward_functions(functions, names, workers=self.workers)
        self.workers.start()

    def end_workers(self) -> None:
        """End these processes; the next call of a reward function starts them again."""
        if self.workers is not None:
            self.workers.kill()

    def hold(self, rollout: Rollout | None, name: tuple[int, int] | None) -> None:
        """Go on with a rollout batch that was sampled before; with None, sample anew."""
        self.rollout, self.rollout_name = rollout, name

    def read_from(self, prompts: Any, steps: Any, further: FurtherPrompts | None) -> None:
        """The training data, the loader's data set of steps, and further prompts with dynamic sampling."""
        self.prompts[True], self.steps, self.further = prompts, steps, further
        self._fetch = None if self.args.rollout_lag else getattr(steps, "rows", None)

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
        self.rewards_BF = rewards_BF
        if torch.isnan(rewards_BF).all():
            logger.warning(
                f"No completion of this rollout was scored: {', '.join(rewards.names)} returned None for all of "
                "them, so nothing can be learned or said from it; check that the reward functions fit the data."
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
        scoring: TrlScoring,
        metrics: Metrics,
        rewards: RewardSettings,
    ) -> dict[str, Any]:
        """TRL's scoring of this process's rows, with their part of the advantages of the whole rollout batch.

        Args:
            rows: where their scoring ran beside training, it goes through the same parts again.
            metrics: TRL's record, which it writes to.
        """
        group, first = rows.request.num_generations, rows.request.prompts.start * rows.request.num_generations
        self._refuse_missing_images(rows)
        call = self._begin(rows) if rows.made is None else rows.made
        # TRL computes advantages within a process's rows, and cuts them as if all processes had as many
        logs = scoring.logs
        own_logs = {**logs, "advantages": deque(), "extra": defaultdict(list)}
        scored = self._run(call, rows, replace(scoring, logs=own_logs))
        assert call.rewards_BF is not None
        self.last_call = call
        self._log_calls(call, own_logs["extra"], len(call.rewards_BF), metrics, logs)
        self._log_images(call, rows, logs)
        self._log_gold(call, rows, logs)
        weights_F = rewards.weights_F.to(call.rewards_BF.device)
        advantages = rewards.rule.advantages(call.rewards_BF, weights_F, group)
        shown = advantages if rewards.rule.estimator is not None else own_logs["advantages"]
        logs["advantages"].extend(shown.tolist() if isinstance(shown, torch.Tensor) else shown)
        scored["advantages"] = advantages[first : first + len(rows)]
        return scored

    def score_alone(self, rows: StepRows, scoring: TrlScoring) -> dict[str, Any]:
        """TRL's scoring of this process's rows beside training, which `score_with_trl` goes through again."""
        call = self._begin(rows)
        call.recording = Recording()
        scored = self._run(call, rows, scoring)
        call.recording.again, self.last_call = True, call
        return scored

    def _begin(self, rows: StepRows) -> ScoringCall:
        request, group = rows.request, rows.request.num_generations
        # vLLM's are as many for every process, and no whole chunks
        chunk = None if self.args.use_vllm else max(1, self.geometry.rollout_chunk_size // group) * group
        call = ScoringCall(request, RewardCalls(request.prompts.start * group, chunk))
        if (prepare := self.prepare) is not None and self.travelling:
            call.shown = ShownImages(prepare, [images_of(row) for row in rows])
        elif prepare is not None:
            prompts = dict(zip(rows.numbers, rows))
            call.read = RowImages(rows.numbers, lambda number: prepare(prompts[number]))
        return call

    def _run(self, call: ScoringCall, rows: StepRows, scoring: TrlScoring) -> dict[str, Any]:
        def remember(*args: Any) -> torch.Tensor:
            call.rewards_BF = scoring.calculate_rewards(*args)
            return call.rewards_BF

        seen: dict[str, Any] = {"_calculate_rewards": remember, "_logs": scoring.logs}
        inputs = list(rows)
        if self.prepare is not None:
            seen["processing_class"] = WithoutImages(self.prepare.processor, {})
            seen["log_multimodal"] = False  # it gathers on those processes alone whose rows have images
        if (kept := call.recording) is not None:
            # TRL leaves old log-probabilities out where a step begins with the weights that have sampled it
            seen["args"] = View(self.args, {"steps_per_generation": 2})
            if self.sharded and call.alone:  # a forward is a collective: the second time has the log-probabilities
                seen["args"] = View(self.args, {"gradient_accumulation_steps": 0})
                seen |= {"beta": 0.0, "vllm_importance_sampling_correction": False}
            if kept.prompts is not None and kept.again:
                inputs = [{**row, "prompt": prompt} for row, prompt in zip(rows, kept.prompts)]
                seen |= {"environment_factories": None, "environments": None}
        self.call = call
        try:
            with (
                ragged_scoring(self.accelerator, call.request.empty and not call.alone),
                self.checking(scoring.functions, scoring.names, call.calls),
            ):
                return on_view(scoring.run, seen, inputs)
        finally:
            self.call = None

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

    def _log_images(self, call: ScoringCall, rows: StepRows, logs: dict[str, Any]) -> None:
        """Keep the images of all rows for the table of completions, as TRL does."""
        if self.prepare is None or not self.args.log_multimodal:
            return
        own = call.pictures or [images_of(row) or None for row in rows]
        images = gather_lists([] if call.request.empty else own)
        if any(images) or logs["images"]:
            logs["images"].extend(images)

    @staticmethod
    def _log_gold(call: ScoringCall, rows: StepRows, logs: dict[str, Any]) -> None:
        """Keep the gold answers of all rows for the run's log; TRL's record has no place for them."""
        group = call.request.num_generations
        golds = [next((row[name] for name in GOLD if row.get(name) is not None), None) for row in rows[::group]]
        record = logs.setdefault("gold", deque(maxlen=logs["advantages"].maxlen))
        record.extend(gold for gold in gather_lists([] if call.request.empty else golds) for _ in range(group))

    @contextlib.contextmanager
    def checking(self, functions: list[Any], names: list[str], calls: RewardCalls | None = None) -> Iterator[None]:
        """Inside, `checked` are the reward functions, checked, and called as `calls` has it."""
        self.checked = check_reward_functions(functions, names, self.faults, calls, self.workers)
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

    def rewards_of_all(self, own_BF: torch.Tensor) -> torch.Tensor:
        """The rewards (B, F) of all processes, in process order."""
        return ragged_gather(own_BF)

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

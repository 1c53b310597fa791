"""Batch geometry: the completions of an optimizer step, and how they are laid onto processes.

Differs from TRL: the sizes that define the algorithm (global batch, rollout batch) count completions over all
processes, and the layout (micro-batch, accumulation) is derived from them, rounded up, never down.
First stop in the flow: config -> geometry -> prompt order, rollouts, optimizer step.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Integral  # numpy's too
from typing import Any, Literal

from ..errors import ConfigError, counted

Settings = Mapping[str, Any]  # as in GRPOConfig or in the file of a run, by name

# which rows a padded batch of a model may hold together: any, those of equal lengths (no padding), or one at a time
RowBatching = Literal["any", "equal_lengths", "single"]

# the sizes of a geometry that change nothing that is learned
LAYOUT_SIZES = ("micro_batch_size", "num_processes", "together", "sequence_parallel_size")
# without a rollout_chunk_size; constants, so that chunks depend neither on the device nor on the number of processes
CHUNK = 64  # the most completions of a chunk, unless a group has more
CHUNKS = 8  # the fewest chunks of a rollout batch, if it has as many groups


def batch_key(batching: RowBatching, lengths: Hashable, row: int) -> Hashable:
    """What the rows of a padded batch have in common."""
    return {"any": None, "equal_lengths": lengths, "single": row}[batching]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def even_slice(total: int, parts: int, index: int) -> range:
    """Part `index` of `total` items that are cut into `parts` as evenly as possible, in order."""
    base, extra = divmod(total, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (1 if index < extra else 0))


def group_numbers(rows: int, num_generations: int) -> list[int]:
    return [row // num_generations for row in range(rows)]


def _multiples_around(value: int, unit: int) -> str:
    below, above = value // unit * unit, ceil_div(value, unit) * unit
    return f"{above}" if below == 0 else f"{below} or {above}"


def require_whole(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more.")


def check_lag(lag: Any, sharded: bool) -> None:
    require_whole("rollout_lag", lag, least=0)
    if lag and sharded:
        raise ConfigError(
            f"rollout_lag={lag} with FSDP or DeepSpeed: a forward is a collective, and two threads would run their "
            "collectives in different orders. Use rollout_lag=0, or DDP."
        )


@dataclass(frozen=True)
class ChunkSizes:
    """The most completions of a chunk, and of a `generate` call, in whole groups; None: all of a process."""

    group: int  # completions of a prompt
    chunk: int | None = None
    call: int | None = None
    batching: RowBatching = "any"  # of the rows of a call


@dataclass(frozen=True)
class BatchGeometry:
    """The resolved batch sizes of a run. Sizes are completions over all processes unless stated otherwise."""

    num_generations: int  # per prompt (one group)
    global_batch_size: int  # per optimizer step; may cut groups
    rollout_batch_size: int  # per generation phase: whole groups and whole steps
    num_iterations: int  # times a rollout batch is trained on (mu in the GRPO paper)
    micro_batch_size: int  # per forward on one device
    num_processes: int  # processes the run is laid onto
    rollout_chunk_size: int  # of a chunk of the rollout batch, in whole groups
    together: bool = False  # a process samples all its chunks in one `generate` call
    sequence_parallel_size: int = 1  # processes that share the tokens of a micro-batch

    @property
    def prompts_per_rollout(self) -> int:
        return self.rollout_batch_size // self.num_generations

    @property
    def steps_per_rollout(self) -> int:
        return self.rollout_batch_size // self.global_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of the busiest process in a full step."""
        return ceil_div(self.trained_share, self.micro_batch_size)

    @property
    def trained_share(self) -> int:
        """Completions of a full step that the busiest process trains on, with those that share its micro-batches."""
        return ceil_div(self.global_batch_size, self.num_processes // self.sequence_parallel_size)

    @property
    def sampled_share(self) -> int:
        """Completions of a rollout batch that the busiest process samples."""
        sizes = (self.prompts_per_rollout, self.num_generations, self.rollout_chunk_size, self.num_processes)
        return len(process_prompts(*sizes, rank=0)) * self.num_generations

    @property
    def generate_size(self) -> int:
        """The most completions of one `generate` call on one device."""
        return self.sampled_share if self.together else min(self.rollout_chunk_size, self.sampled_share)

    @property
    def generate_calls(self) -> int:
        """Calls of the busiest process for a rollout batch."""
        return ceil_div(self.sampled_share, self.generate_size)

    @property
    def micro_batches_sampled(self) -> int:
        """Micro-batches of a process in a rollout batch: TRL sizes vLLM's queue by this many."""
        return ceil_div(ceil_div(self.rollout_batch_size, self.num_processes), self.micro_batch_size)

    def chunk_sizes(self, group: int, batching: RowBatching) -> ChunkSizes:
        """For groups of this size: an evaluation may have another than training."""
        call = self.generate_size if self.together else self.rollout_chunk_size
        chunk, call = (max(1, rows // group) * group for rows in (self.rollout_chunk_size, call))
        return ChunkSizes(group, chunk, call, batching)

    @property
    def idle_share(self) -> float:
        """The share of the processes' time while the busiest one samples, if completions take equally long."""
        return 1 - self.rollout_batch_size / (self.num_processes * self.sampled_share)


# settings of GRPOConfig that determine the batch sizes, with TRL's defaults
SETTINGS: dict[str, int | None] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "global_batch_size": None,
    "rollout_batch_size": None,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "rollout_chunk_size": None,
    "sequence_parallel_size": 1,
}


def group_size(settings: Settings) -> int:
    """The completions of a group; a ConfigError for one that has no advantage."""
    generations, teacher = settings["num_generations"], ("teacher_model", "teacher_kl_coef")
    least = 2 if all(settings.get(name) is None for name in teacher) else 1
    if not isinstance(generations, Integral):
        require_whole("num_generations", generations, least)
    if generations < least:
        raise ConfigError(
            f"num_generations={generations!r}: a group needs at least 2 completions to have an advantage; use 2 or "
            "more (8 is TRL's default), or 1 with a teacher (teacher_model or teacher_kl_coef) and no reward function."
        )
    return generations


def geometry_of(settings: Settings, num_processes: int) -> BatchGeometry:
    """The sizes that follow from settings of GRPOConfig, with TRL's defaults for missing ones.

    As in TRL, `gradient_accumulation_steps` and `steps_per_generation` count micro-batches, `generation_batch_size`
    completions. Without `global_batch_size`, TRL's product of micro-batch, accumulation and processes is used.
    """
    sizes = {name: settings.get(name, default) for name, default in SETTINGS.items()}
    generations = group_size({**sizes, **settings})
    sizes["num_processes"] = num_processes
    for name, value in sizes.items():
        if value is not None:
            require_whole(name, value)
    members = sizes["sequence_parallel_size"]
    if num_processes % members:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        start = f"start {members} or a multiple of it (on a CPU: torchrun --nproc_per_node {members})"
        raise ConfigError(
            f"sequence_parallel_size={members} does not divide the number of processes, {num_processes}; {start}, or "
            f"use {', '.join(divisors)}."
        )
    step = _global_batch(sizes)
    rollout, bitwise = _rollout_batch(sizes, step), bool(settings.get("bitwise_invariant", False))
    return BatchGeometry(
        num_generations=generations,
        global_batch_size=step,
        rollout_batch_size=rollout,
        num_iterations=sizes["num_iterations"],
        micro_batch_size=sizes["per_device_train_batch_size"],
        num_processes=num_processes,
        rollout_chunk_size=_chunk_size(sizes["rollout_chunk_size"], generations, rollout, bitwise),
        together=sizes["rollout_chunk_size"] is None and not bitwise,
        sequence_parallel_size=members,
    )


def _global_batch(sizes: Settings) -> int:
    requested, steps = sizes["global_batch_size"], sizes["gradient_accumulation_steps"]
    micro_batch, processes = sizes["per_device_train_batch_size"], sizes["num_processes"]
    if requested is None:
        return micro_batch * steps * processes
    members = sizes["sequence_parallel_size"]
    derived = ceil_div(ceil_div(requested, processes // members), micro_batch)
    if steps not in (1, derived):
        shared = f", of which {members} share a micro-batch," if members > 1 else ""
        raise ConfigError(
            f"gradient_accumulation_steps={steps} contradicts global_batch_size={requested}: with "
            f"per_device_train_batch_size={micro_batch} and {counted(processes, 'process')}{shared} it is derived as "
            f"{derived}; remove gradient_accumulation_steps."
        )
    return requested


def _rollout_batch(sizes: Settings, step: int) -> int:
    requested, phases = sizes["rollout_batch_size"], sizes["steps_per_generation"]
    named = {name: sizes[name] for name in ("rollout_batch_size", "generation_batch_size") if sizes[name] is not None}
    if len(set(named.values())) > 1 or (named and phases is not None):
        both = named if phases is None else named | {"steps_per_generation": phases}
        values = " and ".join(f"{name}={value}" for name, value in both.items())
        raise ConfigError(f"{values} set the same size, the rollout batch; set only rollout_batch_size.")
    name, rollout = next(iter(named.items()), ("", None))
    if phases is not None:
        if sizes["global_batch_size"] is not None:
            raise ConfigError(
                f"steps_per_generation={phases} counts micro-batches, so with global_batch_size={step} the rollout "
                "batch would depend on the hardware; set rollout_batch_size (a multiple of "
                f"{math.lcm(step, sizes['num_generations'])}) instead."
            )
        rollout = sizes["per_device_train_batch_size"] * sizes["num_processes"] * phases
        name = f"rollout_batch_size (from steps_per_generation={phases})"
    if rollout is None or (requested is None and step % rollout == 0):
        # TRL may sample several times per optimizer step; the policy is the same each time, so it is one phase.
        rollout = step
    _check_multiples(rollout, step, name, sizes)
    return rollout


def _check_multiples(rollout: int, step: int, name: str, sizes: Settings) -> None:
    """A step would otherwise train on samples of two policies."""
    group = sizes["num_generations"]
    unit = math.lcm(step, group)
    if rollout % step or (rollout % group and rollout > step):
        raise ConfigError(
            f"{name}={rollout} is not a multiple of global_batch_size={step} and of num_generations={group}; a rollout "
            f"batch holds whole optimizer steps and whole groups; use {_multiples_around(rollout, unit)}."
        )
    if rollout % group:
        factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
        product = " * ".join(f"{factor}={sizes[factor]}" for factor in factors)
        size = f"{product} = {step} completions" if sizes["global_batch_size"] is None else f"global_batch_size={step}"
        raise ConfigError(
            f"{size} is not a multiple of num_generations={group}; a rollout batch, here one step, holds whole groups; "
            f"set global_batch_size to {_multiples_around(step, group)} (any per_device_train_batch_size is then "
            f"allowed), or rollout_batch_size to {unit}, whose steps cut groups."
        )


def _chunk_size(requested: int | None, num_generations: int, rollout: int, bitwise: bool) -> int:
    """The default depends on the meaning of the run, never on its layout."""
    if requested is None:
        # in bitwise mode each chunk is one `generate` call, so it is as large as possible
        most = CHUNK if bitwise else min(CHUNK, rollout // CHUNKS)
        return max(1, most // num_generations) * num_generations
    if requested % num_generations:
        raise ConfigError(
            f"rollout_chunk_size={requested} is not a multiple of num_generations={num_generations}; groups stay whole;"
            f" use {_multiples_around(requested, num_generations)}."
        )
    return requested


@dataclass(frozen=True)
class StepLayout:
    """The place of an optimizer step in its epoch; a step may begin and end within a group."""

    rollout: int  # index of the generation phase in the epoch
    iteration: int  # number of the pass over the rollout batch, from 0
    step: int  # number of the optimizer step in that pass, from 0
    rollout_prompts: range  # positions of the rollout batch's prompts in the epoch's order
    step_rows: range  # this step's completions, as rows of the rollout batch

    @property
    def starts_rollout(self) -> bool:
        return self.iteration == 0 and self.step == 0


@dataclass(frozen=True)
class EpochLayout:
    """The optimizer steps of an epoch: every prompt once; the last step may be smaller, or left out (`drop_last`)."""

    geometry: BatchGeometry
    num_prompts: int
    drop_last: bool = False

    @property
    def trained_completions(self) -> int:
        unit, total = self.geometry.global_batch_size, self.num_prompts * self.geometry.num_generations
        return total // unit * unit if self.drop_last else total

    def __len__(self) -> int:
        return ceil_div(self.trained_completions, self.geometry.global_batch_size) * self.geometry.num_iterations

    def __getitem__(self, index: int) -> StepLayout:
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of an epoch of {len(self)} steps")
        g = self.geometry
        rollout, inside = divmod(index, g.steps_per_rollout * g.num_iterations)
        rows = min(g.rollout_batch_size, self.trained_completions - rollout * g.rollout_batch_size)
        return step_layout(g, rollout, inside, rows)


def step_layout(geometry: BatchGeometry, rollout: int, inside: int, rows: int) -> StepLayout:
    """Step `inside` of a rollout batch of `rows` completions; iterations repeat the same steps."""
    start, size = rollout * geometry.prompts_per_rollout, geometry.global_batch_size
    prompts = range(start, start + ceil_div(rows, geometry.num_generations))
    iteration, step = divmod(inside, ceil_div(rows, size))
    return StepLayout(rollout, iteration, step, prompts, range(step * size, min((step + 1) * size, rows)))


def process_prompts(num_prompts: int, num_generations: int, chunk_size: int, num_processes: int, rank: int) -> range:
    """The prompts that process `rank` samples: whole chunks, cut in global order, of the same shapes everywhere."""
    groups = max(1, chunk_size // num_generations)
    chunks = even_slice(ceil_div(num_prompts, groups), num_processes, rank)
    return range(min(chunks.start * groups, num_prompts), min(chunks.stop * groups, num_prompts))

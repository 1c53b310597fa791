"""The plan of a run as text: logged when a run starts, printed by `grpo-ext plan`, and shown in a report."""

from ..errors import counted
from .sizes import BatchGeometry, EpochLayout, ceil_div


def describe_plan(
    geometry: BatchGeometry,
    num_prompts: int | None,
    drop_last: bool,
    epochs: float | None,
    *,
    micro_batch_tokens: int | None,
    ahead: str | None,
    longest: int | None,
    half: bool,
    most_kept: int | None,
    form: str | None = None,
    precision: str | None = None,
) -> str:
    """One fact per line; lines are left out for what is None.

    `num_prompts` is None if unknown, `epochs` if steps limit the run, `longest` (tokens of a completion) if our engine
    does not sample. `half`: rounding depends on the split. `most_kept`: ids in a replayed sampling mask, at most.
    """
    g, group = geometry, geometry.num_generations
    chunks = ceil_div(g.rollout_batch_size, g.rollout_chunk_size)
    budget = "" if micro_batch_tokens is None else f" and {micro_batch_tokens} tokens"
    shared = f", {g.sequence_parallel_size} for each micro-batch" if g.sequence_parallel_size > 1 else ""
    rows = [
        (
            "optimizer step",
            f"{g.global_batch_size} completions = {counted(g.global_batch_size / group, 'prompt')} x {group}",
        ),
        ("rollout", f"{g.rollout_batch_size} completions, {counted(chunks, 'chunk')} of up to {g.rollout_chunk_size}"),
        ("steps per rollout", f"{g.steps_per_rollout} x {counted(g.num_iterations, 'iteration')}"),
        ("processes", f"{g.num_processes}{shared}"),
        ("micro-batch", f"up to {counted(g.micro_batch_size, 'completion')}{budget} per device"),
        ("micro-batches per step", f"{g.accumulation_steps} per process ({'or more' if budget else 'derived'})"),
    ]
    rows[2:2] = _sampling(g, longest, most_kept)
    more = (("forward", form), ("precision", precision), ("sampling ahead", ahead))
    rows += [(name, text) for name, text in more if text is not None]
    rows += _notes(g, longest, half)
    if num_prompts is None:
        rows.append(("epoch", "unknown (pass --num_prompts)"))
    else:
        rows += _epoch_rows(EpochLayout(g, num_prompts, drop_last), epochs)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _sampling(g: BatchGeometry, longest: int | None, most_kept: int | None) -> list[tuple[str, str]]:
    rows, size = [], " (4 bytes each)"
    if longest is not None:
        idle = f", {g.idle_share:.0%} idle" if g.num_processes > 1 else ""
        calls = f"{counted(g.generate_calls, 'call')} of up to {g.generate_size}"
        rows.append(("sampling", f"{calls}, up to {counted(g.generate_calls * longest, 'decode step')}{idle}"))
        size = f", {g.rollout_batch_size * longest * (most_kept or 0) * 4 / 2**20:,.0f} MiB per rollout batch"
    if most_kept is not None:
        rows.append(("sampling masks", f"up to {most_kept} ids per token{size}"))
    return rows


def _notes(g: BatchGeometry, longest: int | None, half: bool) -> list[tuple[str, str]]:
    rows, chunks = [], ceil_div(g.rollout_batch_size, g.rollout_chunk_size)
    if g.global_batch_size % g.num_generations:
        rows.append(("note", "Steps cut groups; advantages are still computed over whole groups."))
    if longest is not None and chunks < g.num_processes:
        rows.append(("note", f"Only {chunks} of {g.num_processes} processes sample{_smaller_chunk(g)}."))
    if half and g.micro_batch_size % (group := g.num_generations):
        cut = f"Micro-batches of {g.micro_batch_size} cut groups, which rounds gradients; use a multiple of {group}."
        rows.append(("half precision", cut))
    if longest is not None and half and g.together and chunks > 1:
        size = ceil_div(g.prompts_per_rollout, g.num_processes) * g.num_generations
        remedy = f"={size} to avoid this for up to {g.num_processes}" if g.num_processes > 1 else " to avoid this"
        tokens = f"Sampled tokens depend on the number of processes; set rollout_chunk_size{remedy}."
        rows.append(("half precision", tokens))
    return rows


def _smaller_chunk(geometry: BatchGeometry) -> str:
    """The chunk size with which every process samples, as the end of a sentence."""
    g = geometry
    prompts = ceil_div(g.prompts_per_rollout, g.num_processes)
    if ceil_div(g.prompts_per_rollout, prompts) < g.num_processes:
        prompts = max(1, g.prompts_per_rollout // g.num_processes)
    size = prompts * g.num_generations
    return f"; rollout_chunk_size={size} uses more of them" if size < g.rollout_chunk_size else ""


def _epoch_rows(layout: EpochLayout, epochs: float | None) -> list[tuple[str, str]]:
    group, steps = layout.geometry.num_generations, len(layout)
    last = len(layout[steps - 1].step_rows) if steps else 0
    dropped = layout.num_prompts * group - layout.trained_completions
    what = counted(dropped, "completion") if dropped % group else counted(dropped // group, "prompt")
    note = f", {what} dropped" if dropped else ""
    rows = [
        ("epoch", f"{counted(layout.num_prompts, 'prompt')} = {counted(steps, 'optimizer step')}{note}"),
        ("last step of an epoch", f"{counted(last / group, 'prompt')} = {last} completions"),
    ]
    if epochs is not None:
        rows.append(
            ("run", f"{counted(epochs, 'epoch')}, about {counted(int(epochs * steps + 0.999), 'optimizer step')}")
        )
    return rows

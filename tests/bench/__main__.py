"""`make bench` (`python -m tests.bench`): seconds, tokens per second and memory by phase, beside stock TRL.

Takes a run's file and options as recipes/grpo.py does, and its own below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from grpo_ext.tools.cli import CONFIG, OF_A_RUN, command_line, integers, load_libraries, run_app, say, settings_of
from grpo_ext.tools.plots import figure_class
from grpo_ext.tools.stock import OURS, STOCK

app = command_line("bench")


@dataclass(frozen=True)
class Measured:
    """One shape as it is measured.

    Attributes:
        model: id, folder or configuration.
        micro: for each trainer, the micro-batch sizes to choose the fastest of.
    """

    shape: Any
    model: Any
    micro: dict[str, list[int]]


def say_dim(sentence: str) -> None:
    """Progress, in one line."""
    Console().print(f"[dim]{escape(sentence)}[/dim]", soft_wrap=True)


@app.command(**OF_A_RUN)
def bench(
    context: typer.Context,
    config: Annotated[Path | None, CONFIG] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape, instead of the reference shapes: their names, or text like "
            "'prompt=512,completions=32-256,group=8,groups=4,lora,checkpointing,skewed,without_variance=0.5,sample,whole'."
        ),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="All reference shapes, micro-batches searched: an hour or more.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each trainer, after a warm-up.")] = 3,
    stock_micro: Annotated[
        str | None, typer.Option(help="Micro-batch sizes to choose stock TRL's fastest of, for example 1,2,4.")
    ] = None,
    our_micro: Annotated[str | None, typer.Option(help="Micro-batch sizes to choose ours of.")] = None,
    prompt_length: Annotated[int | None, typer.Option(min=1, help="Of a run: tokens (default: measured).")] = None,
    mean_completion_length: Annotated[
        int | None, typer.Option(min=1, help="Of a run: tokens (default: half of max_completion_length).")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="A file of --json: show it against this bench.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here (png, svg or pdf).")] = None,
) -> None:
    """Measure both trainers on the same rollouts, their steps interleaved.

    Without --config, a quarter of an hour on reference shapes; with it, one optimizer step of that run: its model,
    sizes, LoRA and precision, on completions of random tokens. --model_name_or_path may be a config.json (random
    weights).
    """
    if plot is not None:
        figure_class(plot)  # before the work, not after it
    load_libraries()
    from .of_run import left_out, options_of, refuse_of_run, shape_of
    from .plot import write_bench_plot
    from .record import compared, read_record, record_of
    from .shapes import as_tables, run_shape

    settings = settings_of(context, config)
    searched = {who: integers(text, "micro-batches") for who, text in ((STOCK, stock_micro), (OURS, our_micro)) if text}
    source = settings.get("model_name_or_path")
    options, dtype = options_of(settings)
    if not shape and (config is not None or settings.keys() & {"dataset_name", "demo"}):
        name = "the run" if config is None else config.stem
        one, micro, source, options = shape_of(settings, name, prompt_length, mean_completion_length)
        plan = planned({one: micro}, source, searched)
    else:
        refuse_of_run(settings)
        plan = planned(chosen_shapes(shape or [], long), source, searched)
    if without := left_out(settings):
        say_dim(f"without {', '.join(without)}")
    old = None if compare is None else read_record(compare, [one.shape for one in plan])
    how = {"model": source, "dtype": dtype, "rounds": rounds, "options": options, "searched": searched}
    results, record = [], {}
    for one in plan:
        results.append(run_shape(one.shape, one.model, rounds, one.micro, dtype, say_dim, options))
        record = record_of(results, how)
        if json_file is not None:
            json_file.write_text(json.dumps(record, indent=1) + "\n")
    for table in as_tables(results):
        Console().print(table)
    if old is not None:
        table, notes = compared(old, record)
        Console().print(table)
        for note in notes:
            say(f"  {note}")
    if plot is not None:
        write_bench_plot(results, plot)


def chosen_shapes(texts: list[str], long: bool) -> dict[Any, tuple[int, ...]]:
    """The shapes of these texts, or the reference shapes, with their micro-batches where these are not searched."""
    from .shapes import REFERENCE, SHORT, parse_shape

    if not texts:
        return dict.fromkeys(REFERENCE, ()) if long else {**SHORT}
    known = {shape.name: shape for shape in (*SHORT, *REFERENCE)}
    shapes = [known[text] if text in known else parse_shape(text) for text in texts]
    return {shape: () if long else SHORT.get(shape, ()) for shape in shapes}


def planned(shapes: dict[Any, tuple[int, ...]], source: str | None, searched: dict[str, list[int]]) -> list[Measured]:
    """What is measured of each shape: a model that is named, or the shape's own; micro-batches as `searched` says."""
    from .of_run import model_of
    from .shapes import MICRO, MODELS

    plan = []
    for shape, micro in shapes.items():
        fixed = {who: [size] for who, size in zip((STOCK, OURS), micro)}
        sizes = {STOCK: [*MICRO], OURS: [*MICRO], **fixed, **searched}
        plan.append(Measured(shape, model_of(source) if source else MODELS[shape.model], sizes))
    return plan


if __name__ == "__main__":
    run_app(app)

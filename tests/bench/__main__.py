"""`make bench` (`python -m tests.bench`): seconds, tokens per second and memory by phase, beside stock TRL.

Takes a run's file and options as recipes/grpo.py does, and its own below.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from grpo_ext.tools.cli import OF_A_RUN, PLAIN, ConfigFile, integers, load_libraries, run_app, settings_of
from grpo_ext.tools.stock import OURS, STOCK

app = typer.Typer(name="bench", **PLAIN)
SHAPE_HELP = (
    "A shape, instead of the reference shapes: their names, or text like "
    "'prompt=512,completions=32-256,group=8,groups=4,lora,checkpointing,skewed,without_variance=0.5,sample,whole'."
)


def say_dim(sentence: str) -> None:
    Console().print(f"[dim]{escape(sentence)}[/dim]", soft_wrap=True)


@app.command(**OF_A_RUN)
def bench(
    context: typer.Context,
    config: ConfigFile = None,
    shape: Annotated[list[str] | None, typer.Option(help=SHAPE_HELP)] = None,
    long: Annotated[bool, typer.Option("--long", help="All reference shapes, micro-batches searched.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each trainer, after a warm-up.")] = 3,
    stock_micro: Annotated[str | None, typer.Option(help="Micro-batch sizes to choose stock TRL's of: 1,2,4.")] = None,
    our_micro: Annotated[str | None, typer.Option(help="Micro-batch sizes to choose ours of.")] = None,
    prompt_length: Annotated[int | None, typer.Option(min=1, help="Tokens; benches a step of the run.")] = None,
    mean_completion_length: Annotated[
        int | None, typer.Option(min=1, help="Of a run: tokens (default: half of max_completion_length).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measure both trainers on the same rollouts, their steps interleaved.

    A quarter of an hour on reference shapes; with --prompt_length one optimizer step of a run: its model, sizes, LoRA
    and precision, on completions of random tokens. --model_name_or_path may be a config.json (random weights).
    """
    load_libraries()
    from .measuring import MICRO, as_tables, record_of, run_shape
    from .of_run import left_out, model_of, options_of, refuse_sizes, shape_of
    from .shapes import MODELS

    settings = settings_of(context, config)
    searched = {who: integers(text, "micro-batches") for who, text in ((STOCK, stock_micro), (OURS, our_micro)) if text}
    source = settings.get("model_name_or_path")
    options, dtype = options_of(settings)
    if prompt_length is not None:
        name = "the run" if config is None else config.stem
        of_run, micro, precision = shape_of(settings, name, prompt_length, mean_completion_length)
        options |= precision
        shapes = {of_run: micro}
    else:
        refuse_sizes(settings)
        shapes = chosen_shapes(shape or [], long)
    model = model_of(source) if source else None
    if without := left_out(settings):
        say_dim(f"without {', '.join(without)}")
    how = {"model": source, "dtype": dtype, "rounds": rounds, "options": options, "searched": searched}
    results = []
    for one, fixed in shapes.items():
        sizes = {STOCK: MICRO, OURS: MICRO, **{who: [size] for who, size in zip((STOCK, OURS), fixed)}, **searched}
        results.append(run_shape(one, model or MODELS[one.model], rounds, sizes, dtype, say_dim, options))
        if json_file is not None:
            json_file.write_text(json.dumps(record_of(results, how), indent=1) + "\n")
    for table in as_tables(results):
        Console().print(table)


def chosen_shapes(texts: list[str], long: bool) -> dict[Any, tuple[int, ...]]:
    """The shapes of these texts, or the reference shapes, with their micro-batches where these are not searched."""
    from .shapes import REFERENCE, SHORT, parse_shape

    if not texts:
        return dict.fromkeys(REFERENCE, ()) if long else {**SHORT}
    known = {shape.name: shape for shape in (*SHORT, *REFERENCE)}
    shapes = [known[text] if text in known else parse_shape(text) for text in texts]
    return {shape: () if long else SHORT.get(shape, ()) for shape in shapes}


if __name__ == "__main__":
    run_app(app)

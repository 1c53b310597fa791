"""The command line `grpo-ext`: what people run beside training.

Light until a command needs more: `plan` loads no model and no trainer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError, GrpoExtError
from .quiet import quiet_libraries
from .run_file import load_task, read_config, refuse_unknown

app = typer.Typer(
    name="grpo-ext",
    help="Tools beside grpo_ext: the hardware split is not a hyperparameter, and this shows it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # --global_batch_size is --global-batch-size: the names of the settings are spelt with underscores everywhere else
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)

BENCH_MICRO = "1,2,4,8,16,32"


def say(text: str) -> None:
    """A sentence, in one line however long it is and with its figures as they are."""
    Console().print(text, highlight=False, soft_wrap=True)


def integers(text: str, name: str) -> list[int]:
    """A list of positive integers from "16,5,1".

    Raises:
        ConfigError: something else.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no list of whole numbers; write for example {name}=16,5,1.") from None
    if min(values) < 1:
        raise ConfigError(f"{name}={text!r} holds a number below 1; sizes and counts start at 1.")
    return values


@app.command()
def plan(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with GRPOConfig settings.")] = None,
    num_processes: Annotated[
        int, typer.Option("--num-processes", "--processes", help="Processes the run is laid onto.")
    ] = 1,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts in the training set.")] = None,
    num_generations: Annotated[int | None, typer.Option(help="Completions per prompt (default: 8).")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Completions per optimizer step, global.")] = None,
    rollout_batch_size: Annotated[int | None, typer.Option(help="Completions per generation phase, global.")] = None,
    per_device_train_batch_size: Annotated[
        int | None, typer.Option(help="Completions per forward on one device (default: 8).")
    ] = None,
    gradient_accumulation_steps: Annotated[
        int | None, typer.Option(help="Only without global_batch_size; otherwise derived.")
    ] = None,
    generation_batch_size: Annotated[int | None, typer.Option(help="TRL's name for rollout_batch_size.")] = None,
    steps_per_generation: Annotated[int | None, typer.Option(help="TRL: micro-batches per generation phase.")] = None,
    num_iterations: Annotated[int | None, typer.Option(help="Times a rollout batch is trained on.")] = None,
    rollout_chunk_size: Annotated[int | None, typer.Option(help="Completions per generate call.")] = None,
    micro_batch_tokens: Annotated[int | None, typer.Option(help="Tokens per forward on one device.")] = None,
    num_train_epochs: Annotated[float | None, typer.Option(help="Passes over the training set (default: 3).")] = None,
    dataloader_drop_last: Annotated[bool | None, typer.Option(help="Drop a smaller last step.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model id, folder or config.json: adds tokens, balance and memory per device.")
    ] = None,
    engine: Annotated[str, typer.Option(help="With model: ddp, zero2, zero3 or fsdp2.")] = "ddp",
    prompt_length: Annotated[int, typer.Option(help="With model: tokens of a prompt.")] = 512,
    max_completion_length: Annotated[int | None, typer.Option(help="With model: tokens (default: 512).")] = None,
    mean_completion_length: Annotated[int | None, typer.Option(help="With model (default: half the longest).")] = None,
    compute: Annotated[
        str | None, typer.Option(help="With model: float32, bfloat16 or float16 forwards (default: bfloat16).")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(help="With model: train adapters of this rank alone.")] = None,
    gradient_checkpointing: Annotated[
        bool | None, typer.Option(help="With model: recompute activations (default: yes, as in TRL).")
    ] = None,
    recompute_granularity: Annotated[str | None, typer.Option(help="With model: full or selective.")] = None,
) -> None:
    """Print the batch plan for any settings and number of processes; with a model, tokens and memory per device too."""
    from ..batching.sizes import SETTINGS, describe_plan, geometry_of

    file = read_config(config)
    known = (*SETTINGS, "micro_batch_tokens")
    if any(name not in known and get_close_matches(name, known, 1, 0.8) for name in file):
        refuse_unknown(file, config)  # seconds, so only for a name that may be misspelt
    settings = {name: value for part in (file, context.params) for name, value in part.items() if value is not None}
    geometry = geometry_of(settings, num_processes)
    epochs = None if settings.get("max_steps", -1) > 0 else float(settings.get("num_train_epochs", 3.0))
    drop_last = bool(settings.get("dataloader_drop_last", False))
    typer.echo(describe_plan(geometry, num_prompts, drop_last, epochs, settings.get("micro_batch_tokens")))
    if model is not None:
        quiet_libraries()
        from .plan.measure import expected_memory

        text, table = expected_memory(model, geometry, settings)
        say(text)
        Console().print(table)


@app.command()
def check(
    model: Annotated[
        str | None, typer.Option(help="Model id or folder with its tokenizer (default: the demo).")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set id, file or folder (default: the demo).")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column that holds the prompt (default: prompt).")] = None,
    answer_column: Annotated[str | None, typer.Option(help="Column that holds the gold answer.")] = None,
    rewards: Annotated[str | None, typer.Option(help="Reward functions, comma-separated names or paths.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a run, as for recipes/grpo.py.")] = None,
    micro_batch_sizes: Annotated[str | None, typer.Option(help="Completions per forward, for example 16,5,1.")] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes, for example 1,2,3.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.")] = 3,
    against: Annotated[str | None, typer.Option(help="'trl': run stock TRL under the same splits.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative update error that counts as the same.")] = 1e-5,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Train with bitwise_invariant=True and compare hashes of every tensor.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here (png, svg or pdf).")] = None,
) -> None:
    """Train a few steps under several splits and compare the updates; exit status 1 when a split differs."""
    from .check import check as run_check
    from .check.comparison import Split, default_splits
    from .plots import load_pyplot, write_check_plot

    if plot is not None:
        load_pyplot()  # before the work, not after it
    quiet_libraries()
    given = read_config(config)
    refuse_unknown(given, config)
    asked: dict[str, Any] = {"model_name_or_path": model, "dataset_name": dataset, "prompt_column": prompt_column}
    asked |= {"answer_column": answer_column, "rewards": None if rewards is None else rewards.split(",")}
    task = load_task({**given, **{name: value for name, value in asked.items() if value is not None}})
    counts = integers(processes, "processes")
    if micro_batch_sizes is None:
        splits = default_splits(task.settings.get("global_batch_size") or 16, counts)
    else:
        splits = [Split(size, n) for n in counts for size in integers(micro_batch_sizes, "micro_batch_sizes")]
    say(task.about)
    report = run_check(
        task.model,
        task.dataset,
        task.rewards,
        task.settings,
        splits=splits,
        steps=steps,
        against=against,
        peft=task.peft,
        tolerance=tolerance,
        bitwise=bitwise,
        progress=_say_dim,
    )
    Console().print(report.table())
    for note in report.notes():
        Console().print(f"  {note}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1))
    if plot is not None:
        write_check_plot(report, tolerance, plot)
    Console().print(report.conclusion(bitwise))
    if not report.ok:
        raise typer.Exit(1)


def _say_dim(sentence: str) -> None:
    Console().print(f"[dim]{sentence}[/dim]")


@app.command()
def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape, instead of the reference shapes: their names, or text like "
            "'prompt=512,completions=32-256,group=8,groups=4,lora,checkpointing,skewed,without_variance=0.5,sample,whole'."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model id or path; or a config.json (random weights). Default: 28M Qwen2, or what the shape names."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each trainer, after a warm-up.")] = 3,
    stock_micro: Annotated[str, typer.Option(help="Micro-batch sizes to choose stock TRL's fastest of.")] = BENCH_MICRO,
    our_micro: Annotated[str, typer.Option(help="Micro-batch sizes to choose ours of.")] = BENCH_MICRO,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here (png, svg or pdf).")] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Instead: ours with and without each of its parts, no stock TRL.")
    ] = False,
) -> None:
    """Seconds, tokens/s, memory by phase against stock TRL, on the same rollouts, interleaved."""
    from .bench.shapes import MODELS, REFERENCE, as_tables, parse_shape, run_shape, write_json
    from .plots import load_pyplot, write_bench_plot

    if plot is not None:
        load_pyplot()
    quiet_libraries()
    known = {s.name: s for s in REFERENCE}
    shapes = [known[text] if text in known else parse_shape(text) for text in shape] if shape else list(REFERENCE)
    source: Any = model
    if model is not None and model.endswith(".json"):
        source = json.loads(Path(model).read_text())
    if parts:
        _bench_parts(known, source or MODELS["reference"], rounds, dtype)
        return
    sizes = {"TRL": integers(stock_micro, "stock_micro"), "grpo_ext": integers(our_micro, "our_micro")}
    results = []
    for one in shapes:
        results.append(run_shape(one, source or MODELS[one.model], rounds, sizes, dtype, _say_dim))
        if json_file is not None:
            write_json(results, json_file)
    for table in as_tables(results):
        Console().print(table)
    if plot is not None:
        write_bench_plot(results, plot)


def _bench_parts(shapes: Mapping[str, Any], model: Any, rounds: int, dtype: str) -> None:
    from .bench.shapes import PARTS, parts_tables, run_part
    from .bench.worker import cost_of

    results = [run_part(part, shapes[part.shape], model, rounds, 8, dtype, _say_dim) for part in PARTS]
    skewed = [shape for shape in shapes.values() if not shape.samples]
    for table in parts_tables(results, skewed, cost_of(model)):
        Console().print(table)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, of any engine.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    merge_adapter: Annotated[bool, typer.Option(help="Put an adapter into its base model.")] = False,
    base: Annotated[str | None, typer.Option(help="The adapter's base model, if it is another one by now.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: as stored).")] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file, held in memory while it is copied.")
    ] = "5GB",
    check: Annotated[bool, typer.Option(help="Compare with the checkpoint's samples; holds the whole model.")] = True,
    trust_shards: Annotated[bool, typer.Option(help="Read an engine's shards, pickles that can run code.")] = False,
) -> None:
    """Write the trained model of a checkpoint as a plain Hugging Face folder, and check that it is the same model."""
    quiet_libraries()
    from ..run.checkpoint import is_verified
    from .export import export as export_model

    if checkpoint.is_dir() and not is_verified(checkpoint):
        say(f"{checkpoint} has no checksums, so it is read unverified.")
    done = export_model(
        checkpoint,
        out,
        merge_adapter=merge_adapter,
        base=base,
        dtype=dtype,
        max_shard_size=max_shard_size,
        check=check,
        trust_shards=trust_shards,
    )
    say(f"{out}: {done.kind}, {done.bytes_before / 1e6:.1f} MB -> {done.bytes_after / 1e6:.1f} MB")
    if done.difference is None:
        none = "the checkpoint holds no completions (models that take images record none)."
        say(f"Not checked: {none if check else 'as asked for.'}")
    else:
        say(f"Checked: log-probabilities of saved samples differ by {done.difference:.1e} on average.")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or checkpoints; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder to write (default: RUN/report; for several runs report-comparison, or -2, ...)."),
    ] = None,
) -> None:
    """Write what a run did, or how several differ, as one page with plots; also of a run that goes on or was killed."""
    from .report.page import report as write

    page = write(runs, output)
    say(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    """Entry point; a deliberate error is one message and exit status 2, without a traceback."""
    try:
        app()
    except GrpoExtError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

"""The command line `grpo-ext`: what people run beside training.

`check` and `plan` take the configuration file and options of recipes/grpo.py: options that a command does not define go
to the recipe's parser. Libraries are imported when a command needs them: a `plan` of sizes does not import torch.
"""

import json
import tempfile
import traceback
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError, GrpoExtError

if TYPE_CHECKING:
    from ..batching.sizes import BatchGeometry

# takes --global_batch_size for --global-batch-size: everywhere else settings are spelled with underscores
NAMES: dict[str, Any] = {"token_normalize_func": lambda token: token.replace("_", "-")}
PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "context_settings": NAMES}

app = typer.Typer(
    name="grpo-ext",
    help="Commands around a run of grpo_ext: plan it, check that the hardware split changes nothing, compare two runs "
    "(diff), look into a step (rerun), export the model, report.",
    no_args_is_help=True,
    **PLAIN,
)

OF_A_RUN: dict[str, Any] = {
    "context_settings": {**NAMES, "ignore_unknown_options": True, "allow_extra_args": True},
    "epilog": "Also takes every option of recipes/grpo.py: --model_name_or_path, --dataset_name, --rewards, "
    "--use_peft and all others that `python recipes/grpo.py --help` lists.",
}
Engine = StrEnum("Engine", ["ddp", "zero2", "zero3", "fsdp2"])
ConfigFile = Annotated[
    Path | None, typer.Option(help="YAML file of a run, as for recipes/grpo.py; options override it.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the result here.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of a run: its output_dir.")]


def load_libraries() -> None:
    """Import the libraries quietly, and announce that it takes a moment."""
    from . import starting  # noqa: F401, isort: skip  (before they are imported)
    from ..runtime.quiet import quiet_libraries

    quiet_libraries()


def integers(text: str, name: str) -> list[int]:
    """Parse a list of positive integers such as "16,5,1"; a ConfigError for any other text."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{name}={text!r} is not a list of positive integers; write for example {name}=16,5,1.")
    return [int(part) for part in parts]


def write_file(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror}).") from None


def settings_of(context: typer.Context, config: Path | None) -> dict[str, Any]:
    """Read the settings of a run from its file and from the options that the command itself does not define."""
    from .options import read_settings

    words = [*context.args] if config is None else ["--config", str(config), *context.args]
    options = [option.replace("-", "_").replace("__", "--", 1) for p in context.command.params for option in p.opts]
    return read_settings(words, more_options=options)


@app.command(**OF_A_RUN)
def plan(
    context: typer.Context,
    config: ConfigFile = None,
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 1,
    num_prompts: Annotated[int | None, typer.Option(help="Prompts in the training set.")] = None,
    engine: Annotated[Engine, typer.Option(help="With a model: what it is trained with.")] = Engine.ddp,
    prompt_length: Annotated[
        int | None, typer.Option(min=1, help="With a model: tokens of the longest prompt (default: 512).")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(min=0, help="With a model: GB of a device; says what fits (80 for an H100).")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With a model: also run its largest micro-batch and `generate` call here.")
    ] = False,
) -> None:
    """Print the batch plan for any settings and number of processes; with a model, also the memory per device.

    The model (--model_name_or_path) is an id, a folder, or a config.json.
    """
    from ..batching.sizes import geometry_of

    settings = {n: v for n, v in settings_of(context, config).items() if v is not None}
    if {"model_name_or_path", "demo"} & settings.keys():
        load_libraries()
    if "demo" in settings:
        from ..demo.task import EMBEDDED, TRAIN_PROMPTS, demo_named

        if settings["demo"] == EMBEDDED:
            num_prompts = num_prompts or TRAIN_PROMPTS
        settings = {**demo_named(settings["demo"]).settings, **settings}
    geometry = geometry_of(settings, processes)
    typer.echo(sizes_in_words(settings, geometry, num_prompts, engine))
    if (model := settings.get("model_name_or_path")) is not None:
        from .plan import expected_memory

        text, table = expected_memory(model, geometry, settings, engine, prompt_length, device_memory)
        typer.echo(text)
        Console().print(table)
        if measure:
            from .measured_memory import measured_memory

            typer.echo(measured_memory(settings, geometry, engine, prompt_length))
    elif measure or device_memory is not None:
        raise ConfigError("--measure and --device_memory are about a model; add --model_name_or_path.")


def sizes_in_words(settings: Mapping[str, Any], geometry: "BatchGeometry", num_prompts: int | None, engine: str) -> str:
    """The plan of a run's sizes, without its model; does not import torch."""
    from ..batching.plan_text import describe_plan
    from ..batching.sizes import check_lag
    from ..settings import most_kept, truncating_in

    epochs = None if settings.get("max_steps", -1) > 0 else float(settings.get("num_train_epochs", 3.0))
    lag, replays = settings.get("rollout_lag", 0), settings.get("sampling_mask") == "replay"
    check_lag(lag, engine != "ddp")
    others = settings.get("use_vllm") or settings.get("use_transformers_continuous_batching")
    return describe_plan(
        geometry,
        num_prompts,
        bool(settings.get("dataloader_drop_last", False)),
        epochs,
        ahead=f"{lag} rollout batch(es)" if lag else None,
        micro_batch_tokens=settings.get("micro_batch_tokens"),
        longest=None if others else settings.get("max_completion_length", 512),  # TRL's default
        half=bool(settings.get("bf16", True) or settings.get("fp16")) and not settings.get("bitwise_invariant"),
        most_kept=most_kept(truncating_in(settings)) if replays else None,
    )


@app.command(**OF_A_RUN)
def check(
    context: typer.Context,
    config: ConfigFile = None,
    micro_batch_sizes: Annotated[str | None, typer.Option(help="Completions per forward, for example 16,5,1.")] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes, for example 1,2,3.")] = "1,2",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = 3,
    sequence_parallel: Annotated[
        str, typer.Option(help="Processes that share every forward, for example 1,2: each where it divides them.")
    ] = "1",
    against: Annotated[str | None, typer.Option(help="'trl': run stock TRL under the same splits.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest relative update error that is the same, not rounding.")
    ] = 1e-5,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Train with bitwise_invariant=True and compare a hash of every tensor.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Train a few steps of a run (default: the demo) under several splits and compare.

    Exit status: 0 if all splits of grpo_ext learn the same, 1 if one differs, 2 if one was refused or nothing learned.

    Trains in float32 unless the run's settings name bf16 or fp16, and saves, reports and evaluates nothing.
    """
    settings = settings_of(context, config)
    load_libraries()
    from .check import splits

    counts = integers(processes, "processes")
    sizes = None if micro_batch_sizes is None else integers(micro_batch_sizes, "micro_batch_sizes")
    shared = integers(sequence_parallel, "sequence_parallel")
    with tempfile.TemporaryDirectory(prefix="grpo_ext_check_") as name:
        folder = Path(name)
        run, about = splits.load_run(settings, folder / "data")
        typer.echo(about)
        cuts = splits.splits_of(run.config["global_batch_size"], counts, sizes, shared)
        report = splits.check(run, cuts, folder, steps=steps, against=against, tolerance=tolerance, bitwise=bitwise)
    if json_file is not None:
        write_file("--json", json_file, json.dumps(report.as_dict(), indent=1))
    typer.echo(report.conclusion())
    if not report.ok:
        raise typer.Exit(1 if report.differs else 2)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, of any engine.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    merge_adapter: Annotated[bool, typer.Option(help="Merge an adapter into its base model.")] = False,
    base: Annotated[
        str | None, typer.Option(help="The adapter's base model, if it is no longer where the checkpoint says.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: as stored).")] = None,
    trust_shards: Annotated[bool, typer.Option(help="Read an engine's shards: pickles, which can run code.")] = False,
) -> None:
    """Write the trained model of a checkpoint as a plain Hugging Face folder."""
    load_libraries()
    from ..run.checkpoint import LISTING
    from .export import export as export_model

    kind = export_model(checkpoint, out, merge_adapter=merge_adapter, base=base, dtype=dtype, trust_shards=trust_shards)
    if not (checkpoint / LISTING).is_file():
        typer.echo(f"{checkpoint} has no checksums, so it was read without verification.")
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    typer.echo(f"Wrote the weights ({kind}, {size / 1e6:.1f} MB) to {out}")


@app.command()
def report(run: RunFolder) -> None:
    """Write one page with plots of a run, which may still be running or have been killed."""
    load_libraries()
    from .report import report as write

    page = write(run)
    typer.echo(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


@app.command()
def diff(
    run_a: RunFolder,
    run_b: Annotated[Path, typer.Argument(help="Folder of another run.")],
    json_file: JsonFile = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page here, with the curves of both runs.")] = None,
) -> None:
    """Say where and why two runs diverge.

    Exit status: 0 for the same bits or rounding, 1 for a difference, 2 if nothing can be compared.
    """
    from ..run.diff import diff as compare
    from ..run.trail_comparison import SAME

    comparison = compare(run_a, run_b)
    if json_file is not None:
        write_file("--json", json_file, json.dumps(comparison.as_dict(), indent=1))
    if html is not None:
        load_libraries()
        from .report import comparison_page

        write_file("--html", html, comparison_page(comparison.text, {"A": run_a, "B": run_b}))
    typer.echo(comparison.text)
    if comparison.verdict not in SAME:
        raise typer.Exit(1)


@app.command(**OF_A_RUN)
def rerun(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run of recipes/grpo.py: its output_dir.")],
    step: Annotated[int, typer.Option(min=1, help="The optimizer step.")],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    gradients: Annotated[bool, typer.Option("--gradients", help="Record the gradient of each completion too.")] = False,
    call_rewards: Annotated[bool, typer.Option("--call-rewards", help="Call the reward functions again.")] = False,
    case: Annotated[
        list[str] | None, typer.Option(help="Also compare it with other settings: loss_type=dr_grpo,beta=0.01.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(help="Another copy of recipes/grpo.py, or a script built like it (it writes recipe.json)."),
    ] = None,
) -> None:
    """Run a step of a run again, token by token, and say whether it is the same.

    Writes rerun/step-N in the run's folder and nothing else. Exit status: 0 for the same bits or rounding, 1 for a
    difference, 2 for a step that cannot be run again.
    """
    from .rerun import rerun as start

    flags = {"rerun": step, "rerun_gradients": gradients, "rerun_rewards": call_rewards}
    options = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    options += ["--rerun_cases", *case] if case else []
    raise typer.Exit(start(run, step, [*options, *context.args], processes, script))


def run_app(commands: typer.Typer) -> None:
    """Run a command line; a deliberate error ends it with one message and exit status 2, without a traceback."""
    try:
        commands()
    except GrpoExtError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
    except SystemExit as end:  # the libraries say 1 where the reader of the output has gone, a shell 141
        raise SystemExit(141 if isinstance(end.__context__, BrokenPipeError) else end.code) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(2) from None  # 1 says that runs differ


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()

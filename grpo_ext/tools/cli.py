"""The command line `grpo-ext`: what people run beside training.

Light until a command needs more: `plan` loads no model and no trainer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError, GrpoExtError
from .quiet import quiet_libraries

app = typer.Typer(
    name="grpo-ext",
    help="Tools beside grpo_ext: the hardware split is not a hyperparameter, and this shows it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # --global_batch_size is --global-batch-size: the names of the settings are spelt with underscores everywhere else
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)

# typer reads these annotations at run time, so they are spelt for Python 3.10
OptionalInt = Optional[int]  # noqa: UP045
OptionalStr = Optional[str]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045
BENCH_MICRO = "1,2,4,8,16,32"
OptionalStrings = Optional[list[str]]  # noqa: UP045


def read_config(path: Path | None) -> dict[str, Any]:
    """The settings of a YAML file, as a recipe reads it.

    Raises:
        ConfigError: no such file, or no mapping of names to values in it.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigError(f"config={path} is no file; give the path of a YAML file with settings.")
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings; it should map names to values, one a line: `name: value`.")
    return settings


def refuse_misspelt(settings: Mapping[str, Any], known: Collection[str], path: Path | None) -> None:
    """Refuse names in a file that are no setting but nearly one; other names belong to the recipe.

    Args:
        known: names that are read here.

    Raises:
        ConfigError: names both.
    """
    suspects = {name: get_close_matches(name, known, 1, 0.8) for name in settings if name not in known}
    suspects = {name: near for name, near in suspects.items() if near}
    if suspects:
        from ..config import GRPOConfig  # seconds, so only now

        suspects = {name: near for name, near in suspects.items() if name not in GRPOConfig.__dataclass_fields__}
    if suspects:
        name, near = next(iter(suspects.items()))
        raise ConfigError(f"{path}: {name!r} is no setting; did you mean {near[0]!r}?")


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
    config: Annotated[OptionalPath, typer.Option(help="YAML file with GRPOConfig settings.")] = None,
    num_processes: Annotated[
        int, typer.Option("--num-processes", "--processes", help="Processes the run is laid onto.")
    ] = 1,
    num_prompts: Annotated[OptionalInt, typer.Option(help="Prompts in the training set.")] = None,
    num_generations: Annotated[OptionalInt, typer.Option(help="Completions per prompt (default: 8).")] = None,
    global_batch_size: Annotated[OptionalInt, typer.Option(help="Completions per optimizer step, global.")] = None,
    rollout_batch_size: Annotated[OptionalInt, typer.Option(help="Completions per generation phase, global.")] = None,
    per_device_train_batch_size: Annotated[
        OptionalInt, typer.Option(help="Completions per forward on one device (default: 8).")
    ] = None,
    gradient_accumulation_steps: Annotated[
        OptionalInt, typer.Option(help="Only without global_batch_size; otherwise derived.")
    ] = None,
    generation_batch_size: Annotated[OptionalInt, typer.Option(help="TRL's name for rollout_batch_size.")] = None,
    steps_per_generation: Annotated[OptionalInt, typer.Option(help="TRL: micro-batches per generation phase.")] = None,
    num_iterations: Annotated[OptionalInt, typer.Option(help="Times a rollout batch is trained on.")] = None,
    rollout_chunk_size: Annotated[OptionalInt, typer.Option(help="Completions per generate call.")] = None,
    micro_batch_tokens: Annotated[OptionalInt, typer.Option(help="Tokens per forward on one device.")] = None,
    num_train_epochs: Annotated[float, typer.Option(help="Passes over the training set.")] = 3.0,
    dataloader_drop_last: Annotated[bool, typer.Option(help="Drop a smaller last step.")] = False,
    model: Annotated[
        OptionalStr, typer.Option(help="Model id, folder or config.json: adds tokens, balance and memory per device.")
    ] = None,
    engine: Annotated[str, typer.Option(help="With model: ddp, zero2, zero3 or fsdp2.")] = "ddp",
    prompt_length: Annotated[int, typer.Option(help="With model: tokens of a prompt.")] = 512,
    max_completion_length: Annotated[OptionalInt, typer.Option(help="With model: tokens (default: 512).")] = None,
    mean_completion_length: Annotated[OptionalInt, typer.Option(help="With model (default: half the longest).")] = None,
    compute: Annotated[
        OptionalStr, typer.Option(help="With model: float32, bfloat16 or float16 forwards (default: bfloat16).")
    ] = None,
    lora_rank: Annotated[OptionalInt, typer.Option(help="With model: train adapters of this rank alone.")] = None,
) -> None:
    """Print the batch plan for any settings and number of processes; with a model, tokens and memory per device too."""
    from ..batching.sizes import describe_plan, resolve_geometry

    given = {
        "num_generations": num_generations,
        "global_batch_size": global_batch_size,
        "rollout_batch_size": rollout_batch_size,
        "per_device_train_batch_size": per_device_train_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "generation_batch_size": generation_batch_size,
        "steps_per_generation": steps_per_generation,
        "num_iterations": num_iterations,
        "rollout_chunk_size": rollout_chunk_size,
        "micro_batch_tokens": micro_batch_tokens,
    }
    file = read_config(config)
    refuse_misspelt(file, given, config)
    sizes = {name: file.get(name) if value is None else value for name, value in given.items()}
    geometry = resolve_geometry(
        num_generations=8 if sizes["num_generations"] is None else sizes["num_generations"],
        num_processes=num_processes,
        micro_batch_size=8 if sizes["per_device_train_batch_size"] is None else sizes["per_device_train_batch_size"],
        accumulation_steps=sizes["gradient_accumulation_steps"] or 1,
        global_batch_size=sizes["global_batch_size"],
        rollout_batch_size=sizes["rollout_batch_size"],
        generation_batch_size=sizes["generation_batch_size"],
        steps_per_generation=sizes["steps_per_generation"],
        num_iterations=sizes["num_iterations"] or 1,
        rollout_chunk_size=sizes["rollout_chunk_size"],
    )
    drop_last = dataloader_drop_last or bool(file.get("dataloader_drop_last", False))
    by_steps = file.get("max_steps", -1) > 0
    epochs = None if by_steps else float(file.get("num_train_epochs", num_train_epochs))
    typer.echo(describe_plan(geometry, num_prompts, drop_last, epochs, sizes["micro_batch_tokens"]))
    if model is None:
        return
    longest = max_completion_length or file.get("max_completion_length") or 512
    shape = (prompt_length, longest, mean_completion_length or max(longest // 2, 1))
    settings = {"checkpointing": file.get("gradient_checkpointing", True), "reference": file.get("beta", 0.0) > 0}
    settings |= {"bitwise": file.get("bitwise_invariant", False), "budget": sizes["micro_batch_tokens"]}
    if compute is None:
        compute = "float16" if file.get("fp16") else "bfloat16" if file.get("bf16", True) else "float32"
    if lora_rank is None and file.get("use_peft"):
        lora_rank = file.get("lora_r", 16)
    _plan_memory(model, geometry, engine, shape, compute, lora_rank, settings)


def _plan_memory(
    model: str,
    geometry: Any,
    engine: str,
    shape: tuple[int, int, int],
    compute: str,
    lora_rank: int | None,
    settings: dict[str, Any],
) -> None:
    quiet_libraries()
    from .plan.measure import balance, load_config, measure, memory_table, simulated
    from .plan.memory import MemoryLayout

    if compute not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"compute={compute!r}: use float32, bfloat16 or float16.")
    prompt, longest, mean = shape
    architecture = measure(load_config(model), compute=compute, lora_rank=lora_rank)
    lengths = simulated(geometry, prompt, longest, mean)
    tokens, imbalance = balance(geometry, lengths, architecture)
    own = geometry.num_generations
    micro = min(geometry.micro_batch_size, -(-geometry.global_batch_size // geometry.num_processes))
    largest = -(-micro // own) * prompt + micro * longest
    if settings["budget"] is not None:
        largest = min(largest, max(settings["budget"], prompt + longest))
    layout = MemoryLayout(
        engine,
        geometry.num_processes,
        largest,
        min(geometry.rollout_chunk_size, geometry.rollout_batch_size),
        prompt + longest,
        checkpointing=bool(settings["checkpointing"]),
        reference=settings["reference"] and lora_rank is None,
        bitwise=settings["bitwise"],
    )
    console = Console()
    console.print(
        f"Model: {architecture.parameters / 1e6:,.0f}M parameters, {architecture.trained / 1e6:,.1f}M trained; saved "
        f"activations {architecture.token_bytes / 1024:.0f} KiB per token and layer\n"
        f"Step: about {tokens:,.0f} tokens per device (prompts {prompt}, completions {mean} on average, up to "
        f"{longest}), slowest device {imbalance:.3f} x the mean; largest micro-batch {largest:,} tokens\n"
        f"Expected memory per device, {engine} on {geometry.num_processes}:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(memory_table(architecture, layout))


@app.command()
def check(
    model: Annotated[
        OptionalStr, typer.Option(help="Model id or folder with its tokenizer (default: the demo).")
    ] = None,
    dataset: Annotated[OptionalStr, typer.Option(help="Data set id, file or folder (default: the demo).")] = None,
    prompt_column: Annotated[OptionalStr, typer.Option(help="Column that holds the prompt (default: prompt).")] = None,
    answer_column: Annotated[OptionalStr, typer.Option(help="Column that holds the gold answer.")] = None,
    rewards: Annotated[OptionalStr, typer.Option(help="Reward functions, comma-separated names or paths.")] = None,
    config: Annotated[OptionalPath, typer.Option(help="YAML file of a run, as for recipes/grpo.py.")] = None,
    micro_batch_sizes: Annotated[OptionalStr, typer.Option(help="Completions per forward, for example 16,5,1.")] = None,
    processes: Annotated[str, typer.Option(help="Numbers of processes, for example 1,2,3.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Optimizer steps to train.")] = 3,
    against: Annotated[OptionalStr, typer.Option(help="'trl': run stock TRL under the same splits.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative update error that counts as the same.")] = 1e-5,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Train with bitwise_invariant=True and compare hashes of every tensor.")
    ] = False,
    json_file: Annotated[OptionalPath, typer.Option("--json", help="Also write the result here.")] = None,
    plot: Annotated[OptionalPath, typer.Option(help="Write a plot here (png, svg or pdf).")] = None,
) -> None:
    """Train a few steps under several splits and compare the updates; exit status 1 when a split differs."""
    from .check import check as run_check
    from .check.comparison import Split, default_splits
    from .plots import load_pyplot, write_check_plot

    if plot is not None:
        load_pyplot()  # before the work, not after it
    quiet_libraries()
    file = read_config(config)
    asked: dict[str, Any] = {"model_name_or_path": model, "dataset_name": dataset, "prompt_column": prompt_column}
    asked |= {"answer_column": answer_column, "rewards": None if rewards is None else rewards.split(",")}
    recipe = _recipe_fields(file, config) | {name: value for name, value in asked.items() if value is not None}
    task = _task(recipe)
    settings = {**task["config"], **_settings(file)}
    counts = integers(processes, "processes")
    if micro_batch_sizes is None:
        splits = default_splits(settings.get("global_batch_size") or 16, counts)
    else:
        splits = [Split(size, n) for n in counts for size in integers(micro_batch_sizes, "micro_batch_sizes")]
    console = Console()
    console.print(task["about"], highlight=False, soft_wrap=True)
    report = run_check(
        task["model"],
        task["dataset"],
        task["rewards"],
        settings,
        splits=splits,
        steps=steps,
        against=against,
        peft=task["peft"],
        tolerance=tolerance,
        bitwise=bitwise,
        progress=lambda sentence: console.print(f"[dim]{sentence}[/dim]"),
    )
    console.print(report.table())
    for note in report.notes():
        console.print(f"  {note}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1))
    if plot is not None:
        write_check_plot(report, tolerance, plot)
    if not report.ok:
        learned = all(r.verdict != "nothing learned" for r in report.results)
        console.print("At least one split learns something else." if learned else "Nothing was learned to compare.")
        raise typer.Exit(1)
    if any(r.verdict == "rounding" for r in report.results):
        console.print(
            "rounding: beyond the tolerance in float32, within it in float64. Adam moves an element whose gradient is "
            "rounding noise by a whole learning rate; a larger adam_epsilon damps it."
        )
    console.print(f"Every split of grpo_ext learns the same{', to the bit' if bitwise else ''}.")


@app.command()
def bench(
    shape: Annotated[
        OptionalStrings,
        typer.Option(
            help="A shape, instead of the reference shapes: their names, or text like "
            "'prompt=512,completions=32-256,group=8,groups=4,lora,checkpointing,skewed,without_variance=0.5,sample'."
        ),
    ] = None,
    model: Annotated[
        OptionalStr, typer.Option(help="Model id or path; or a config.json (random weights). Default: 28M Qwen2.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each trainer, after a warm-up.")] = 3,
    stock_micro: Annotated[str, typer.Option(help="Micro-batch sizes to choose stock TRL's fastest of.")] = BENCH_MICRO,
    our_micro: Annotated[str, typer.Option(help="Micro-batch sizes to choose ours of.")] = BENCH_MICRO,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    json_file: Annotated[OptionalPath, typer.Option("--json", help="Write all figures here.")] = None,
    plot: Annotated[OptionalPath, typer.Option(help="Write a plot here (png, svg or pdf).")] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="Instead: ours with and without each of its parts, no stock TRL.")
    ] = False,
) -> None:
    """Seconds, tokens/s, memory by phase against stock TRL, on the same rollouts, interleaved."""
    from .bench.shapes import REFERENCE, REFERENCE_MODEL, as_tables, parse_shape, run_shape, write_json
    from .plots import load_pyplot, write_bench_plot

    if plot is not None:
        load_pyplot()
    quiet_libraries()
    console = Console()
    known = {s.name: s for s in REFERENCE}
    shapes = [known[text] if text in known else parse_shape(text) for text in shape] if shape else list(REFERENCE)
    source: Any = REFERENCE_MODEL if model is None else model
    if model is not None and model.endswith(".json"):
        source = json.loads(Path(model).read_text())
    if parts:
        _bench_parts(known, source, rounds, dtype, console)
        return
    sizes = {"TRL": integers(stock_micro, "stock_micro"), "grpo_ext": integers(our_micro, "our_micro")}
    results = []
    for one in shapes:
        results.append(run_shape(one, source, rounds, sizes, dtype, lambda text: console.print(f"[dim]{text}[/dim]")))
        if json_file is not None:
            write_json(results, json_file)
    for table in as_tables(results):
        console.print(table)
    if plot is not None:
        write_bench_plot(results, plot)


def _bench_parts(shapes: Mapping[str, Any], model: Any, rounds: int, dtype: str, console: Console) -> None:
    from .bench.shapes import PARTS, parts_tables, run_part
    from .bench.worker import cost_of

    results = [
        run_part(part, shapes[part.shape], model, rounds, 8, dtype, lambda text: console.print(f"[dim]{text}[/dim]"))
        for part in PARTS
    ]
    skewed = [shape for shape in shapes.values() if not shape.sample]
    for table in parts_tables(results, skewed, cost_of(model)):
        console.print(table)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder, of any engine.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    merge_adapter: Annotated[bool, typer.Option(help="Put an adapter into its base model.")] = False,
    base: Annotated[OptionalStr, typer.Option(help="The adapter's base model, if it is another one by now.")] = None,
    dtype: Annotated[OptionalStr, typer.Option(help="float32, bfloat16 or float16 (default: as stored).")] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weight file, held in memory while it is copied.")
    ] = "5GB",
    check: Annotated[bool, typer.Option(help="Compare with the checkpoint's samples; holds the whole model.")] = True,
    trust_shards: Annotated[bool, typer.Option(help="Read an engine's shards, pickles that can run code.")] = False,
) -> None:
    """Write the trained model of a checkpoint as a plain Hugging Face folder, and check that it is the same model."""
    quiet_libraries()
    from .export import export as export_model
    from .export import unverified

    console = Console()
    if unverified(checkpoint) and checkpoint.is_dir():
        console.print(f"{checkpoint} has no checksums, so it is read unverified.", highlight=False, soft_wrap=True)
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
    console.print(
        f"{out}: {done.kind}, {done.bytes_before / 1e6:.1f} MB -> {done.bytes_after / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )
    if done.difference is None:
        console.print("Not checked: " + ("no samples to compare with." if check else "as asked for."))
    else:
        console.print(f"Checked: log-probabilities of saved samples differ by {done.difference:.1e} on average.")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or checkpoints; several are compared.")],
    output: Annotated[
        OptionalPath,
        typer.Option(help="Folder to write (default: RUN/report; for several runs report-comparison, or -2, ...)."),
    ] = None,
) -> None:
    """Write what a run did, or how several differ, as one page with plots; also of a run that goes on or was killed."""
    from .report.page import report as write

    page = write(runs, output)
    Console().print(f"{page}: {page.stat().st_size / 1e6:.1f} MB", highlight=False, soft_wrap=True)


# of a run's file, what a check leaves out: it trains the whole model or adapters, in float32, without evaluation
_LEFT_OUT = ("demo_eval_every", "dtype", "attn_implementation", "load_in_4bit", "load_in_8bit")


def _settings(file: dict[str, Any]) -> dict[str, Any]:
    from ..config import GRPOConfig

    names = GRPOConfig.__dataclass_fields__.keys() - {"output_dir"}
    return {name: value for name, value in file.items() if name in names}


def _recipe_fields(file: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Of the settings of a run's file, those of the recipe and of trl's ModelConfig: the model, the data, adapters.

    Raises:
        ConfigError: a name that is no setting of either, or of GRPOConfig.
    """
    import trl

    from ..config import GRPOConfig
    from .data import OPTIONS

    of_the_recipe = {"dataset_name", "rewards", *OPTIONS, *_LEFT_OUT, *trl.ModelConfig.__dataclass_fields__}
    known = of_the_recipe | GRPOConfig.__dataclass_fields__.keys()
    for name in file:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ConfigError(f"{path}: {name!r} is no setting{f'; did you mean {near[0]!r}?' if near else '.'}")
    return {name: value for name, value in file.items() if name in of_the_recipe}


def _task(recipe: dict[str, Any]) -> dict[str, Any]:
    """Model, adapter, data, rewards and settings: the demo's where neither a model nor data is named."""
    from ..rewards.registry import resolve_rewards
    from .data import OPTIONS, load_prompts

    peft = _adapter({name: value for name, value in recipe.items() if name.startswith(("use_", "lora_"))})
    trained = "all weights" if peft is None else f"LoRA of rank {peft['r']}"
    left_out = [name for name in _LEFT_OUT if name in recipe]
    about = f", {trained}" + (f"; {', '.join(left_out)} left out" if left_out else "")
    names = ("model_name_or_path", "dataset_name")
    rewards = resolve_rewards(recipe["rewards"]) if "rewards" in recipe else None
    if not any(name in recipe for name in names):
        from ..demo.task import demo_config_defaults, load_demo

        demo = load_demo()
        settings = {**demo_config_defaults(), "global_batch_size": 32, "rollout_chunk_size": 8}
        task = {"model": demo.model_path, "dataset": demo.train_dataset, "rewards": rewards or demo.reward_funcs}
        return {**task, "config": settings, "peft": peft, "about": f"Checking the demo{about}"}
    if rewards is None or not all(name in recipe for name in names):
        given = ", ".join(f"{name}={recipe.get(name)}" for name in (*names, "rewards"))
        raise ConfigError(f"{given}: either give all three, or neither model nor data for the demo.")
    model, dataset = (recipe[name] for name in names)
    rows = load_prompts(dataset, **{keyword: recipe[name] for name, keyword in OPTIONS.items() if name in recipe})
    settings = {"global_batch_size": 16, "num_generations": 4, "max_completion_length": 64, "learning_rate": 1e-5}
    task = {"model": model, "dataset": rows[0], "rewards": rewards, "config": settings, "peft": peft}
    return {**task, "about": f"Checking {model} on {dataset}{about}"}


def _adapter(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of LoraConfig that trl makes of a file's settings; None for full training."""
    import dataclasses

    from trl import ModelConfig, get_peft_config

    config = get_peft_config(ModelConfig(**{"lora_dropout": 0.0, **settings}))
    if config is None:
        return None
    return {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config) if spec.init}


def main() -> None:
    """Entry point; a deliberate error is one message and exit status 2, without a traceback."""
    try:
        app()
    except GrpoExtError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

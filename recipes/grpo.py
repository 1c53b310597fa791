"""GRPO on any model and data: `accelerate launch recipes/grpo.py [--config FILE.yaml] [--option value ...]`.
Unlike TRL's script, nothing needs an argument: without a model and data it trains the embedded demo and shows the gain.
The whole flow in one file; every field of GRPOConfig and of trl's ModelConfig is an option (`--help`)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.demo.task import demo_config_defaults, exact_match, load_demo
from grpo_ext.errors import ConfigError, GrpoExtError, RewardError, did_you_mean
from grpo_ext.rewards.registry import resolve_rewards, reward_names
from grpo_ext.run.checkpoint import checkpoints
from grpo_ext.tools.console import Console
from grpo_ext.tools.data import OPTIONS, load_prompts
from grpo_ext.tools.quiet import quiet_libraries
from grpo_ext.tools.report.page import report_or_reason

DEMO_FOLDER = Path("runs")
DEMO_NAME = "demo"
DEMO_REWARD = "grpo_ext.demo.task.sorted_letters_reward"  # what `--rewards` is for the demo where it is not given
HELD_OUT = "held out exact match"


@dataclass
class ScriptArguments:
    """What is trained on: the data, how a row becomes a prompt, and the rewards by name."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub data set, or a .jsonl/.json/.parquet/.csv file, or a save_to_disk folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub set, such as main."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column that holds the prompt."})
    answer_column: str | None = field(default=None, metadata={"help": "Column of the gold answers; becomes `answer`."})
    answer_after: str | None = field(
        default=None, metadata={"help": "Keep of the gold what follows this marker; '####' for GSM8K."}
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "Prompt text with {column} placeholders, in place of prompt_column."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Put before every prompt."})
    conversational: bool = field(default=False, metadata={"help": "Make messages, so that the chat template applies."})
    max_samples: int | None = field(default=None, metadata={"help": "Rows to use, the first ones."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Part of the rows to hold out for evaluation."})
    rewards: list[str] = field(
        default_factory=lambda: ["exact_number"],
        metadata={"help": f"{', '.join(reward_names())}, package.module.function, or path/to/file.py:function."},
    )
    demo_eval_every: int = field(default=15, metadata={"help": "Demo: optimizer steps between held-out measurements."})


def say(text: str) -> None:
    """Print on the main process."""
    if PartialState().is_main_process:
        print(text, flush=True)


def is_demo(argv: list[str]) -> bool:
    """Whether neither a model nor data is named, on the command line or in the file of `--config`."""
    named = {arg.split("=")[0].lstrip("-").replace("-", "_") for arg in argv if arg.startswith("--")}
    if "--config" in argv[:-1]:
        path = Path(argv[argv.index("--config") + 1])
        if not path.is_file():
            raise ConfigError(f"--config {path} does not exist (looked in {Path.cwd()}); check the path.")
        content = yaml.safe_load(path.read_text())
        named |= set(content) if isinstance(content, dict) else set()
    given = named & {"model_name_or_path", "dataset_name"}
    if len(given) == 1:
        raise ConfigError(
            f"Only --{given.pop()} is given; name both --model_name_or_path and --dataset_name, or neither (demo)."
        )
    return not given


def parse(argv: list[str]) -> tuple[bool, ScriptArguments, GRPOConfig, Any]:
    """(demo or not, script arguments, GRPOConfig, ModelConfig); demo settings are defaults that options override."""
    from trl import ModelConfig, TrlParser

    argv = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    demo = is_demo(argv)
    asked_for_help = "--help" in argv or "-h" in argv  # lists the defaults of a run of one's own
    dataclasses_of_options: Any = (ScriptArguments, GRPOConfig, ModelConfig)
    parser = TrlParser(dataclasses_of_options)
    parser.error = refuse_option  # type: ignore[method-assign]
    # ModelConfig's 0.05 is noise drawn per micro-batch, which the trainer refuses
    parser.set_defaults_with_config(lora_dropout=0.0)
    if demo and not asked_for_help:
        parser.set_defaults_with_config(**demo_config_defaults(), rewards=[DEMO_REWARD])
    try:
        script, training, model, unknown = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except GrpoExtError:
        raise
    except (ValueError, TypeError) as error:  # TRL's and transformers' own refusals of a setting
        raise ConfigError(str(error)) from error
    refuse_unknown(unknown, argv, parser)
    return demo, script, training, model


def refuse_option(message: str) -> NoReturn:
    """A parser's complaint as one sentence, without the two hundred lines of its usage."""
    raise ConfigError(f"{message}; `--help` lists the options.")


def refuse_unknown(unknown: list[str], argv: list[str], parser: Any) -> None:
    """Refuse what the parser has left over: options, and names in the file of `--config`, which come as options too."""
    if not unknown:
        return
    known = [option for action in parser._actions for option in action.option_strings]
    names = [word.split("=")[0] for word in unknown]  # without values, as in --option=value
    name = next((name for name in names if name.startswith("--")), names[0])
    hint = did_you_mean(name, known, "`--help` lists the options.", show=str)
    if any(word.split("=")[0] == name for word in argv):
        raise ConfigError(f"{name} is no option; {hint}")
    file = argv[argv.index("--config") + 1]
    raise ConfigError(f"{file}: {name[2:]!r} is no setting; {hint.replace('you mean --', 'you mean ')}")


def check_output_dir(training: GRPOConfig) -> None:
    """Settle, before anything is loaded, what becomes of the checkpoints an earlier run left in the output folder."""
    folder, found = str(training.output_dir), checkpoints(str(training.output_dir))
    resume = str(training.resume_from_checkpoint).lower()
    if resume in ("none", "false"):
        training.resume_from_checkpoint = None
        if found:
            raise ConfigError(
                f"--output_dir {folder} already holds {len(found)} checkpoint(s), the last {found[-1].name}; a new run "
                f"never mixes with them. To go on with that run add `--resume_from_checkpoint {found[-1]}`; to start "
                "over name another --output_dir."
            )
    elif resume == "auto":
        training.resume_from_checkpoint = "auto" if found else None
    elif resume in ("true", "latest"):
        if not found:
            raise ConfigError(
                f"--resume_from_checkpoint {training.resume_from_checkpoint} takes the last checkpoint in --output_dir "
                f"{folder}, which holds none; name the folder of the earlier run, leave the option out, or write "
                "`auto` to begin where there is none."
            )
        training.resume_from_checkpoint = "latest"  # the trainer finds the newest whole one
    elif not Path(str(training.resume_from_checkpoint)).is_dir():
        raise ConfigError(
            f"--resume_from_checkpoint {training.resume_from_checkpoint} does not exist; name a folder checkpoint-N."
        )


def fresh_demo_folder() -> str:
    """runs/demo-1, or the first number that is free; made by the main process, named to all."""
    chosen = [""]
    if PartialState().is_main_process:
        DEMO_FOLDER.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = DEMO_FOLDER / f"{DEMO_NAME}-{number}"
            with contextlib.suppress(FileExistsError):  # taken, perhaps by a run that started this moment
                folder.mkdir()
                chosen = [str(folder)]
                break
    return broadcast_object_list(chosen)[0]


def make_trainer(training: GRPOConfig, console: Console, **what: Any) -> GRPOTrainer:
    training.disable_tqdm = True
    return console.install(GRPOTrainer(args=training, **what))


def save(trainer: GRPOTrainer, metrics: dict[str, Any]) -> None:
    """The model and its tokenizer, and metrics.json beside them."""
    folder = Path(str(trainer.args.output_dir))
    trainer.save_model(str(folder))
    if trainer.accelerator.is_main_process:
        record = {**metrics, "log_history": trainer.state.log_history}
        (folder / "metrics.json").write_text(json.dumps(record, indent=1))
        say(report_or_reason(folder))
    say(f"Saved in {folder}: the model, its tokenizer, metrics.json")


def command(name: str) -> str:
    """How to call a console script of this environment from here, activated or not."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not beside.exists():
        return name
    return os.path.relpath(beside)


def finish(trainer: GRPOTrainer) -> None:
    """Close trackers and the process group."""
    trainer.accelerator.wait_for_everyone()
    # gloo's threads let go of their last operation under the interpreter lock; destroying the group in that moment
    # deadlocks (torch 2.13)
    time.sleep(0.2)
    trainer.end()


def run_demo(script: ScriptArguments, training: GRPOConfig, model: Any, argv: list[str]) -> None:
    from trl import get_peft_config, get_quantization_config

    rewards = resolve_rewards(script.rewards, training.max_completion_length)
    say('Demo: put letters in order ("dbca>" -> "abcd"); a tiny model, warm-started by a careless teacher')
    if PartialState().device.type == "cpu":
        # a model this small gains nothing from threads, and on busy cores waiting threads make it ten times slower
        torch.set_num_threads(1)
    start_time = time.perf_counter()
    say("Making the model (about 20 s the first time, then cached) ...")
    with PartialState().main_process_first():  # which builds the model; the others find it in the cache
        task = load_demo()

    def measure(model: Any) -> dict[str, float]:
        return {HELD_OUT: exact_match(model, trainer.processing_class, task.eval_dataset)[0]}

    def show(when: str) -> float:
        """Five answers to held-out words, and how many of all are right; on the main process alone."""
        if not PartialState().is_main_process:
            return 0.0
        score, samples = exact_match(policy, trainer.processing_class, task.eval_dataset)
        say(f"{when}, held-out exact match {score:.2f}:")
        for prompt, completion, answer in samples[:5]:
            say(f"  {prompt:<8}{completion:<9}{'right' if completion == answer else 'wrong, ' + answer}")
        return score

    console = Console(measure, script.demo_eval_every)
    what = {"model": str(task.model_path), "reward_funcs": rewards, "train_dataset": task.train_dataset}
    light = {"peft_config": get_peft_config(model), "quantization_config": get_quantization_config(model)}
    trainer = make_trainer(training, console, **what, **light)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    before = show("Before")
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    after, seconds = show("After"), time.perf_counter() - start_time
    say(f"held-out exact match {before:.2f} -> {after:.2f} in {seconds:.0f} s")
    by_step = {0: before, **{step: measured[HELD_OUT] for step, measured in console.measured.items()}}
    figures = {"exact_match_before": before, "exact_match_after": after, "exact_match_by_step": by_step}
    save(trainer, {**figures, "seconds": seconds})
    if trainer.accelerator.num_processes == 1 and not training.resume_from_checkpoint:
        again = shlex.join(["recipes/grpo.py", *argv])
        say("Next, the same run on two processes, which learns the same:")
        say(f"  {command('accelerate')} launch --config_file recipes/accelerate/cpu_2.yaml {again}")
    say("The comparison of many splits:")
    say(f"  {command('grpo-ext')} check --against trl")
    finish(trainer)


def load_data(script: ScriptArguments, seed: int) -> tuple[Any, Any]:
    """(train, held-out or None) prompts, as the script's options say."""
    options = {keyword: getattr(script, name) for name, keyword in OPTIONS.items() if name != "seed"}
    return load_prompts(str(script.dataset_name), **options, seed=seed)


def run(script: ScriptArguments, training: GRPOConfig, model: Any) -> None:
    from trl import get_peft_config, get_quantization_config

    rewards = resolve_rewards(script.rewards, training.max_completion_length)
    with PartialState().main_process_first():
        train, held_out = load_data(script, training.seed)
    given: Any = training.model_init_kwargs or {}  # a dictionary by now; the option is written as JSON
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **given,
    }
    try:
        trainer = make_trainer(
            training,
            Console(),
            model=model.model_name_or_path,
            reward_funcs=rewards,
            train_dataset=train,
            eval_dataset=held_out,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    except OSError as error:
        raise ConfigError(f"--model_name_or_path {model.model_name_or_path} could not be loaded: {error}") from error
    start_time = time.perf_counter()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    save(trainer, {"seconds": time.perf_counter() - start_time, "script": dataclasses.asdict(script)})
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    finish(trainer)


def main(argv: list[str]) -> None:
    if "--log_level" not in argv:
        quiet_libraries()
    try:
        demo, script, training, model = parse(argv)
        unnamed = demo and training.output_dir in (None, "trainer_output")  # what transformers fills in
        if unnamed:
            training.output_dir = str(DEMO_FOLDER / DEMO_NAME)
        check_output_dir(training)
        if unnamed:
            training.output_dir = fresh_demo_folder()
        if demo:
            run_demo(script, training, model, argv)
        else:
            run(script, training, model)
    except GrpoExtError as error:
        # from the environment: a refusal may come before the processes know of each other
        failed_here = isinstance(error, RewardError)  # on this process alone, with the row it holds
        if failed_here and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        if failed_here or os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])

"""GRPO on any model and data: `accelerate launch recipes/grpo.py [--config FILE.yaml] [--option value ...]`.

Unlike TRL's script it needs no arguments: without a model and data it trains the embedded demo and shows the gain;
`--demo sums` and `--demo last_word` train a real model (smollm2.py). Read it from `main`, at the end of the file.
The options (`--help`) are in grpo_ext/tools/options.py: data and rewards, and every field of GRPOConfig and of TRL's
ModelConfig.
"""

import contextlib
import copy
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from grpo_ext.tools.options import check_options, end_with

if __name__ == "__main__":
    check_options(sys.argv[1:])  # now, because what follows takes seconds to import

from grpo_ext.tools import starting  # noqa: F401, isort: skip  (before TRL)

import torch
import trl
from accelerate.state import PartialState
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.batching.sizes import geometry_of
from grpo_ext.demo import EMBEDDED
from grpo_ext.demo.task import VERSION, Demo, DemoTask, cache_folder
from grpo_ext.errors import ConfigError, GrpoExtError, counted, did_you_mean
from grpo_ext.rewards.registry import resolve_rewards
from grpo_ext.run.checkpoint import checkpoints, folder_beside, run_to_resume
from grpo_ext.run.trail_comparison import SAME
from grpo_ext.runtime.collectives import from_main_process
from grpo_ext.runtime.quiet import quiet_libraries
from grpo_ext.settings import named
from grpo_ext.tools.console import Console
from grpo_ext.tools.data import load_prompts
from grpo_ext.tools.options import ScriptArguments, as_dataclasses, demo_of, load_arguments, read_settings
from grpo_ext.tools.report import report_or_reason
from grpo_ext.tools.rerun import RECIPE
from grpo_ext.tools.stock import STOCK, stock_config

REAL_DEMOS = ("sums", "last_word")  # in smollm2.py
DEMO_FOLDER = Path("runs")
DEMO_NAME = "demo"
HELD_OUT = "held out exact match"


def log(text: str) -> None:
    """Print on the main process."""
    if PartialState().is_main_process:
        print(text, flush=True)


def parse(argv: list[str]) -> tuple[Demo | None, ScriptArguments, GRPOConfig, ModelConfig]:
    """Return the demo, if any, and the arguments of each kind; a demo's settings are defaults."""
    settings = read_settings(argv)
    if (name := settings.get("demo")) in REAL_DEMOS:
        settings["demo"] = f"{os.path.relpath(Path(__file__).with_name('smollm2.py'))}:{name}"
    if "save_steps" in settings:
        settings.setdefault("save_strategy", "steps")  # the demos save nothing by default
    demo = demo_of(settings)
    script, training, loading = as_dataclasses({**(demo.settings if demo else {}), **settings})
    if script.rewards == ["none"] and training.teacher_model is None:
        raise ConfigError("--rewards none needs a teacher to learn from; set --teacher_model.")
    return demo, script, training, loading


def check_output_dir(training: GRPOConfig) -> None:
    """Resolve `resume_from_checkpoint` before anything is loaded; a new run never mixes with earlier checkpoints."""
    folder, saved = str(training.output_dir), checkpoints(str(training.output_dir))
    resume = str(training.resume_from_checkpoint).lower()
    if resume in ("none", "false"):
        training.resume_from_checkpoint = None
        if saved:
            raise ConfigError(
                f"--output_dir {folder} already holds {counted(len(saved), 'checkpoint')}, the last {saved[-1].name}; "
                f"a new run never mixes with them. To continue that run, add `--resume_from_checkpoint {saved[-1]}`; "
                "to start over, name another --output_dir."
            )
    elif resume == "auto":
        training.resume_from_checkpoint = "auto" if run_to_resume("auto", folder) else None
    elif resume in ("true", "latest"):
        if run_to_resume("latest", folder) is None:
            raise ConfigError(
                f"--resume_from_checkpoint {training.resume_from_checkpoint} takes the last checkpoint in --output_dir "
                f"{folder}, which holds none; name the folder of the earlier run, leave the option out, or write "
                "`auto` to start a new run if there is none."
            )
        training.resume_from_checkpoint = "latest"  # the trainer finds the newest complete one
    elif not Path(str(training.resume_from_checkpoint)).is_dir():
        raise ConfigError(
            f"--resume_from_checkpoint {training.resume_from_checkpoint} does not exist; name a folder checkpoint-N."
        )


def main_process_first(make: Callable[[], Any]) -> Any:
    """Call `make` on the main process, which fills the caches, then on the others; its error is raised on all."""
    results: list[Any] = []
    from_main_process(PartialState(), lambda: results.append(make()))
    return results[0] if results else make()


@contextlib.contextmanager
def naming(model: Any) -> Iterator[None]:
    """Name the model in an error of loading it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--model_name_or_path {model} could not be loaded: {error}") from error


def stock_arguments(training: GRPOConfig) -> trl.GRPOConfig:
    """The same run for stock TRL, if TRL can express it."""
    processes = PartialState().num_processes
    geometry = geometry_of(vars(training), processes)
    settings = {**vars(training), "generation_batch_size": None, "steps_per_generation": None}
    settings |= {name: getattr(geometry, name) for name in ("global_batch_size", "rollout_batch_size")}
    return trl.GRPOConfig(**stock_config(settings, processes))


def make_trainer(
    script: ScriptArguments, training: GRPOConfig, loading: ModelConfig, console: Console, argv: list[str], **parts: Any
) -> Any:
    """Build the trainer, or for a comparison in a demo TRL's own."""
    training.disable_tqdm, training.model_init_kwargs = True, load_arguments(training, loading)
    stock = script.demo is not None and script.demo_trainer == STOCK
    kind: Any = trl.GRPOTrainer if stock else GRPOTrainer
    parts["callbacks"] = [SettingsFile(argv)] if script.rerun is None else []
    parts |= {"quantization_config": get_quantization_config(loading), "peft_config": get_peft_config(loading)}
    with naming(parts["model"]):
        return console.install(kind(args=stock_arguments(training) if stock else training, **parts))


class SettingsFile(TrainerCallback):
    """Writes how a run was started into its folder, for `grpo-ext rerun`."""

    def __init__(self, argv: list[str]) -> None:
        self.content = {"script": str(Path(__file__).resolve()), "folder": os.getcwd(), "settings": read_settings(argv)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            text = json.dumps(self.content, indent=1, default=str)
            Path(str(args.output_dir), RECIPE).write_text(text)


class RerunConsole(Console):
    """Counts to the step that runs again, and shows the steps that the run logged; a rerun logs every step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def _until_last(self, state: Any) -> Any:
        shown = copy.copy(state)
        shown.max_steps = self.last
        return shown

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, self._until_last(state), control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        every = state.logging_steps
        if state.global_step == self.last or (every > 0 and state.global_step % every == 0):
            super().on_log(args, self._until_last(state), control, logs, **kwargs)


def read_case(text: str) -> dict[str, Any]:
    """The settings of `loss_type=grpo,beta=0.01`; the values of a list are separated by commas too.

    None, True and False are values, by these names, of the settings that take them.
    """
    case: dict[str, Any] = {}
    for part in re.split(r",\s*(?=\w+=)", text):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise ConfigError(f"--case {text}: write NAME=VALUE, or several, with commas between them.")
        if name in case:
            raise ConfigError(f"the case {text} names a setting twice; write two cases, or one value.")
        case[name] = value_in_case(name, value)
    return case


def value_in_case(name: str, text: str) -> Any:
    """A value from its text, as an option reads it."""
    field = GRPOConfig.__dataclass_fields__.get(name)
    if field is None:
        raise ConfigError(f"--case {name}: {did_you_mean(name, named('case'), 'it is not a setting of the loss.')}")
    if text == "None" and (field.default is None or name == "max_grad_norm"):
        return None
    if name == "scale_rewards" and text in ("True", "False"):  # it takes names too
        return text == "True"
    try:
        # "=" takes -1e-3 for a value, and only one
        values = [read_settings([f"--{name}={part}"], (GRPOConfig,))[name] for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(f"--case {name}={text}: {error}") from error
    if isinstance(values[0], list):
        return [number for value in values for number in value]
    if len(values) > 1:
        raise ConfigError(f"--case {name}={text}: the setting takes one value; use NAME=VALUE, with one of them.")
    return values[0]


def rerun(trainer: GRPOTrainer, script: ScriptArguments) -> NoReturn:
    """Run a step of the run in `output_dir` again; exit status 1 if it is not the same."""
    options = {"gradients": script.rerun_gradients, "call_rewards": script.rerun_rewards}
    result = trainer.rerun(int(script.rerun or 0), **options, cases=[*map(read_case, script.rerun_cases)])
    if trainer.accelerator.is_main_process:
        log(report_or_reason(result.folder))
    finish(trainer)
    sys.exit(result.comparison.verdict not in SAME)


def save(trainer: GRPOTrainer, metrics: dict[str, Any]) -> None:
    """Save the model, its tokenizer, metrics.json and the report."""
    folder = Path(str(trainer.args.output_dir))
    trainer.save_model(str(folder))
    if trainer.accelerator.is_main_process:
        record = {**metrics, "log_history": trainer.state.log_history}
        (folder / "metrics.json").write_text(json.dumps(record, indent=1))
        log(report_or_reason(folder))
    log(f"Saved in {folder}: the model, its tokenizer, metrics.json")


def command(name: str) -> str:
    """The path of a console script of this environment, or its name if that is on the PATH."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not beside.exists():
        return name
    return os.path.relpath(beside)


def finish(trainer: GRPOTrainer) -> None:
    """Close trackers and the process group."""
    trainer.accelerator.wait_for_everyone()
    # gloo's threads release their last operation under the interpreter lock; destroying the group at that moment
    # deadlocks (torch 2.13)
    time.sleep(0.2)
    trainer.end()


class HeldOut:
    """Measures the share of held-out prompts that a demo's model answers correctly."""

    def __init__(self, task: DemoTask, max_completion_length: int) -> None:
        self.task, self.length = task, max_completion_length
        self.tokenizer = AutoTokenizer.from_pretrained(task.model_path)
        self.seconds: list[float] = []  # of training before each measurement, without the time of measuring

    def start(self) -> None:
        """Start the clock: training begins."""
        self.measuring, self.began = 0.0, time.perf_counter()

    def measure(self, model: Any) -> dict[str, float]:
        """Measure for the console, on the main process alone."""
        now = time.perf_counter()
        self.seconds.append(now - self.began - self.measuring)
        score, _ = self.answers(model)
        self.measuring += time.perf_counter() - now
        return {HELD_OUT: score}

    @torch.no_grad()
    def answers(self, model: Any) -> tuple[float, list[tuple[Any, str, str, bool]]]:
        """Return (share of correct greedy completions, all of them: prompt, completion, answer, correct or not).

        Draws no random numbers and restores the model's mode, so a run can be measured midway.
        """
        ends = {"pad_token_id": self.tokenizer.pad_token_id, "eos_token_id": self.tokenizer.eos_token_id}
        settings = GenerationConfig(do_sample=False, max_new_tokens=self.length, **ends)
        was_training = model.training
        model.eval()
        samples: list[tuple[Any, str, str, bool]] = []
        for rows in self.task.eval_dataset.iter(batch_size=256):
            texts = prompts = rows["prompt"]
            if not isinstance(prompts[0], str):
                texts = self.tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
            options = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}
            inputs = self.tokenizer(texts, **options).to(model.device)
            output = model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            completions = self.tokenizer.batch_decode(output, skip_special_tokens=True)
            rewards = self.task.reward_funcs[0](prompts=prompts, completions=completions, answer=rows["answer"])
            samples += zip(prompts, completions, rows["answer"], [reward == 1.0 for reward in rewards], strict=True)
        model.train(was_training)
        return sum(right for *_, right in samples) / len(samples), samples

    def show(self, when: str, model: Any) -> float:
        """Print five answers to held-out prompts and the share that is correct, on the main process alone."""
        if not PartialState().is_main_process:
            return 0.0
        score, samples = self.answers(model)
        log(f"{when}, held-out exact match {score:.2f}:")
        for prompt, completion, answer, right in samples[:5]:
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            answered = " ".join(completion.split())
            log(f"  {text:<7} {answered:<8} {'right' if right else 'wrong, ' + answer}")
        return score


def run_demo(demo: Demo, script: ScriptArguments, training: GRPOConfig, model: ModelConfig, argv: list[str]) -> None:
    rewards = resolve_rewards(script.rewards, training.max_completion_length)
    if script.demo == EMBEDDED:
        if PartialState().device.type == "cpu":
            # a model this small gains nothing from threads, and on busy cores waiting threads make it ten times slower
            torch.set_num_threads(1)
        if not (cache_folder() / f"demo-{VERSION}").is_dir():
            log("Making the model (about 20 s, once) ...")
    else:
        log("Getting the model (a download the first time, then cached) ...")
    task = main_process_first(lambda: demo.load(model.model_name_or_path))
    log(f"Demo: {task.about}")
    with naming(task.model_path):
        held_out = HeldOut(task, training.max_completion_length or 512)
    console = Console(held_out.measure, script.demo_eval_every) if script.rerun is None else RerunConsole(script.rerun)
    data = {"train_dataset": task.train_dataset, "eval_dataset": task.eval_dataset}
    parts = {"model": str(task.model_path), "reward_funcs": rewards, **data}
    trainer = make_trainer(script, training, model, console, argv, **parts)
    if script.rerun is not None:
        rerun(trainer, script)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    before = held_out.show("Before", policy)
    held_out.start()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    seconds, steps = time.perf_counter() - held_out.began, trainer.state.global_step
    after = held_out.show("After", policy)
    log(f"held-out exact match {before:.2f} -> {after:.2f} in {seconds:.0f} s")
    by_step = {0: before, **{step: measured[HELD_OUT] for step, measured in console.measured.items()}}
    seconds_by_step = dict(zip(by_step, [0.0, *held_out.seconds], strict=True))
    by_step.setdefault(steps, after)
    seconds_by_step.setdefault(steps, seconds - held_out.measuring)
    figures: dict[str, Any] = {"exact_match_by_step": by_step, "seconds_by_step": seconds_by_step}
    metrics = Path(str(trainer.args.output_dir)) / "metrics.json"
    if training.resume_from_checkpoint and metrics.is_file():  # this run has ended before
        earlier = json.loads(metrics.read_text())
        figures = {name: earlier[name] | {str(n): v for n, v in figures[name].items() if n} for name in figures}
    figures |= {"exact_match_before": before, "exact_match_after": after}
    save(trainer, {**figures, "seconds": seconds, "demo": task.about})
    if trainer.accelerator.num_processes == 1 and not {"--output_dir", "--resume_from_checkpoint"} & set(argv):
        again = shlex.join(["recipes/grpo.py", *argv])
        log("Next, the same run on two processes, which learns the same:")
        log(f"  {command('accelerate')} launch --config_file recipes/accelerate/cpu_2.yaml {again}")
    log("To compare many splits:")
    named = "" if script.demo == EMBEDDED else f" --demo {script.demo}"
    log(f"  {command('grpo-ext')} check{named} --against trl")
    finish(trainer)


def run(script: ScriptArguments, training: GRPOConfig, model: ModelConfig, argv: list[str]) -> None:
    rewards = resolve_rewards(script.rewards, training.max_completion_length)
    train, held_out = main_process_first(lambda: load_prompts(script, training.seed))
    data = {"train_dataset": train, "eval_dataset": held_out}
    parts = {"model": model.model_name_or_path, "reward_funcs": rewards, **data}
    console = Console() if script.rerun is None else RerunConsole(script.rerun)
    trainer = make_trainer(script, training, model, console, argv, **parts)
    if script.rerun is not None:
        rerun(trainer, script)
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
        if script.rerun is None:
            check_output_dir(training)
        for text in script.rerun_cases:
            read_case(text)  # an unknown name is said before anything is loaded
        if unnamed:
            wanted, folder = training.resume_from_checkpoint, str(training.output_dir)
            training.output_dir = from_main_process(
                PartialState(), lambda: str(run_to_resume(wanted, folder) or folder_beside(folder, 1))
            )
        if demo:
            run_demo(demo, script, training, model, argv)
        else:
            run(script, training, model, argv)
    except GrpoExtError as error:
        end_with(error)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The processes of runs.py: each trains the runs of a launch; the main one sends the results through its pipe."""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import load_from_disk
from transformers import PrinterCallback, TrainerCallback

from ...checks.model import random_parts
from ...compat import create_model_from_path, processing_class_of
from ...config import GRPOConfig
from ...errors import ConfigError
from ...rewards.worker import unpack
from ...run.fingerprint import state_hashes
from ...run.log import RunLog
from ...trainer import GRPOTrainer
from ..stock import STOCK, stock_config
from .runs import RUNS, Run, RunResult

Builder = Callable[[Run, Path, int], Any]  # of the trainer: from a run, the folder of the launch, and its processes


def build(run: Run, folder: Path, processes: int) -> Any:
    """The trainer of a run, whose folder is by default in that of the launch."""
    defaults = {"report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    config: dict[str, Any] = {"output_dir": str(folder / run.name / "out"), **defaults, **run.config}
    if run.trainer == STOCK:
        on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True}  # bf16 needs it; our GRPOConfig sets it
        args: Any = trl.GRPOConfig(**{**on_cpu, **stock_config(config, processes)})
        trainer_class: Any = trl.GRPOTrainer
    else:
        args, trainer_class = GRPOConfig(**config), GRPOTrainer
    load = {**(config.get("model_init_kwargs") or {}), "device_map": None, "quantization_config": run.quantization}
    model = create_model_from_path(run.model_path, **load)
    trainer = trainer_class(
        model=model,
        reward_funcs=list(run.rewards),
        args=args,
        train_dataset=load_from_disk(run.data_path),
        processing_class=processing_class_of(run.model_path, args),
        quantization_config=run.quantization,
        peft_config=run.peft,
        rollout_func=run.rollout_func,
    )
    if run.trainer == STOCK and (parts := [*random_parts(trainer.model, keyed=True)]):
        raise ConfigError(
            f"stock TRL draws dropout for each batch, in sampling too ({parts[0]}), so its steps cannot be compared; "
            "set lora_dropout=0, or disable_dropout=True."
        )
    return trainer


class _Recorder(TrainerCallback):
    def __init__(self, run: Run, result: RunResult) -> None:
        self.run, self.result = run, result

    def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.run.trace and not self.result.gradients:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            if any(bool(gradient.any()) for gradient in gradients.values()):
                self.result.gradients = {name: g.detach().to("cpu", copy=True) for name, g in gradients.items()}

    def on_step_end(self, *args: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        if self.run.trace:
            self.result.trace.append(state_hashes(model, optimizer))


def train(run: Run, trainer: Any) -> RunResult:
    result = RunResult(run.name)
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().double().clone() for name, p in parameters.items()}
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Recorder(run, result))
    trainer.train(resume_from_checkpoint=run.resume_from)
    result.folder = str(trainer.args.output_dir)
    result.delta = {name: (p.detach().double() - before[name]).cpu() for name, p in parameters.items()}
    if run.trainer == STOCK and trainer.is_world_process_zero():
        _write_record(trainer)
    return result


def _write_record(trainer: Any) -> None:
    """Write what stock TRL has logged as a record, so that its runs are compared as those of this package."""
    log, args = RunLog(), trainer.args
    dtypes = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
    about = {"settings": {"bf16": args.bf16, "fp16": args.fp16}, "model": {"dtypes": dtypes}}
    log.begin(args.output_dir, None, 0, about)
    for line in trainer.state.log_history:
        if "loss" in line:
            log.step(line["step"], line, None)
    log.end(trainer.state.global_step, {"ended": "finished"})


def _outcome(run: Run, folder: Path, processes: int, build: Builder) -> RunResult:
    """The result of a run, or its error if every process has the same one."""
    trainer = None
    try:
        trainer = build(run, folder, processes)
        if trainer.accelerator.num_processes != processes:
            raise RuntimeError(f"{processes} processes were started, {trainer.accelerator.num_processes} are joined")
        return train(run, trainer)
    except Exception as error:
        refused = trainer is None and isinstance(error, ValueError)  # by this package or TRL
        if processes > 1 and not refused:
            raise  # other processes may wait in a collective: the caller ends them
        return RunResult(run.name, error=f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str], build: Builder = build) -> None:
    """Train every run of a launch. The main process sends results; each sends None at the end, or an error's text.

    `arguments`: the folder of the launch, and this process's end of the pipe.
    """
    folder, descriptor = Path(arguments[0]), int(arguments[1])
    os.set_inheritable(descriptor, False)
    caller = Connection(descriptor)

    def end_with_caller() -> None:
        caller.poll(None)  # it has closed its end of the pipe
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    processes, main_process = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    last: Any = None
    try:
        for run in unpack((folder / RUNS).read_bytes()):
            result = _outcome(run, folder, processes, build)
            if main_process:
                caller.send_bytes(pickle.dumps(result))
    except Exception as error:
        last = f"{type(error).__name__}: {error}"
    caller.send_bytes(pickle.dumps(last))
    # no normal exit: with several DDP models gloo's destructor can wait for a thread that waits for the interpreter
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The process side of runs.py: trains the runs of a folder and writes their results beside them.

Started by `runs.train` on every process; only the main process writes results.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch
import trl
from datasets import load_from_disk
from safetensors.torch import save_file
from transformers import PrinterCallback, TrainerCallback

from ...compat import create_model_from_path, processing_class_of
from ...config import GRPOConfig
from ...rewards.worker import unpack
from ...run.fingerprint import state_hashes
from ...trainer import GRPOTrainer
from ..stock import STOCK, stock_config
from .float64 import float64_throughout
from .runs import Run


def _build(run: Run, folder: Path, processes: int) -> Any:
    config: dict[str, Any] = {
        "output_dir": str(folder / run.name / "out"),
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        **run.config,
    }
    if run.trainer == STOCK:
        on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True}  # bf16 needs it; our GRPOConfig sets it
        args: Any = trl.GRPOConfig(**{**on_cpu, **stock_config(config, processes)})
        trainer_class: Any = trl.GRPOTrainer
    else:
        args, trainer_class = GRPOConfig(**config), GRPOTrainer
    load = {**(config.get("model_init_kwargs") or {}), "dtype": getattr(torch, run.dtype), "device_map": None}
    if run.quantization is not None:
        load["quantization_config"] = run.quantization
    model = create_model_from_path(run.model_path, **load)
    if run.nameless:
        model.config._name_or_path = ""
    return trainer_class(
        model=model,
        reward_funcs=list(run.rewards),
        args=args,
        train_dataset=load_from_disk(run.data_path),
        eval_dataset=load_from_disk(run.eval_path) if run.eval_path else None,
        processing_class=processing_class_of(run.model_path, args),
        quantization_config=run.quantization,
        peft_config=run.peft,
        rollout_func=run.rollout_func,
    )


class _Recorder(TrainerCallback):
    """Records gradients and hashes of the optimizer steps, as the run asks for.

    Attributes:
        gradients: of every step, as "step/parameter", on the main process.
        trace: for each step, the hash of every parameter and optimizer tensor.
    """

    def __init__(self, run: Run, trainer: Any) -> None:
        self.run, self.trainer = run, trainer
        self.gradients: dict[str, torch.Tensor] = {}
        self.trace: list[dict[str, str]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if self.run.gradients and self.trainer.accelerator.is_main_process:
            for name, p in self.trainer.accelerator.unwrap_model(self.trainer.model).named_parameters():
                if p.grad is not None:
                    self.gradients[f"{state.global_step}/{name}"] = p.grad.detach().to("cpu", copy=True)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.run.trace:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            self.trace.append(state_hashes(model, self.trainer.optimizer))


def _train(run: Run, trainer: Any, processes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    if trainer.accelerator.num_processes != processes:
        raise RuntimeError(f"{processes} processes were launched, {trainer.accelerator.num_processes} are joined")
    trainer.remove_callback(PrinterCallback)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().double().clone() for name, p in parameters.items()}
    recorder = _Recorder(run, trainer)
    trainer.add_callback(recorder)
    model = trainer.accelerator.unwrap_model(trainer.model)
    precision = float64_throughout(model) if run.dtype == "float64" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), precision:
        trainer.train(resume_from_checkpoint=run.resume_from)
        if run.eval_path:
            trainer.evaluate()
    if run.gradients and trainer.accelerator.is_main_process:
        save_file(recorder.gradients, run.gradients)
    delta = {name: (p.detach().double() - before[name]).contiguous() for name, p in parameters.items()}
    return delta, {"log": trainer.state.log_history, "trace": recorder.trace}


def main(folder: Path) -> None:
    """Train every run of `folder`; an error ends the run it happens in, on every process alike."""
    processes, main_process = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    for run in unpack((folder / "runs.pickle").read_bytes()):
        out = folder / run.name
        out.mkdir(exist_ok=True)
        delta, result = _outcome(run, folder, processes)
        if main_process:
            if delta:
                save_file(delta, out / "delta.safetensors")
            (out / "result.part").write_text(json.dumps(result, default=float))
            (out / "result.part").rename(out / "result.json")  # read as soon as it exists


def _outcome(run: Run, folder: Path, processes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters after minus before, the other fields of its `RunResult`) of a run."""
    trainer = None
    try:
        trainer = _build(run, folder, processes)
        return _train(run, trainer, processes)
    except Exception as error:
        refused = trainer is None and isinstance(error, ValueError)  # by ours or TRL's, on every process alike
        if processes > 1 and not refused:
            raise  # the others may wait in a collective: the launcher ends them
        return {}, {"error": f"{type(error).__name__}: {error}"}


def leave(folder: Path, patience_s: float = 60.0) -> None:
    """End this process once every process of the launch is done, without destroying torch's process group.

    With several DDP models the order of destruction is undefined, and gloo's destructor can wait for a thread that
    waits for the interpreter lock: a deadlock at exit, now and then.
    """
    (folder / f"done_{os.environ.get('RANK', '0')}").touch()
    processes, start = int(os.environ.get("WORLD_SIZE", "1")), time.perf_counter()
    while len(list(folder.glob("done_*"))) < processes and time.perf_counter() - start < patience_s:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_with(caller: int) -> None:
    """End this process once its caller has ended, which may have been killed."""
    while psutil.pid_exists(caller):
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    launch_folder = Path(sys.argv[1])
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        main(launch_folder)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (launch_folder / f"error_{os.environ.get('RANK', '0')}.txt").write_text(text)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, so that the launcher ends the others; see `leave`
    leave(launch_folder)

"""The process side of runs.py: trains the runs of a folder and writes their results beside it.

Started by `run_all` on every process of a launch; only the main process writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ...rewards.worker import unpack


class _Refused(Exception):
    """A run that was refused before training."""


def _build(run: Any, folder: Path, processes: int) -> Any:
    import torch
    from datasets import load_from_disk

    from ...compat import create_model_from_path, processing_class_of
    from ..stock import STOCK, stock_config

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
        from trl import GRPOConfig, GRPOTrainer

        on_cpu = {} if torch.accelerator.is_available() else {"use_cpu": True}  # ours says so itself; bf16 wants it
        args: Any = GRPOConfig(**{**on_cpu, **stock_config(config, processes)})
        trainer_class: Any = GRPOTrainer
    else:
        import grpo_ext

        args, trainer_class = grpo_ext.GRPOConfig(**config), grpo_ext.GRPOTrainer
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


def _tracer(trainer: Any, trace: list[dict[str, str]]) -> Any:
    """A callback that hashes what the trainer holds after every step."""
    from transformers import TrainerCallback

    from ...run.fingerprint import state_hashes

    class Tracer(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trace.append(state_hashes(trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer))

    return Tracer()


def _keeper(trainer: Any, gradients: dict[str, Any]) -> Any:
    """A callback that keeps the gradients of every step, as "step/parameter", on the main process."""
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            if not trainer.accelerator.is_main_process:
                return
            for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
                if p.grad is not None:
                    gradients[f"{state.global_step}/{name}"] = p.grad.detach().to("cpu", copy=True)

    return Keeper()


def _train(run: Any, trainer: Any, processes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors.torch import save_file
    from transformers import PrinterCallback

    from ...compat import float64_throughout

    if trainer.accelerator.num_processes != processes:
        raise RuntimeError(f"{processes} processes were launched, {trainer.accelerator.num_processes} are joined")
    trainer.remove_callback(PrinterCallback)
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().double().clone() for name, p in parameters.items()}
    trace: list[dict[str, str]] = []
    if run.trace:
        trainer.add_callback(_tracer(trainer, trace))
    gradients: dict[str, Any] = {}
    if run.gradients:
        trainer.add_callback(_keeper(trainer, gradients))
    start = time.perf_counter()
    model = trainer.accelerator.unwrap_model(trainer.model)
    precision = float64_throughout(model) if run.dtype == "float64" else contextlib.nullcontext()
    with contextlib.redirect_stdout(sys.stderr), precision:
        trainer.train(resume_from_checkpoint=run.resume_from)
        seconds = time.perf_counter() - start
        if run.eval_path:
            trainer.evaluate()
    if run.gradients and trainer.accelerator.is_main_process:
        save_file(gradients, run.gradients)
    delta = {name: (p.detach().double() - before[name]).contiguous() for name, p in parameters.items()}
    return delta, {"log": trainer.state.log_history, "error": None, "seconds": seconds, "trace": trace}


def main(folder: Path) -> None:
    """Train every run of `folder`; an error ends the run it happens in, on every process alike."""
    runs = unpack((folder / "runs.dill").read_bytes())
    processes, main_process = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    from safetensors.torch import save_file

    # refusals at construction reach every process alike; an error in training on one of several would leave the
    # others waiting in a collective, so there the launcher ends them all
    recoverable: type[Exception] = Exception if processes == 1 else _Refused
    for run in runs:
        (folder / run.name).mkdir(exist_ok=True)
        delta: dict[str, Any] = {}
        try:
            try:
                trainer = _build(run, folder, processes)
            except ValueError as error:  # ours and TRL's
                raise _Refused(f"{type(error).__name__}: {error}") from error
            delta, meta = _train(run, trainer, processes)
        except recoverable as error:
            text = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
            meta = {"log": [], "error": text, "seconds": 0.0}
        if main_process:
            if delta:
                save_file(delta, folder / run.name / "delta.safetensors")
            (folder / run.name / "result.json").write_text(json.dumps(meta, default=float))


def leave(folder: Path, patience_s: float = 60.0) -> None:
    """End this process once every process of the launch is done, without taking torch's process group down.

    With several models wrapped for data parallel training the order of destruction is open, and gloo's destructor can
    wait for a thread that waits for the interpreter lock: a deadlock at exit, now and then.
    """
    (folder / f"done_{os.environ.get('RANK', '0')}").touch()
    processes, start = int(os.environ.get("WORLD_SIZE", "1")), time.perf_counter()
    while len(list(folder.glob("done_*"))) < processes and time.perf_counter() - start < patience_s:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def reporting(folder: Path) -> None:
    """`main`, leaving the error of this process where the caller finds it among what the launcher prints."""
    try:
        main(folder)
    except Exception as error:
        path = folder / f"error_{os.environ.get('RANK', '0')}.txt"
        path.write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, so that the launcher ends the others; see `leave`


if __name__ == "__main__":
    reporting(Path(sys.argv[1]))
    leave(Path(sys.argv[1]))

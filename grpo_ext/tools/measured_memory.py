"""`grpo-ext plan --measure`: the peak memory of a run's largest micro-batch and of its largest `generate` call.

A trainer with random weights samples one rollout batch and takes two optimizer steps on it, in a process of its own.
Prompts and completions have their maximal lengths, and at most two micro-batches are trained: the other groups have no
variance. Training is the peak of the steps, of which the second begins with optimizer states; their size is added to
the peak of sampling, which ran without them. On an accelerator the peak is its allocator's; on a CPU (Linux) it is the
resident set of the process beyond what it was before the model was built.
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import get_peft_config

from ..batching.sizes import BatchGeometry, Settings, ceil_div
from ..demo.task import build_model, build_tokenizer
from ..errors import ConfigError, LaunchError
from ..settings import named
from ..trainer import GRPOTrainer
from .options import as_dataclasses, output_settings
from .plan import in_units, load_config, tokens_of_prompt

_QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "trail": False}


def measured_memory(settings: Settings, geometry: BatchGeometry, engine: str, prompt: int | None) -> str:
    """Say what the peaks are on this machine, of one process with this trainer's own sampling and float32 weights."""
    names = (*named("unmeasured"), "load_in_4bit", "load_in_8bit", "fsdp", "deepspeed")
    refused = {name: settings.get(name) for name in names}
    refused |= {"engine": engine != "ddp" and engine, "sequence_parallel_size": geometry.sequence_parallel_size > 1}
    if used := [name for name, value in refused.items() if value]:
        raise ConfigError(f"--measure runs one process, without {' and '.join(used)}; leave out one of the two.")
    longest = settings.get("max_completion_length") or 512
    tokens = tokens_of_prompt(load_config(settings["model_name_or_path"]), longest, prompt)
    peaks = peak_bytes(settings, geometry, tokens)
    what = "allocated on the accelerator" if torch.accelerator.is_available() else "resident in the process"
    return f"Measured peak, {what}: " + ", ".join(f"{name} {in_units(size)}" for name, size in peaks.items())


def peak_bytes(settings: Settings, geometry: BatchGeometry, prompt: int) -> dict[str, int]:
    """Measure the peaks "training" and "rollout" in a process of its own."""
    group, longest = geometry.num_generations, settings.get("max_completion_length") or 512
    trained = ceil_div(min(2 * geometry.micro_batch_size, geometry.trained_share), group) * group
    rows = max(trained, geometry.generate_size)
    changes: dict[str, Any] = {"global_batch_size": rows, "rollout_batch_size": rows, "num_generations": group}
    changes |= {"rollout_chunk_size": geometry.generate_size, "max_completion_length": longest, "max_steps": 2}
    changes |= {"num_iterations": 2, "dynamic_sampling": False, "reward_workers": 0, "disable_dropout": True, **_QUIET}
    changes["generation_kwargs"] = {**(settings.get("generation_kwargs") or {}), "min_new_tokens": longest}
    left_out = {*named("size"), *output_settings(settings)} - {"per_device_train_batch_size"}
    run = {name: value for name, value in settings.items() if name not in left_out} | changes
    command = [sys.executable, "-m", __name__, json.dumps([run, prompt, trained])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"the run of --measure failed: {''.join(done.stderr.splitlines()[-1:])}")
    return json.loads(done.stdout.splitlines()[-1])


TOKENIZER = build_tokenizer(positions=10**9)


def _resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class _Peaks(TrainerCallback):
    """The peaks of sampling and of the last step, beyond what was held when this was made."""

    def __init__(self, trained: int) -> None:
        self.trained, self.by_phase = trained, dict[str, int]()
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.before = 0 if self.device else _resident("VmRSS")

    def read(self, phase: str = "") -> None:
        """Take what was held most since the last reading."""
        if self.device:
            peak = torch.accelerator.max_memory_allocated(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
        else:
            peak = _resident("VmHWM") - self.before
            ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        self.by_phase[phase] = max(peak, self.by_phase.get(phase, 0))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.read()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.read("training")

    def reward(self, completions: list[str], **kwargs: Any) -> list[float]:
        self.read("rollout")
        return [float(place) if place < self.trained else 0.0 for place in range(len(completions))]


def _peaks_of(model: Any, settings: Settings, prompt: int, trained: int, adapter: bool) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        args: Any
        _, args, loading = as_dataclasses({**settings, "output_dir": folder})
        data = Dataset.from_dict({"prompt": ["a" * prompt] * (args.global_batch_size // args.num_generations)})
        peaks = _Peaks(trained)
        parts: dict[str, Any] = {"processing_class": TOKENIZER, "callbacks": [peaks], "train_dataset": data}
        peft_config = get_peft_config(loading) if adapter else None
        trainer: Any = GRPOTrainer(model(), peaks.reward, args=args, peft_config=peft_config, **parts)
        trainer.train()
    states = [value for values in trainer.optimizer.state.values() for value in values.values()]
    peaks.by_phase["rollout"] += sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    return {phase: peaks.by_phase[phase] for phase in ("training", "rollout")}


def main() -> None:
    settings, prompt, trained = json.loads(sys.argv[1])
    config = load_config(settings["model_name_or_path"])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.get_text_config(), name, getattr(TOKENIZER, name))
    positions = prompt + settings["max_completion_length"]
    # a small model first: what libraries load and allocate once is not the model's
    _peaks_of(lambda: build_model(TOKENIZER, 0, positions), settings, prompt, trained, adapter=False)
    model = partial(AutoModelForCausalLM.from_config, config, dtype=torch.float32)
    print(json.dumps(_peaks_of(model, settings, prompt, trained, adapter=True)))


if __name__ == "__main__":
    main()

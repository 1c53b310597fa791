"""One step whose completions a colocated vLLM engine samples on the GPU: log-probabilities, masks, the adapter.

Each case is a process, because an engine's threads outlive its trainer. In a rehearsal a stand-in of TRL's engine
samples (tests/support/colocated.py), which shows that the script works and nothing of vLLM.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.support.colocated import stand_in
from tests.support.gpu import TOY
from tests.support.launch import ROOT, environment
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, change, make

from .results import NOT_RUN, TAIL, not_ended, of_failures, reason_in, write

SETTINGS: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
SETTINGS |= {"vllm_max_model_length": 128, "max_completion_length": 16, "per_device_train_batch_size": 8}
SETTINGS |= {"max_steps": 2, "learning_rate": 1e-2, "model_init_kwargs": {"dtype": "float32"}, "bf16": False}
CASES: dict[str, dict[str, Any]] = {
    "weights sent": {},
    "masks replayed": {"top_p": 0.9, "top_k": 20, "sampling_mask": "replay"},
    "adapter sent alone": {"vllm_lora": True, "learning_rate": 0.1},
    "adapter merged": {"vllm_lora": False, "learning_rate": 0.1},
}
MISSING = "vLLM is not installed: its wheel needs one version of torch, and gigabytes that wheels/ does not hold"
LOGGED = "sampling/"
RESERVE = 5.0  # seconds of the share that are left for the last figures
# what the kernels of vLLM take; the stand-in has a shape of its own
SHAPE = {} if TOY else {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
if TOY:
    del CASES["adapter sent alone"]  # in a class of vLLM's


def train(folder: Path, case: str) -> None:
    """What the process of a case runs."""
    if TOY:
        stand_in(setattr_of_module)
    torch.manual_seed(0)  # of an adapter's start
    model: Any = folder / "model"
    tiny_model(**SHAPE).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    parts = {"peft_config": LoraConfig(**LORA)} if case.startswith("adapter") else {}
    trainer = make(folder / "run", str(model), use_cpu=TOY, **parts, **{**SETTINGS, **CASES[case]})
    moved = float(change(trainer).norm())
    steps = [line for line in trainer.state.log_history if "loss" in line]
    logged = {name: [step[name] for step in steps] for name in steps[0] if name.startswith(LOGGED)}
    (folder / "result.json").write_text(json.dumps({"moved": moved, **logged}, default=float))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process


def setattr_of_module(owner: Any, name: str, value: Any, raising: bool = True) -> None:
    """What a test's monkeypatch does, for a process that ends."""
    setattr(owner, name, value)


def main(file: Path, seconds: float) -> None:
    if not TOY and importlib.util.find_spec("vllm") is None:
        write(file, {"status": NOT_RUN, "reason": MISSING, "figures": {}})
        return
    end = time.monotonic() + seconds - RESERVE
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    errors: dict[str, str] = {}
    for done, case in enumerate(CASES):
        allowed = max(end - time.monotonic(), 1.0) / (len(CASES) - done)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.gpu.vllm_step", folder, case]
            quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
            try:
                env = environment(**quiet)
                ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=allowed)
                text = ended.stderr
                reason = reason_in(text) or "it ended without a result"
            except subprocess.TimeoutExpired as late:
                text = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
                reason = not_ended(allowed)
            result = Path(folder, "result.json")
            if result.exists():
                figures[case] = json.loads(result.read_text())
            else:
                failed[case] = reason
                errors[case] = text[-TAIL:]
        write(file, {"figures": figures, **({"errors": errors} if errors else {}), **of_failures(failed)})


if __name__ == "__main__":
    if sys.argv[2] in CASES:
        train(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))

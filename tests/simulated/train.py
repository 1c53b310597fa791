"""Run by test_simulated_gpu.py in a process of its own: one training on the simulated device, what it recorded as JSON.

    python -m tests.simulated.train '{"settings": {"forward": "packed"}, "micro_batch": 4}'

With ACCELERATE_TORCH_DEVICE=cuda:0 on the simulated device, else on the CPU itself. `"planted": true` adds to every
forward a copy to the device, an operator of two devices, and a running sum of floats.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import datasets
import peft
import torch
import transformers

from grpo_ext.forward import attention, shared_prefix
from tests.simulated.device import LEDGER, ReferenceKernels, SimulatedTensor, simulated_gpu
from tests.support import varlen
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, make

SIMULATED = os.environ.get("ACCELERATE_TORCH_DEVICE", "").startswith("cuda")
BATCH = 16  # completions of a step
STEPS = 2


class Steps(transformers.TrainerCallback):
    """What was recorded of each step, up to the optimizer's."""

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        LEDGER.reset()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        waits = {f"{name} {place}": count for (name, place), count in LEDGER.waits.items()}
        copies = {"to_device": dict(LEDGER.to_device), "to_host": dict(LEDGER.to_host)}
        self.recorded.append({"launches": LEDGER.launches.total(), "waits": waits, **copies})


def _kernel(reference: Any) -> Any:
    """A reference of a CUDA kernel, on the values in CPU memory; one launch."""
    if not SIMULATED:
        return reference

    def run(*args: Any, **kwargs: Any) -> Any:
        LEDGER.launches["varlen"] += 1
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            args, kwargs = torch.utils._pytree.tree_map_only(SimulatedTensor, lambda t: t.on_cpu, (args, kwargs))
            outputs = reference(*args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, SimulatedTensor, outputs)

    return run


@contextmanager
def kernels(varlen_operator: bool) -> Iterator[None]:
    """Inside, packs attend as on a GPU, and attention has the same bits everywhere.

    Args:
        varlen_operator: of torch runs. It takes no float32, and older GPUs (T4, V100) do not have it.
    """
    with (
        mock.patch.object(attention, "takes_varlen", return_value=varlen_operator),
        mock.patch.object(shared_prefix, "_varlen", _kernel(varlen.forward)),
        mock.patch.object(shared_prefix, "_varlen_backward", _kernel(varlen.backward)),
        ReferenceKernels(),
    ):
        yield


def _planted(module: Any, args: Any, kwargs: Any) -> None:
    """Before a forward: another copy to the device, an operator of two devices, and a running sum of floats."""
    ids = kwargs["input_ids"]
    copied = torch.zeros(3).to(ids.device)
    (copied + torch.zeros(3)).cumsum(0)


def train(
    folder: str,
    model: Any,
    settings: dict[str, Any],
    micro_batch: int = 4,
    lora: bool = False,
    evaluate: bool = False,
    planted: bool = False,
) -> tuple[list[dict[str, Any]], list[float]]:
    """What each step recorded, and the sum of every weight matrix at the end."""
    if planted:
        model.base_model.register_forward_pre_hook(_planted, with_kwargs=True)
    steps = Steps()
    prompts = ["abcdefgh>", "abcdabcdabcd>", "abcd>", "ab>"] * 6
    data = datasets.Dataset.from_dict({"prompt": prompts, "answer": ["a" * 24] * len(prompts)})
    parts = {
        "train_dataset": data,
        "eval_dataset": data.select(range(5)) if evaluate else None,
        "callbacks": [steps],
        "peft_config": peft.LoraConfig(**LORA) if lora else None,
    }
    sizes = {"global_batch_size": BATCH, "per_device_train_batch_size": micro_batch, "max_completion_length": 24}
    others = {"max_steps": STEPS, "seed": 42, "use_cpu": False}
    trainer = make(folder, model, **parts, **sizes, **others, **settings)
    trainer.train()
    if evaluate:
        trainer.evaluate()
    weights = [p.on_cpu if isinstance(p, SimulatedTensor) else p for p in trainer.model.parameters()]
    return steps.recorded, [float(weight.detach().double().sum()) for weight in weights]


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # a module that is moved to tensors of another class unties its weights
    model = tiny_model(case.pop("model", "llama"), tie_word_embeddings=False, **case.pop("shape", {}))
    device = simulated_gpu() if SIMULATED else nullcontext()
    with tempfile.TemporaryDirectory() as folder, device, kernels(case.pop("varlen", True)):
        steps, weights = train(folder, model, **case)
    mixed, refused = ([f"{name} {place}" for name, place in counts] for counts in (LEDGER.mixed, LEDGER.refused))
    print(json.dumps({"steps": steps, "weights": weights, "mixed": mixed, "refused": refused}))


if __name__ == "__main__":
    main()

"""Run by test_simulated_gpu.py in a process of its own: trainings on the simulated device, what each recorded as JSON.

    python -m tests.simulated.train '{"packed": {"settings": {"forward": "packed"}, "micro_batch": 4}}'

With ACCELERATE_TORCH_DEVICE=cuda:0 on the simulated device, else on the CPU itself. `"planted": true` adds to every
forward a copy to the device, an operator of two devices, and a running sum of floats.
"""

import copy
import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import datasets
import peft
import torch
import transformers

from grpo_ext.forward import attention, dropout, lm_head, shared_prefix
from grpo_ext.rollouts import ahead
from tests.simulated.device import LEDGER, SimulatedTensor, reference_attention, simulated_gpu, thread_modes
from tests.support import varlen
from tests.support.architectures import architecture
from tests.support.decoding import decoding
from tests.support.images import FAMILIES, image_model, image_processor, image_rows, picture_reward
from tests.support.tiny import TINY, tiny_model
from tests.support.trainers import LORA, make

SIMULATED = os.environ.get("ACCELERATE_TORCH_DEVICE", "").startswith("cuda")
BATCH = 16  # completions of a step
STEPS = 2


class Steps(transformers.TrainerCallback):
    """What was recorded of each step, from its completions to the optimizer's."""

    def __init__(self) -> None:
        self.recorded: list[dict[str, Any]] = []

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


def _masked(values: torch.Tensor, keys_N: torch.Tensor, module: int, below: int, scale: float) -> torch.Tensor:
    drop = dropout.dropped(keys_N ^ module, values.size(-1), below)
    return (values * scale).masked_fill(drop.view(values.shape), 0.0)


@contextmanager
def kernels(varlen_operator: bool) -> Iterator[None]:
    """Inside, packs attend as on a GPU, and attention has the same bits everywhere.

    TRL's Triton head needs a real GPU. The tiled head takes its place, also where Triton is installed. The varlen
    operator of torch takes no float32, and older GPUs (T4, V100) do not have it.
    """
    with (
        mock.patch.object(attention, "takes_varlen", return_value=varlen_operator),
        mock.patch.object(lm_head, "triton_head", return_value=None),
        mock.patch.object(shared_prefix, "_varlen", _kernel(varlen.forward)),
        mock.patch.object(shared_prefix, "_varlen_backward", _kernel(varlen.backward)),
        mock.patch.object(dropout, "_kernel", return_value=_kernel(_masked)),
        mock.patch.object(ahead.RolloutThread, "_run", _in_thread),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", reference_attention),
    ):
        yield


_run_thread = ahead.RolloutThread._run


def _in_thread(self: Any) -> None:
    """The thread that samples ahead; what torch does there is its own."""
    with thread_modes() if SIMULATED else nullcontext():
        _run_thread(self)


def _planted(module: Any, args: Any, kwargs: Any) -> None:
    """Before a forward: another copy to the device, an operator of two devices, and a running sum of floats."""
    ids = kwargs["input_ids"]
    copied = torch.zeros(3).to(ids.device)
    (copied + torch.zeros(3)).cumsum(0)


def _model(kind: str, shape: dict[str, Any]) -> Any:
    """A tiny model; the weights of its embedding and head are two: moved to tensors of another class, they part."""
    if kind in FAMILIES:
        return image_model(kind)
    tiny = tiny_model if kind in TINY else architecture
    return tiny(kind, tie_word_embeddings=False, **shape)


def train(
    folder: str,
    network: Any,
    model: str,
    settings: dict[str, Any],
    micro_batch: int = 4,
    lora: bool = False,
    rate: float = 0.0,  # of LoRA's dropout
    teacher: bool = False,
    evaluate: bool = False,
    planted: bool = False,
    compact: bool = True,  # decoding
    max_steps: int = STEPS,
) -> tuple[list[dict[str, Any]], str]:
    """What each step recorded, and a digest of the weights at the end."""
    if planted:
        network.base_model.register_forward_pre_hook(_planted, with_kwargs=True)
    steps = Steps()
    prompts = ["abcdefgh>", "abcdabcdabcd>", "abcd>", "ab>"] * 6
    data = datasets.Dataset.from_dict({"prompt": prompts, "answer": ["a" * 24] * len(prompts)})
    parts: dict[str, Any] = {"train_dataset": data, "callbacks": [steps]}
    if model in FAMILIES:
        pictures = {"train_dataset": image_rows(8, (1, 0, 2)), "processing_class": image_processor(model)}
        parts |= {**pictures, "reward": picture_reward}
    parts["eval_dataset"] = parts["train_dataset"].select(range(5)) if evaluate else None
    parts["peft_config"] = peft.LoraConfig(**LORA, lora_dropout=rate) if lora else None
    parts |= {"teacher_model": copy.deepcopy(network)} if teacher else {}
    sizes = {"global_batch_size": BATCH, "per_device_train_batch_size": micro_batch, "max_completion_length": 10}
    others = {"max_steps": max_steps, "seed": 42, "use_cpu": False}
    trainer = make(folder, network, **parts, **sizes, **others, **settings)
    prepare = trainer._prepare_inputs

    def prepared(rows: Any) -> Any:
        completions = prepare(rows)
        LEDGER.reset()  # a step begins
        return completions

    trainer._prepare_inputs = prepared
    with decoding(compact):
        trainer.train()
        if evaluate:
            trainer.evaluate()
    digest = hashlib.sha256()
    for p in trainer.model.parameters():
        weight = p.on_cpu if isinstance(p, SimulatedTensor) else p
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return steps.recorded, digest.hexdigest()


def run(network: Any, case: dict[str, Any]) -> dict[str, Any]:
    """A training, and what it recorded; the end of its traceback where it fails."""
    torch.manual_seed(0)  # of an adapter's start
    for counts in vars(LEDGER).values():
        counts.clear()
    try:
        with tempfile.TemporaryDirectory() as folder, kernels(case.pop("varlen")):
            steps, weights = train(folder, network, **case)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}
    mixed, refused = ([f"{name} {place}" for name, place in counts] for counts in (LEDGER.mixed, LEDGER.refused))
    return {"steps": steps, "weights": weights, "mixed": mixed, "refused": refused}


def main() -> None:
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {"model": "llama", "shape": {}, "settings": {}, "varlen": True}
    cases = {name: {**defaults, **case} for name, case in json.loads(sys.argv[1]).items()}
    networks = {name: _model(case["model"], case.pop("shape")) for name, case in cases.items()}
    with simulated_gpu() if SIMULATED else nullcontext():
        results = {name: run(networks[name], case) for name, case in cases.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()

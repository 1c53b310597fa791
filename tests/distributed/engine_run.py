"""Run by test_engines.py on every process: trains under the engine of the launch and writes what came out.

FSDP2 on the CPU needs a switch that is for tests alone: Accelerate turns FSDP on for accelerators only, so the kind of
launch it sees (several CPU processes) is given another name.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import accelerate
import accelerate.state
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

PICTURES = {"per_prompt": (1, 2), "shapes": ((8, 8), (16, 8))}  # no prompt without


def fsdp_on_the_cpu() -> None:
    inner = accelerate.state.PartialState.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    accelerate.state.PartialState.__init__ = built  # type: ignore[method-assign]


class Gradients(TrainerCallback):
    """The most that is held of gradients between two micro-batches, as a share of those of the whole model."""

    share = 0.0

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        grads = [parameter.grad for parameter in model.parameters()]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                fsdp = vars(module._get_fsdp_state())
                groups = fsdp.get("_fsdp_param_groups") or [
                    fsdp.get("_fsdp_param_group")
                ]  # torch 2.11 has one, or None
                for part in (part for group in groups if group is not None for part in group.fsdp_params):
                    grads += [part.unsharded_accumulated_grad, part._unsharded_param.grad]
        local = [getattr(grad, "_local_tensor", grad).untyped_storage() for grad in grads if grad is not None]
        held = {storage.data_ptr(): storage.nbytes() for storage in local}  # those of a layer share one
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        self.share = max(self.share, sum(held.values()) / whole)


def save(folder: Path, number: int, trainer: Any, share: float, saves_shards: bool, error: str | None = None) -> None:
    """Write what a run has learned and logged; the engine does not put weights together that it saves in shards."""
    state = {} if saves_shards else trainer.accelerator.get_state_dict(trainer.model_wrapped)
    parameters = list(trainer.model.parameters())
    if trainer.accelerator.is_main_process:
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
        save_file(plain, folder / f"{number}.safetensors")
        about = {
            "engine": trainer.accelerator.distributed_type.value,
            "log": trainer.state.log_history,
            "gradients": share,
            "error": error,
            "sharded": any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in parameters),
        }
        (folder / f"{number}.json").write_text(json.dumps(about, default=float))


def train(trainer: Any, run: dict[str, Any]) -> str | None:
    """Train as the job says; the error of a run that is spoiled on the last process."""
    from grpo_ext.errors import PrecisionError
    from grpo_ext.step import gradients
    from tests.support.trainers import Overflow

    fp16 = run["config"].get("fp16")
    if fp16:
        trainer.accelerator.scaler.value, trainer.accelerator.scaler.patience = 1024.0, 1
    if (fp16 or run["spoiled"]) and trainer.args.process_index == trainer.args.world_size - 1:
        trainer.add_callback(Overflow(1))
    # the control: gradients that wait for the last micro-batch
    kinds = SimpleNamespace(FSDP=None, DEEPSPEED=DistributedType.DEEPSPEED)
    with mock.patch.object(gradients, "DistributedType", kinds) if run["whole"] else nullcontext():
        try:
            trainer.rerun(3) if run["again"] else trainer.train(resume_from_checkpoint=run["resume"])
        except PrecisionError as caught:
            if not run["spoiled"]:
                raise
            return str(caught)
    return None


def main(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from grpo_ext import GRPOConfig, GRPOTrainer
    from tests.support import tool_runs
    from tests.support.cases import LORA
    from tests.support.images import FAMILIES, image_processor, image_rows, picture_reward
    from tests.support.tiny import letter_reward, prompts, tiny_tokenizer

    job = json.loads((folder / "job.json").read_text())
    for number, run in enumerate(job["runs"]):
        os.environ.update(run["env"])
        args = GRPOConfig(**run["config"])
        family = Path(run["model"]).name
        with_images = family in FAMILIES
        kind = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
        model = kind.from_pretrained(run["model"], dtype=torch.float32)
        if run["changed"]:
            for parameter in model.parameters():  # ZeRO-3's own part
                getattr(parameter, "ds_tensor", parameter.data).mul_(1.2)
        if run["nameless"]:
            model.config._name_or_path = ""
        parts: dict[str, Any] = {
            "reward_funcs": picture_reward if with_images else letter_reward,
            "train_dataset": image_rows(run["prompts"], **PICTURES) if with_images else prompts(run["prompts"]),
            "processing_class": image_processor(family) if with_images else tiny_tokenizer(),
        }
        if run["tools"]:
            parts = tool_runs.parts("company")
        peft = LoraConfig(**LORA, lora_dropout=run["dropout"], init_lora_weights=run["start"]) if run["lora"] else None
        trainer = GRPOTrainer(model=model, args=args, peft_config=peft, **parts)
        trainer.add_callback(held := Gradients())
        error = train(trainer, run)
        save(folder, number, trainer, held.share, bool(run["env"]), error)
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # the one of CPUs is for inference, and compiled for most of a minute
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fsdp_on_the_cpu()
    from tests.support.launch import leave
    from tests.support.trainers import native_fp16

    accelerate.Accelerator.__init__ = native_fp16(accelerate.Accelerator.__init__)  # type: ignore[method-assign]
    main(Path(sys.argv[1]))
    leave(Path(sys.argv[1]))

"""Run by test_engines.py on every process: trains under the engine of the launch and writes what came out.

FSDP2 on the CPU needs a switch that is for tests alone: Accelerate turns FSDP on for accelerators only, so the kind of
launch it sees (several CPU processes) is given another name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate.state
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig
from safetensors.torch import save_file


def fsdp_on_the_cpu() -> None:
    inner = accelerate.state.PartialState.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if self._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    accelerate.state.PartialState.__init__ = built  # type: ignore[method-assign]


def main(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_ext import GRPOConfig, GRPOTrainer
    from tests.helpers import letter_reward, prompts

    job = json.loads((folder / "job.json").read_text())
    for number, run in enumerate(job["runs"]):
        os.environ.update(run["env"])
        args = GRPOConfig(str(folder / run["name"]), **run["config"])
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
            reward_funcs=letter_reward,
            args=args,
            train_dataset=prompts(run["prompts"]),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            peft_config=LoraConfig(**run["lora"]) if run["lora"] else None,
        )
        trainer.train(resume_from_checkpoint=run["resume"])
        # weights that are saved in shards are not put together by the engine
        state = {} if run["env"] else trainer.accelerator.get_state_dict(trainer.model_wrapped)
        parameters = list(trainer.model.parameters())
        if trainer.accelerator.is_main_process:
            plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
            save_file(plain, folder / f"{number}.safetensors")
            about = {
                "engine": trainer.accelerator.distributed_type.value,
                "log": trainer.state.log_history,
                "sharded": any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in parameters),
            }
            (folder / f"{number}.json").write_text(json.dumps(about, default=float))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fsdp_on_the_cpu()
    from grpo_ext.tools.run_worker import leave

    main(Path(sys.argv[1]))
    leave(Path(sys.argv[1]))

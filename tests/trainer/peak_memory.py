"""Run by test_memory_after_resume.py: trains a little, resumed or not, and writes the peak memory of this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.run.state import RunState
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer

SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS = {
    "full": {"num_hidden_layers": 2, "intermediate_size": 5120},
    "lora": {"num_hidden_layers": 2, "intermediate_size": 2048},  # an adapter as large as the model
}


class SavesOnce(TrainerCallback):
    """A checkpoint of the first step alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save and state.global_step == 1


class HoldsLoaded(GRPOTrainer):
    """Keeps alive what a checkpoint has loaded: the optimizer's state, and the weights that sample ahead."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        restore = RunState.restore

        def hold(state: RunState, trainer: Any) -> None:
            restore(state, trainer)
            self.held.append(state)

        RunState.restore = hold  # type: ignore[method-assign]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.held = [torch.load(f"{checkpoint}/optimizer.pt", weights_only=True)] if not self.args.rollout_lag else []


def peak() -> float:
    """The most memory that this process has had in RAM, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts what it was before exec too
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main(folder: Path, weights: str, lag: int, how: str) -> None:
    """Train three steps (`how`: "whole"), or the last two of them ("resumed", or "held": a control)."""
    whole = how == "whole"
    model = tiny_model("llama", **SIZES, **LAYERS[weights], initializer_range=0.02)
    adapter = LoraConfig(r=1024, target_modules="all-linear", task_type="CAUSAL_LM") if weights == "lora" else None
    sizes = {"global_batch_size": 4, "rollout_chunk_size": 4, "per_device_train_batch_size": 4}
    saving = {"save_strategy": "steps", "save_steps": 1} if whole else {}
    settings = {"max_completion_length": 3, "max_steps": 3, "rollout_lag": lag, "use_cpu": True, **sizes, **saving}
    trainer = (HoldsLoaded if how == "held" else GRPOTrainer)(
        model=model,
        reward_funcs=letter_reward,
        args=GRPOConfig(**config_kwargs(folder / "out", **settings)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        peft_config=adapter,
        callbacks=[SavesOnce()],
    )
    trainer.train(resume_from_checkpoint=None if whole else str(folder / "out" / "checkpoint-1"))
    tensors = [value for state in trainer.optimizer.state.values() for value in state.values()]
    measured = {"peak": peak(), "optimizer": sum(value.nbytes for value in tensors) / 2**20}
    (folder / f"{how}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])

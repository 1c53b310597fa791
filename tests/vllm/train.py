"""Run by test_vllm.py on one or two processes: trains with vLLM rollouts and writes what was sampled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import grpo_ext.sampling.turns as sampling
from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.vllm.on_the_cpu import in_float32, keep_weights


def main(folder: Path, control: str) -> None:
    """Train; `control` leaves something out: "" nothing, "seeds" the seeds, "sync" the new weights."""
    keep_weights()
    in_float32()
    if control == "seeds":
        sampling.seeded = lambda generation, *args: generation
    sampled: list[tuple[str, list[int]]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: Any, **kwargs: Any) -> list[float]:
        sampled.extend((prompt, list(ids)) for prompt, ids in zip(prompts, completion_ids))
        return letter_reward(prompts, completions)

    # `head_dim` 64 is what vLLM's CPU attention takes; vLLM loads the model by name
    model = folder / "model"
    args = GRPOConfig(
        str(folder / "out"),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=128,
        num_generations=4,
        global_batch_size=16,
        max_completion_length=16,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        max_steps=3,
        seed=3,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(22),
        processing_class=tiny_tokenizer(),
    )
    if control == "sync":
        trainer.vllm_generation.sync_weights = lambda: None
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    rank = trainer.accelerator.process_index
    found = {"sampled": sampled, "log": trainer.state.log_history, "moved": float((after - before).norm())}
    (folder / f"rank_{rank}.json").write_text(json.dumps(found, default=float))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process


def save_model(folder: Path) -> None:
    """The model of these tests, where vLLM finds it."""
    tiny_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")

"""Run by test_vllm.py on one or two processes: trains with vLLM rollouts and writes what was sampled."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.rollouts import vllm
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON
from tests.vllm.from_file import send_by_file
from tests.vllm.on_the_cpu import in_float32, keep_weights


def main(folder: Path, control: str, server: str = "", lag: int = 0) -> None:
    """Train.

    Args:
        control: leaves something out: "" nothing, "seeds" the seeds, "sync" the new weights.
        server: that samples, instead of an engine of this process; lag: `rollout_lag`.
    """
    keep_weights()
    in_float32()
    engine: dict[str, Any] = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 128}
    if server:
        send_by_file(folder)
        engine = {"vllm_mode": "server", "vllm_server_base_url": server, "rollout_lag": lag, "max_steps": 5}
    if control == "seeds":
        vllm.seeded = lambda *args: contextlib.nullcontext()
    sampled: list[tuple[str, list[int]]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: Any, **kwargs: Any) -> list[float]:
        sampled.extend((prompt, list(ids)) for prompt, ids in zip(prompts, completion_ids))
        return letter_reward(prompts, completions)

    # `head_dim` 64 is what vLLM's CPU attention takes; vLLM loads the model by name
    model = folder / "model"
    args = GRPOConfig(
        str(folder / "out"),
        use_vllm=True,
        num_generations=4,
        global_batch_size=16,
        max_completion_length=16,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        adam_epsilon=ADAM_EPSILON,
        seed=3,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **{"max_steps": 3, **engine},
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(22),
        processing_class=tiny_tokenizer(),
    )
    if control == "sync":
        type(trainer.vllm_generation).sync_weights = lambda self: None
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
    folder, control, *server = sys.argv[1:]
    main(Path(folder), control, *server[:1], *map(int, server[1:]))

"""Run by test_vllm.py on one or two processes: trains with vLLM rollouts and writes what was sampled."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, change, make
from tests.vllm.on_the_cpu import in_float32, send_by_file

SETTINGS: dict[str, Any] = {
    "use_vllm": True,
    "max_steps": 3,
    "max_completion_length": 16,
    "per_device_train_batch_size": 3,
    "learning_rate": 1e-2,
    "model_init_kwargs": {"dtype": "float32"},
}
COLOCATE = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": 128}


def main(folder: Path, control: str, server: str = "", lag: int = 0) -> None:
    """Train.

    Args:
        control: leaves something out: "" nothing, "seeds" the seeds, "sync" the new weights, "unchecked" the check too.
            With "alone" and "merged" an adapter is trained, and sent so; "masks" replays sampling masks.
        server: that samples, instead of an engine of this process; lag: `rollout_lag`.
    """
    in_float32()
    engine: dict[str, Any] = dict(COLOCATE)
    if server:
        send_by_file(folder)
        engine = {"vllm_mode": "server", "vllm_server_base_url": server, "rollout_lag": lag, "max_steps": 5}
    engine["vllm_check"] = control != "unchecked"
    if control == "seeds":
        engine["vllm_seeds"] = False
    if control == "masks":
        engine |= {"top_p": 0.9, "sampling_mask": "replay"}
    if control in ("alone", "merged"):
        engine |= {"vllm_lora": control == "alone", "learning_rate": 0.1}
    sampled: list[tuple[str, list[int]]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: Any, **kwargs: Any) -> list[float]:
        sampled.extend((prompt, list(ids)) for prompt, ids in zip(prompts, completion_ids))
        return letter_reward(prompts, completions)

    # vLLM loads the model by name
    parts = {"model": str(folder / "model"), "reward": reward, "train_dataset": prompts(22)}
    if control in ("alone", "merged"):
        torch.manual_seed(0)  # of the adapter's start
        parts["peft_config"] = LoraConfig(**LORA)
    trainer = make(folder / "out", **parts, **{**SETTINGS, **engine})
    if control in ("sync", "unchecked"):
        type(trainer.vllm_generation).sync_weights = lambda self: None
    moved = float(change(trainer).norm())
    result = {"sampled": sampled, "log": trainer.state.log_history, "moved": moved}
    (folder / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(result, default=float))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads would keep the process


def save_model(folder: Path) -> None:
    """The model of these tests, where vLLM finds it; its CPU attention takes a `head_dim` of 64."""
    tiny_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    folder, control, *server = sys.argv[1:]
    main(Path(folder), control, *server[:1], *map(int, server[1:]))

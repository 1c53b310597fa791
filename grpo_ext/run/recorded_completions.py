"""A few completions with their log-probabilities, kept in every checkpoint: what an exported model has to reproduce.

Written by the trainer under any engine, read by `grpo-ext export`, which scores the same tokens with the model it
wrote.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file

from ..config import GRPOConfig
from ..errors import CheckpointError
from ..forward.reference import base_model_of
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import any_process, shards_parameters
from ..runtime.out_of_memory import is_out_of_memory

RECORDED = "grpo_ext_samples.safetensors"
_COUNT = 4


@dataclass
class RecordedCompletions:
    """See the module.

    Attributes:
        prompts, completions: token ids of each.
        logps: log-probability of every token of each completion.
        dtype: in which the recording model computed ("float32", "bfloat16", "float16").
        temperature: the logits were divided by it.
        quantised: how the weights were, as transformers' quantization_config, or only whether they were; a plain copy
            of them scores differently.
    """

    prompts: list[torch.Tensor]
    completions: list[torch.Tensor]
    logps: list[torch.Tensor]
    dtype: str
    temperature: float
    quantised: dict[str, Any] | bool = False

    def save(self, folder: str | Path) -> None:
        """Write into a checkpoint's folder."""
        tensors: dict[str, torch.Tensor] = {}
        for i, (prompt, completion, logps) in enumerate(zip(self.prompts, self.completions, self.logps)):
            tensors |= {f"{i}/prompt": prompt, f"{i}/completion": completion, f"{i}/logps": logps}
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        about = {"count": str(len(self.prompts)), "dtype": self.dtype, "temperature": json.dumps(self.temperature)}
        about["quantised"] = json.dumps(self.quantised)
        save_file(plain, Path(folder) / RECORDED, metadata=about)

    @classmethod
    def load(cls, folder: str | Path) -> RecordedCompletions | None:
        """Read from a checkpoint's folder; None if it holds none.

        Raises:
            CheckpointError: they are there and cannot be read.
        """
        path = Path(folder) / RECORDED
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()

                def read(name: str) -> list[torch.Tensor]:
                    return [file.get_tensor(f"{i}/{name}") for i in range(int(about["count"]))]

                tokens, logps = (read("prompt"), read("completion")), read("logps")
            return cls(*tokens, logps, about["dtype"], json.loads(about["temperature"]), json.loads(about["quantised"]))
        except Exception as error:  # whatever the parser raises
            raise CheckpointError(f"{path} is broken: {error}.") from None


def rows_to_record(rollout: RolloutBatch) -> list[int]:
    """A few completions of at least the median length, the shortest such with their prompts.

    None that attention sees with gaps, which a plain forward does not reproduce.
    """
    prompts, gaps = rollout.prompt_lengths, rollout.gaps
    lengths = {row: n for row, n in enumerate(rollout.completion_lengths) if n and not gaps[row]}
    if not lengths:
        return []
    median = sorted(lengths.values())[len(lengths) // 2]
    total = {row: n + prompts[row] for row, n in lengths.items() if n >= median}
    return sorted(sorted(total, key=lambda row: (total[row], row))[:_COUNT])


def record(
    rollout: RolloutBatch,
    score: Callable[[int], torch.Tensor],
    model: Any,
    args: GRPOConfig,
    temperature: float,
    accelerator: Accelerator,
) -> RecordedCompletions | None:
    """A few completions of a rollout batch; None where there are none, or memory is short on a process.

    Args:
        score: from a row to its log-probabilities, (T,), padded on the right.
        model: the policy, in evaluation mode meanwhile.
        temperature: the logits were divided by it.
    """
    rows = rows_to_record(rollout)
    if not rows:
        return None
    tokens = [rollout.select([row]).token_rows(torch.device("cpu")) for row in rows]
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    sharded = shards_parameters(accelerator)
    training, logps, failed = model.training, list[torch.Tensor](), False
    model.eval()
    try:
        logps = [score(row)[: one.completions_B[0]].float() for row, one in zip(rows, tokens)]
    except RuntimeError as error:  # a checkpoint without them is better than none
        if sharded or not is_out_of_memory(error):
            raise
        failed = True
    finally:
        model.train(training)
    if not sharded and any_process(failed, accelerator.device):
        return None
    return RecordedCompletions(
        [one.ids_N[: one.prompts_B[0]] for one in tokens],
        [one.targets() for one in tokens],
        logps,
        half or str(next(model.parameters()).dtype).removeprefix("torch."),
        temperature,
        _quantisation(base_model_of(accelerator.unwrap_model(model))),
    )


def _quantisation(model: Any) -> dict[str, Any] | bool:
    """How the weights are quantised, or only whether: LLM.int8 rounds activations too, by more than is compared."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return bool(getattr(model, "is_quantized", False))
    config: Any = model.config.quantization_config
    return config.to_diff_dict()


def score_alone(model: Any, recorded: RecordedCompletions) -> list[torch.Tensor]:
    """Log-probabilities of every recorded completion, each run on its own by an ordinary transformers model."""
    found = []
    narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        for prompt, completion in zip(recorded.prompts, recorded.completions):
            ids = torch.cat([prompt, completion]).long()[None]
            options = {"logits_to_keep": len(completion) + 1} if narrow else {}
            logits = model(input_ids=ids, **options).logits[0, -len(completion) - 1 : -1].float() / recorded.temperature
            chosen = torch.log_softmax(logits, dim=-1).gather(1, completion.long()[:, None])
            found.append(chosen.squeeze(1))
    return found

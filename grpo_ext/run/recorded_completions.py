"""A few completions with their log-probabilities, in every checkpoint: an exported model has to reproduce them.

Written by the trainer under any engine; read by `grpo-ext export`, which scores them with the model it wrote.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

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
        quantised: transformers' quantization_config of 4-bit weights, True for other quantised weights, else False.
    """

    prompts: list[torch.Tensor]
    completions: list[torch.Tensor]
    logps: list[torch.Tensor]
    dtype: str
    temperature: float
    quantised: dict[str, Any] | bool = False

    def save(self, folder: str | Path) -> None:
        """Write into a checkpoint's folder."""
        columns = {"prompt": self.prompts, "completion": self.completions, "logps": self.logps}
        tensors = {f"{i}/{name}": row for name, rows in columns.items() for i, row in enumerate(rows)}
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        about = {"count": str(len(self.prompts)), "dtype": self.dtype, "temperature": json.dumps(self.temperature)}
        save_file(plain, Path(folder) / RECORDED, metadata=about | {"quantised": json.dumps(self.quantised)})

    @classmethod
    def load(cls, folder: str | Path) -> RecordedCompletions | None:
        """Read from a checkpoint's folder; None if it holds none.

        Raises:
            CheckpointError: the file cannot be read.
        """
        path = Path(folder) / RECORDED
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata()

                def read(name: str) -> list[torch.Tensor]:
                    return [file.get_tensor(f"{row}/{name}") for row in range(int(about["count"]))]

                tokens, logps = (read("prompt"), read("completion")), read("logps")
            return cls(*tokens, logps, about["dtype"], json.loads(about["temperature"]), json.loads(about["quantised"]))
        except Exception as error:  # whatever the parser raises
            raise CheckpointError(f"{path} is broken: {error}.") from None


def _rows_to_record(rollout: RolloutBatch) -> list[int]:
    """The completions of median length and the next longer ones.

    Rows whose attention has gaps are left out: a plain forward does not reproduce them.
    """
    lengths, gaps = rollout.completion_lengths, rollout.gaps
    rows = [row for row, length in enumerate(lengths) if length and not gaps[row]]
    rows.sort(key=lengths.__getitem__)
    return sorted(rows[len(rows) // 2 :][:_COUNT])


def record(trainer: Any) -> RecordedCompletions | None:
    """A few completions of a trainer's rollout batch, scored by its policy; called on all processes together.

    Returns:
        None where there are none, where the model takes images, and where a process runs out of memory.
    """
    rollout, model, accelerator = trainer._rollouts.batch, trainer.model, trainer.accelerator
    if rollout is None or trainer._rollouts.images.prepare is not None or not (rows := _rows_to_record(rollout)):
        return None
    tokens = [rollout.select([row]).token_rows(torch.device("cpu")) for row in rows]
    sharded, training = shards_parameters(accelerator), model.training
    logps, failed = list[torch.Tensor](), False
    model.eval()
    try:
        with trainer._scorer.without_gradients(model):
            for row, one in zip(rows, tokens):
                scores = trainer._score(model, *trainer._step_runner.parts.collate(rollout, (row,)))[0][0]
                logps.append(scores[: one.completions_B[0]].float())
    except RuntimeError as error:
        if sharded or not is_out_of_memory(error):
            raise
        failed = True  # the checkpoint is written without them
    finally:
        model.train(training)
    if not sharded and any_process(failed, accelerator.device):
        return None
    half = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else None
    return RecordedCompletions(
        [one.ids_N[: one.prompts_B[0]] for one in tokens],
        [one.targets() for one in tokens],
        logps,
        half or str(next(model.parameters()).dtype).removeprefix("torch."),
        trainer.temperature,
        _quantisation(base_model_of(accelerator.unwrap_model(model))),
    )


def _quantisation(model: Any) -> dict[str, Any] | bool:
    if not getattr(model, "is_loaded_in_4bit", False):
        return bool(getattr(model, "is_quantized", False))
    config: Any = model.config.quantization_config
    return config.to_diff_dict()


def score_alone(model: Any, recorded: RecordedCompletions) -> list[torch.Tensor]:
    """Log-probabilities of every recorded completion, each run on its own by a plain transformers model."""
    logps = []
    narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        for prompt, completion in zip(recorded.prompts, recorded.completions):
            ids = torch.cat([prompt, completion]).long()[None]
            options = {"logits_to_keep": len(completion) + 1} if narrow else {}
            logits = model(input_ids=ids, **options).logits[0, -len(completion) - 1 : -1].float() / recorded.temperature
            chosen = torch.log_softmax(logits, dim=-1).gather(1, completion.long()[:, None])
            logps.append(chosen.squeeze(1))
    return logps

"""Models that padding changes sample as if each prompt were alone, whatever one `generate` call holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_ext.batching.sizes import BatchGeometry
from grpo_ext.sampling import engine
from grpo_ext.sampling.engine import TransformersEngine
from tests.support.selection import few_of
from tests.support.shrunk import shrunk
from tests.support.tiny import tiny_model
from tests.support.trainers import make, ran, watched
from tests.tolerances import DIFFERENT, UPDATE

COMPACT = {"compact": True}
CALLS: list[dict[str, Any]] = [{}, {"rollout_chunk_size": 4}, {"pad_to_multiple_of": 16}]


def token_shift() -> Any:
    """A user's hook in Qwen2, which adds half of the token before; it knows no cache."""
    model = tiny_model("qwen2")
    embedding = model.get_input_embeddings().weight.data
    embedding[0] = embedding[5]  # of the padding, which begins at zero

    def shifted(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model.model.layers[0].mlp.register_forward_hook(shifted)
    return model


def sampled(folder: Any, kind: str, **settings: Any) -> tuple[list[str], float]:
    """The completions of the first rollout batch, and how far their log-probabilities are from those of training."""
    completions: list[str] = []
    reward = watched(lambda **columns: completions.extend(columns["completions"]))
    model, cache = token_shift() if kind == "shift" else shrunk(kind), {"use_cache": kind != "shift"}
    settings |= {"max_steps": 1, "max_completion_length": 6, "generation_kwargs": cache}
    trainer = ran(make(folder, model, reward, **settings))
    log = next(log for log in trainer.state.log_history if "sampling/logp_difference" in log)
    return completions, log["sampling/logp_difference"]


@pytest.mark.parametrize("kind", few_of(("rwkv", "recurrent_gemma", "shift"), ("shift",)))
def test_prompts_are_sampled_as_if_each_were_alone(tmp_path, kind):
    runs = [sampled(tmp_path / str(number), kind, **calls) for number, calls in enumerate(CALLS)]
    assert len(runs[0][0]) == 16
    assert max(difference for _, difference in runs) <= UPDATE
    assert all(completions == runs[0][0] for completions, _ in runs)


@pytest.mark.parametrize("kind", few_of(("recurrent_gemma", "shift"), ("shift",)))
def test_prompts_that_are_padded_are_sampled_from_different_distributions(tmp_path, monkeypatch, kind):
    sizes = BatchGeometry.chunk_sizes
    monkeypatch.setattr(BatchGeometry, "chunk_sizes", lambda self, group, batching: sizes(self, group, "any"))
    (completions, difference), (others, _) = (sampled(tmp_path / str(n), kind, **CALLS[n]) for n in range(2))
    assert difference > DIFFERENT
    assert completions != others


def compactly(record: Any, **changes: Any) -> Any:
    return replace(record, **(changes | COMPACT if "compact" in changes else changes))


@pytest.mark.parametrize("kind", ["rwkv", "recurrent_gemma"])
@pytest.mark.full
def test_prompts_of_one_length_are_not_always_sampled_as_if_each_were_alone(tmp_path, monkeypatch, kind):
    # a step of RWKV's decoding mixes rows; RecurrentGemma's states are not in the cache that compact decoding reorders
    monkeypatch.setattr(TransformersEngine, "_mixes_rows", lambda self, *args: False)
    if kind == "recurrent_gemma":
        monkeypatch.setattr(engine, "replace", compactly)
    assert sampled(tmp_path, kind)[1] > DIFFERENT

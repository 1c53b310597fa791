"""What only an accelerator can show: packs through its own attention kernels. Needs CUDA; `make test` runs it there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from grpo_ext.forward import attention
from grpo_ext.forward.form_check import try_pack
from grpo_ext.forward.lm_head import install
from grpo_ext.forward.packed import score_packed
from grpo_ext.forward.padded import score_padded
from grpo_ext.forward.rows import TokenRows
from tests.support.packs import gradient, rows_of
from tests.support.trainers import make, parameters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
LONG = ([300, 40], [[500, 30, 200, 7], [60, 64, 0, 3]])


def on_the_device(rows: TokenRows) -> TokenRows:
    return dataclasses.replace(rows, ids_N=rows.ids_N.cuda())


def model_on(device: str, implementation: str, window: bool, dtype: torch.dtype):
    torch.manual_seed(1)
    config = MistralConfig(**SIZES, sliding_window=50) if window else Qwen2Config(**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(device, dtype)
    install(model, 0.9)
    return model


@pytest.mark.parametrize("call_cost", [0, 10**12], ids=["segments", "dense"])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_a_pack_gives_the_scores_and_gradients_of_the_padded_batch(monkeypatch, implementation, window, call_cost):
    monkeypatch.setattr(attention, "_ACCELERATOR_CALL_COST", call_cost)
    packed, padded = (model_on("cuda", name, window, torch.float32) for name in (implementation, "sdpa"))
    batch = on_the_device(rows_of(*LONG))
    ours, theirs = score_packed(packed, packed, batch).logps_S, score_padded(padded, padded, batch).logps_S
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()  # TF32, where it is on, has 10 bits
    a, b = gradient(score_packed, packed, batch), gradient(score_padded, padded, batch)
    assert (a - b).norm() <= 5e-3 * b.norm()


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_the_check_passes_in_bfloat16(implementation):
    model = model_on("cuda", implementation, False, torch.bfloat16)
    trial = try_pack(model, model, on_the_device(rows_of(*LONG)))
    assert trial.tokens
    assert (trial.difference, trial.refused) == (None, None)


def test_a_run_learns_the_same_for_two_micro_batch_sizes(tmp_path):
    results = []
    for size in (8, 3):
        trainer = make(tmp_path / str(size), per_device_train_batch_size=size, use_cpu=False)
        before = parameters(trainer)
        trainer.train()
        results.append(parameters(trainer) - before)
    assert (results[0] - results[1]).norm() <= 1e-3 * results[0].norm()

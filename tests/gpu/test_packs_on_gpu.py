"""What only an accelerator can show: packs and prefixes through its own attention kernels.

Needs CUDA; `make test` and `make test-gpu` run it there.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

from grpo_ext.forward import attention, shared_prefix
from grpo_ext.forward.form_check import RowsAlone, why_form_fails
from grpo_ext.forward.forms import run_rows
from grpo_ext.forward.lm_head import install
from grpo_ext.runtime.transfer import to_device
from tests.support import varlen
from tests.support.gpu import DEVICE, TOY, needs_gpu
from tests.support.packs import gradient, rows_of
from tests.support.trainers import error, update
from tests.tolerances import HALF_PRECISION_KERNEL

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZES = {
    **{"vocab_size": 60, "hidden_size": 64 if TOY else 256, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0},
}
COMPILED = pytest.mark.skipif(TOY, reason="compiled for a CUDA device")
LONG = ([30, 40], [[50, 30, 20, 7], [60, 64, 0, 3]]) if TOY else ([300, 40], [[500, 30, 200, 7], [60, 64, 0, 3]])


def model_on(implementation: str, window: bool, dtype: torch.dtype):
    torch.manual_seed(1)
    config = MistralConfig(**SIZES, sliding_window=50) if window else Qwen2Config(**SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(DEVICE, dtype)
    install(model, 0.9)
    return model


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls of the kernel for sequences of several lengths; in a rehearsal, of its reference."""
    if not TOY:
        return varlen.count_calls(monkeypatch, shared_prefix._varlen, shared_prefix._varlen_backward)
    monkeypatch.setattr(attention, "takes_varlen", lambda *states: states[0].dtype in (torch.bfloat16, torch.float16))
    return varlen.count_calls(monkeypatch, varlen.forward, varlen.backward)


@pytest.mark.parametrize("size", [1, 2 if TOY else 37])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((14, 2), torch.bfloat16), ((14, 2), torch.float16), ((8, 8), torch.float16), ((8, 1), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("pack", varlen.PACKS)
def test_kernels_give_the_masked_attention_and_its_gradients(record_property, calls, pack, window, heads, dtype, size):
    layout = varlen.layout_of([(p * size, [c * size for c in answers]) for p, answers in varlen.PACKS[pack]])
    states = varlen.states_of(layout, heads, device=DEVICE, dtype=dtype, dim=64)
    assert attention.takes_varlen(*states)
    parts = to_device(shared_prefix.joint_parts(layout, window), states[0].device)
    ours = varlen.outcome(shared_prefix.SharedPrefixAttention.apply(*states, parts, varlen.SCALE), states)
    exact = [x.detach().double().requires_grad_() for x in states]
    expected = varlen.outcome(varlen.dense(layout, *exact, window), exact)
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, expected))
    if pack == "ragged" and size > 1:
        record_property("largest error of output and gradients", worst)
    assert worst <= HALF_PRECISION_KERNEL
    assert len(calls) == (2 if window or pack == "prompts alone" else 4)


@pytest.mark.parametrize(
    ("dtype", "window", "expected"),
    [(torch.bfloat16, False, 12), (torch.bfloat16, True, 6), (torch.float32, False, 0), (torch.float32, True, 0)],
    ids=str,
)
def test_packs_take_these_calls_in_half_precision(calls, dtype, window, expected):
    model = model_on("sdpa", window, dtype)
    gradient("packed", model, rows_of(*LONG))
    assert len(calls) == expected  # each way in three layers two, or one with a window


@pytest.mark.parametrize(
    "implementation",
    ["flash_attention_2", "sdpa", pytest.param("flex_attention", marks=COMPILED)],
)
def test_shared_prefixes_differ_from_padded_batches_by_rounding(record_property, implementation):
    try:
        model = model_on(implementation, False, torch.bfloat16)
    except (ImportError, ValueError, OSError, RuntimeError) as error:  # whatever of its packages is missing
        pytest.skip(str(error).splitlines()[0])
    exact, batch = model_on("sdpa", False, torch.float32), rows_of(*LONG)
    assert why_form_fails("prefix", RowsAlone(model, batch, DEVICE)) is None
    right = gradient("padded", exact, batch)
    noise = (gradient("padded", model, batch).float() - right).norm() / right.norm()
    prefix = (gradient("prefix", model, batch).float() - right).norm() / right.norm()
    record_property("padded against float32", float(noise))
    record_property("prefix against float32", float(prefix))
    assert prefix < 2 * noise


@pytest.mark.parametrize("call_cost", [0, 10**12], ids=["segments", "dense"])
@pytest.mark.parametrize("window", [False, True])
def test_a_pack_gives_the_scores_and_gradients_of_the_padded_batch(monkeypatch, window, call_cost):
    monkeypatch.setattr(attention, "_CALL_COST" if TOY else "_ACCELERATOR_CALL_COST", call_cost)
    packed, padded = (model_on("sdpa", window, torch.float32) for _ in range(2))
    batch = rows_of(*LONG)
    forms = (("packed", packed), ("padded", padded))
    ours, theirs = (run_rows(form, run, batch, DEVICE).logps_S for form, run in forms)
    assert (ours - theirs).norm() <= 1e-3 * theirs.norm()  # TF32, where it is on, has 10 bits
    a, b = gradient("packed", packed, batch), gradient("padded", padded, batch)
    assert (a - b).norm() <= 5e-3 * b.norm()


def test_the_check_passes_in_bfloat16():
    model = model_on("sdpa", False, torch.bfloat16)
    assert why_form_fails("packed", RowsAlone(model, rows_of(*LONG), DEVICE)) is None


def test_a_run_learns_the_same_for_two_micro_batch_sizes(tmp_path):
    one, other = (update(tmp_path, per_device_train_batch_size=size, use_cpu=TOY)[0] for size in (8, 3))
    assert error(one, other) <= 1e-3

"""In bfloat16 one step from the same completions is the same for every split of whole groups, as it is in float32."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo_ext.batching.micro_batches import MicroBatchLayout, StepSizes, plan_step
from grpo_ext.precision import weight_gradients
from grpo_ext.tools.check.comparison import update_error
from tests.support.cases import LORA, Bench
from tests.support.launches import REFERENCE, Launches, describe_difference
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import change, error, far, log_of, native_fp16
from tests.tolerances import DIFFERENT, UPDATE, UPDATE_BFLOAT16

HALF: dict[str, Any] = {"bf16": True, "global_batch_size": 16, "max_completion_length": 12}
SGD: dict[str, Any] = {
    **{"bf16": True, "optim": "sgd", "learning_rate": 10.0, "max_grad_norm": 0.0, "max_steps": 1},
    **{"global_batch_size": 24, "rollout_batch_size": 24},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "gemma3": ("gemma3_text", {}),
    "gpt2": ("gpt2", {}),
    "moe": ("moe", {}),
    "lora": ("qwen2", {"adapter": LoraConfig(**LORA)}),
    "checkpointing": ("llama", {"gradient_checkpointing": True}),
    "kl": ("qwen2", {"beta": 0.1}),
    "fp16": ("qwen2", {"bf16": False, "fp16": True}),
}
# whose weights are of the kinds of qwen2, or multiplied as its are
FULL = ("llama", "gemma3", "kl", "gpt2", "lora", "checkpointing")
WHOLE = 24  # completions of the step
SPLITS = ((3, 4), (2, 12))  # processes, completions of a micro-batch
# every loss is divided by the step's counts, and every weight's gradient summed in float32
ACROSS_PROCESSES = ("moe", "kl_lora", "grpo", "bnpo", "gpt2", "checkpointing")


def step(folder: Any, kind: str, size: int, **settings: Any) -> torch.Tensor:
    """The update of one step of SGD with micro-batches of `size`."""
    name, more = KINDS[kind]
    folder = folder / f"{kind}-{size}-{len(list(folder.iterdir()))}"
    return change(far(folder, tiny_model(name), 10.0, per_device_train_batch_size=size, **{**HALF, **more, **settings}))


@pytest.mark.parametrize("kind", few_of(KINDS, KINDS.keys() - {*FULL}))
def test_micro_batches_of_whole_groups_give_the_same_update(tmp_path, monkeypatch, request, kind):
    monkeypatch.setattr(Accelerator, "__init__", native_fp16(Accelerator.__init__))
    whole = step(tmp_path, kind, REFERENCE)
    for size in (4, 8) if request.config.getoption("--full") else (4,):
        assert error(whole, step(tmp_path, kind, size)) <= UPDATE
    rounded = step(tmp_path, kind, REFERENCE, float32_weight_gradients=False)
    apart = error(rounded, step(tmp_path, kind, 4, float32_weight_gradients=False))
    assert apart > (10 * UPDATE if kind == "fp16" else DIFFERENT)


@pytest.mark.parametrize("kind", few_of(["qwen2", "gpt2"], ["qwen2"]))
def test_micro_batches_that_cut_groups_differ_by_the_rounding_of_the_prompts_gradient(tmp_path, kind):
    whole = step(tmp_path, kind, REFERENCE)
    assert UPDATE < error(whole, step(tmp_path, kind, 3)) <= UPDATE_BFLOAT16


@pytest.mark.parametrize("size", few_of([REFERENCE, 3, 1], [3]))
def test_the_reference_scores_parts_of_groups_as_training_does(tmp_path, size):
    settings = {**HALF, "beta": 0.1, "max_completion_length": 40, "num_generations": 8}
    settings |= {"per_device_train_batch_size": size, "num_iterations": 2, "max_steps": 2}
    trainer = far(tmp_path, tiny_model("qwen2"), 10.0, **settings)
    trainer.train()
    assert log_of(trainer, "kl")[0] == 0.0  # the policy is the reference
    assert log_of(trainer, "kl")[1] > DIFFERENT


def test_a_weight_that_is_left_out_shows(tmp_path, monkeypatch):
    covered = weight_gradients._multiply

    def all_but_some(func: Any, input: torch.Tensor, weight: torch.Tensor, *bias: Any) -> Any:
        left_out = weight.shape == (64, 32)  # gate and up projections
        return func(input, weight, *bias) if left_out else covered(func, input, weight, *bias)

    monkeypatch.setattr(weight_gradients, "_multiply", all_but_some)
    assert error(step(tmp_path, "qwen2", REFERENCE), step(tmp_path, "qwen2", 4)) > 10 * UPDATE


class Gate(nn.Module):
    """Owns a weight, and perhaps checkpoints its product."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.weight, self.checkpoints = nn.Parameter(torch.eye(32)), checkpoints

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        def product(states: torch.Tensor) -> torch.Tensor:
            return (states @ self.weight).tanh()

        return checkpoint(product, states, use_reentrant=False) if self.checkpoints else product(states)


def test_a_module_that_checkpoints_its_own_product_trains(tmp_path):
    def update(checkpoints: bool) -> torch.Tensor:
        model = tiny_model("qwen2")
        model.model.layers[0].mlp = Gate(checkpoints)
        return change(far(tmp_path / str(checkpoints), model, 10.0, per_device_train_batch_size=4, **HALF))

    assert error(update(False), update(True)) <= UPDATE


def splits() -> list[Any]:
    return [
        pytest.param(name, *split, marks=() if (name, split) == ("moe", SPLITS[0]) else pytest.mark.full)
        for name in ACROSS_PROCESSES
        for split in SPLITS
    ]


@pytest.fixture(scope="module")
def launches(tmp_path_factory, request) -> Launches:
    together = Launches(Bench(tmp_path_factory.mktemp("half")))
    for item in request.session.items:
        if item.module is request.module and hasattr(item, "callspec") and "processes" in item.callspec.params:
            name, processes, size = (item.callspec.params[key] for key in ("name", "processes", "size"))
            together.plan(1, together.bench.run(name, WHOLE, **SGD))
            together.plan(processes, together.bench.run(name, size, **SGD))
    return together


@pytest.mark.parametrize(("name", "processes", "size"), splits())
def test_processes_give_the_same_update(launches, name, processes, size):
    whole = launches.result(1, launches.bench.run(name, WHOLE, **SGD))
    other = launches.result(processes, launches.bench.run(name, size, **SGD))
    assert whole.error is None, whole.error
    assert other.error is None, other.error
    apart = update_error(whole.delta, other.delta)
    assert apart <= UPDATE, f"{apart:.2e}: {describe_difference(whole.delta, other.delta)}"


def test_groups_stay_whole_in_half_precision_where_that_costs_little():
    lengths = [8, 10, 10, 28, 15, 24, 21, 18, 7, 15, 32, 30, 37, 28, 39, 33, 37, 22, 7, 6, 28, 34, 25, 29]
    sizes = StepSizes([row // 4 for row in range(24)], [10] * 24, lengths)

    def cut(**layout: Any) -> int:
        """How many groups lie in several micro-batches, on three processes."""
        layout = {"form": "packed", **layout}
        layouts = [MicroBatchLayout(max_rows=8, processes=3, rank=rank, **layout) for rank in range(3)]
        parts = [part.rows for layout in layouts for part in plan_step(sizes, range(24), layout) if part.weight]
        assert sorted(row for part in parts for row in part) == list(range(24))
        return sum(len({row // 4 for row in part}) for part in parts) - 6

    assert (cut(), cut(whole_groups=True)) == (1, 0)
    assert (cut(max_tokens=150), cut(max_tokens=150, whole_groups=True)) == (3, 0)


@pytest.mark.parametrize("on", [True, False])
def test_no_copy_of_a_weight_is_kept_for_the_backward_pass(on):
    model = tiny_model("llama", tie_word_embeddings=False)
    weights = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    copies = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        of_a_weight = any(tensor.shape in (p.shape, p.mT.shape) for p in weights.values() if p.dim() == 2)
        copies.append(of_a_weight and tensor.untyped_storage().data_ptr() not in weights)
        return tensor

    ids = torch.arange(3, 10)[None]
    exact = weight_gradients.float32_weight_gradients(model) if on else nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with exact, torch.autocast("cpu", torch.bfloat16), hooks:
        model.model(ids)
    assert copies
    assert any(copies) != on

"""A user's `compute_loss` that reads sizes from `args`, or calls `super()` for some rows: as in stock TRL.

For every micro-batch size where the user's arithmetic allows it; beside each a run that must differ, or a refusal.
A loss may also pass on other masks, or fewer columns.
"""

from typing import Any

import pytest
import torch
import trl
from torch.nn.functional import pad

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.beside_trl import build, sampling_model
from tests.support.kept import of_stock
from tests.support.tiny import prompts, stock_scores, tiny_model
from tests.support.trainers import change, error
from tests.tolerances import DIFFERENT, UPDATE

SIZES = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "per_device_train_batch_size")


class Loss:
    """A user's loss, of which subclasses override `own`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        def inner(part: Any) -> Any:
            return super(Loss, self).compute_loss(model, part, return_outputs, num_items_in_batch)

        return self.own(model, inputs, inner)


class BySizes(Loss):
    """Adds a mean over completions, divided by the accumulation as `args` has it."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        self.read = {name: getattr(self.args, name) for name in SIZES}
        self.args.noted = self.args.learning_rate
        mean = (logps * inputs["completion_mask"]).sum(1).mean()
        return inner(inputs) + 0.01 * mean / self.args.gradient_accumulation_steps


TWO_STEPS = {"loss_type": "grpo", "max_steps": 2}


@stock_scores
def test_sizes_of_args_are_those_of_the_micro_batch(tmp_path):
    stock = build(tmp_path / "stock", trl.GRPOTrainer, BySizes, 4, gradient_accumulation_steps=4, **TWO_STEPS)
    expected = change(stock)
    for size in (4, 8):
        ours = build(tmp_path / str(size), GRPOTrainer, BySizes, size, **TWO_STEPS)
        assert error(expected, change(ours)) < UPDATE
        assert ours.read == (stock.read if size == 4 else dict(zip(SIZES, (2, 2, 16, 8))))
        assert (ours.args.gradient_accumulation_steps, ours.args.noted) == (1, 1e-2)  # a write reaches the arguments
    ours.evaluate(prompts(5))  # micro-batches of 6 and 7: nothing is trained, and a fraction is no error
    assert ours.read["gradient_accumulation_steps"] == pytest.approx(20 / ours.read["per_device_train_batch_size"])
    assert error(expected, change(build(tmp_path / "plain", GRPOTrainer, size=4, **TWO_STEPS))) > DIFFERENT


def test_a_size_that_is_no_whole_number_is_refused_by_name_and_none_can_be_set(tmp_path):
    with pytest.raises(ConfigError, match=r"args.gradient_accumulation_steps is 2.66667 .* self.current_gradient_acc"):
        build(tmp_path, GRPOTrainer, BySizes, 6).train()

    class Sets(Loss):
        def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
            self.args.per_device_train_batch_size = 2

    with pytest.raises(AttributeError, match="per_device_train_batch_size"):
        build(tmp_path, GRPOTrainer, Sets, 4).train()


def rows_of(inputs: Any, rows: list[int]) -> dict[str, Any]:
    """These rows of the inputs."""
    size = len(inputs["completion_ids"])
    return {k: v[rows] if torch.is_tensor(v) and v.dim() and len(v) == size else v for k, v in inputs.items()}


class Halves(Loss):
    """Two parts of other sizes, each as much as it has rows."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        size = len(inputs["completion_ids"])
        parts = [part for part in (list(range(0, size, 3)), [row for row in range(size) if row % 3]) if part]
        return sum(inner(rows_of(inputs, part)) * (len(part) / size) for part in parts)


class Summed(Loss):
    """Parts that are added up, as TRL's token mean allows."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        size = len(inputs["completion_ids"])
        return sum(inner(rows_of(inputs, [row])) for row in range(size))


MEANS: list[Any] = [
    (Halves, {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1}),
    (Halves, {"loss_type": "sapo"}),
    (Halves, {"loss_type": "grpo", "top_entropy_quantile": 0.4}),
    (Halves, {"loss_type": "grpo", "model": "moe", "router_aux_loss_coef": 1.0}),
    (Summed, {"loss_type": "dapo"}),
]


@pytest.mark.parametrize(("override", "settings"), MEANS, ids=str)
def test_parts_add_up_to_the_whole(tmp_path, override, settings):
    kind = settings.pop("model", "qwen2") if "model" in (settings := dict(settings)) else "qwen2"
    whole = change(build(tmp_path / "whole", GRPOTrainer, parts=lambda: {"model": sampling_model(kind)}, **settings))
    parts = build(tmp_path / "parts", GRPOTrainer, override, 6, lambda: {"model": sampling_model(kind)}, **settings)
    assert error(whole, change(parts)) < UPDATE


class OneThird(Loss):
    """Weights of tasks: parts of other sizes with factors of their own."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        task = inputs["completion_ids"].sum(1) % 3 == 0  # TRL shuffles the rows
        first, second = task.nonzero()[:, 0].tolist(), (~task).nonzero()[:, 0].tolist()
        return 0.3 * inner(rows_of(inputs, first)) + 0.9 * inner(rows_of(inputs, second))


@stock_scores
@pytest.mark.parametrize("loss", ["bnpo", "dapo", pytest.param("luspo", marks=pytest.mark.full)])
def test_parts_with_weights_are_scaled_as_in_trl(tmp_path, loss):
    settings = {"loss_type": loss, "entropy_coef": 0.1, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0}
    expected = of_stock(lambda: change(build(tmp_path / "stock", trl.GRPOTrainer, OneThird, **settings)))
    assert error(expected, change(build(tmp_path / "ours", GRPOTrainer, OneThird, **settings))) < UPDATE
    assert error(expected, change(build(tmp_path / "plain", GRPOTrainer, **settings))) > DIFFERENT


def test_parts_of_a_mean_over_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="prompt_mean' needs whole groups"):
        build(tmp_path, GRPOTrainer, OneThird, loss_aggregation="prompt_mean").train()


def odd_rows(inputs: Any) -> torch.Tensor:
    return (inputs["completion_ids"].sum(1) % 2)[:, None]


class Masked(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, "completion_mask": inputs["completion_mask"] * odd_rows(inputs)})


class FirstToken(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, **{name: inputs[name][:, :1] for name in ("completion_ids", "completion_mask")}})


BONUS = {"entropy_coef": 0.5}
MASKS: list[Any] = [
    (Masked, 16, {"loss_type": "bnpo"}),
    (Masked, 16, {"loss_type": "dapo", **BONUS}),
    (Masked, 16, {"loss_type": "grpo", "model": "moe", "router_aux_loss_coef": 1.0}),
    (FirstToken, 5, {"loss_type": "bnpo", **BONUS}),  # one token for each row: the mean of micro-batches of any size
]


@stock_scores
@pytest.mark.parametrize(("override", "size", "settings"), MASKS, ids=str)
def test_other_masks_and_columns_are_counted_as_in_trl(tmp_path, override, size, settings):
    settings = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0, "max_steps": 1, **settings}
    kind = settings.pop("model", "qwen2")

    def run(base: type, mixin: Any, size: int = 16) -> torch.Tensor:
        return change(build(tmp_path / "run", base, mixin, size, lambda: {"model": sampling_model(kind)}, **settings))

    expected = of_stock(lambda: run(trl.GRPOTrainer, override))
    assert error(expected, run(GRPOTrainer, override, size)) < UPDATE
    assert error(expected, run(GRPOTrainer, None)) > DIFFERENT


def test_the_same_tokens_in_other_tensors_keep_the_counts_of_the_step(tmp_path):
    class Wider(Loss):
        columns = 2

        def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
            names = ("completion_ids", "completion_mask")
            return inner({**inputs, **{name: pad(inputs[name], (0, self.columns)) for name in names}})

    class Copied(Wider):
        columns = 0

    settings = {"loss_type": "bnpo", "max_grad_norm": 0.0, "max_steps": 1}
    plain, copied, wider, masked = (
        change(build(tmp_path, GRPOTrainer, mixin, 5, lambda: {"model": tiny_model()}, **settings))
        for mixin in (None, Copied, Wider, Masked)
    )
    assert torch.equal(plain, copied)
    assert torch.equal(plain, wider)
    assert error(plain, masked) > DIFFERENT


def test_masks_in_a_mean_over_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="prompt_mean' needs whole groups; pass on all rows, and their masks"):
        build(tmp_path, GRPOTrainer, Masked, loss_aggregation="prompt_mean").train()

"""Parts of a micro-batch in a user's loss: rows, order, tokens and masks of its own, by the column `grpo_ext_row`.

Each is counted by the step's denominators, so the micro-batch size does not matter; beside each is a run that differs,
stock TRL where it divides by numbers of the step too, or a refusal.
"""

from typing import Any

import pytest
import torch
import trl
from torch.nn.functional import pad

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.beside_trl import Loss, build, log_probs_of
from tests.support.kept import of_stock
from tests.support.tiny import stock_scores, tiny_model
from tests.support.trainers import change, error
from tests.tolerances import DIFFERENT, UPDATE


def rows_of(inputs: Any, rows: list[int]) -> dict[str, Any]:
    """These rows of the inputs."""
    size = len(inputs["completion_ids"])
    return {k: v[rows] if torch.is_tensor(v) and v.dim() and len(v) == size else v for k, v in inputs.items()}


class Parts(Loss):
    """Two parts of other sizes, added up."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        size = len(inputs["completion_ids"])
        parts = [part for part in (list(range(0, size, 3)), [row for row in range(size) if row % 3]) if part]
        return sum(inner(rows_of(inputs, part)) for part in parts)


class Summed(Loss):
    """Each row by itself."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return sum(inner(rows_of(inputs, [row])) for row in range(len(inputs["completion_ids"])))


class Reversed(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner(rows_of(inputs, list(range(len(inputs["completion_ids"])))[::-1]))


class MadeAnew(Loss):
    """A dictionary of the user's own, with what the loss needs."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "grpo_ext_row"}
        names |= {"old_per_token_logps", "ref_per_token_logps"} & inputs.keys()
        return inner({name: inputs[name].clone() for name in names})


WHOLES: list[Any] = [
    (Parts, {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1}),
    pytest.param(Parts, {"loss_type": "sapo"}, marks=pytest.mark.full),
    (Parts, {"loss_type": "bnpo", "entropy_coef": 0.5}),
    pytest.param(Parts, {"loss_type": "grpo", "top_entropy_quantile": 0.4}, marks=pytest.mark.full),
    (Parts, {"loss_type": "grpo", "kind": "moe", "router_aux_loss_coef": 1.0}),
    pytest.param(Parts, {"loss_aggregation": "prompt_mean"}, marks=pytest.mark.full),
    (Summed, {"loss_type": "dapo"}),
    (Reversed, {"loss_type": "bnpo", "top_entropy_quantile": 0.4}),
    (MadeAnew, {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1}),
]


@pytest.mark.parametrize(("override", "settings"), WHOLES, ids=str)
def test_parts_add_up_to_the_whole(tmp_path, override, settings):
    settings = {"max_steps": settings.get("num_iterations", 1), **settings}
    whole = change(build(tmp_path / "whole", GRPOTrainer, **settings))
    assert error(whole, change(build(tmp_path / "parts", GRPOTrainer, override, 6, **settings))) < UPDATE


class OneThird(Loss):
    """Weights of tasks: parts of other sizes with factors of their own."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        task = inputs["completion_ids"].sum(1) % 3 == 0  # TRL shuffles the rows
        first, second = task.nonzero()[:, 0].tolist(), (~task).nonzero()[:, 0].tolist()
        parts = [(0.3, first), (0.9, second)]
        return sum(factor * inner(rows_of(inputs, part)) for factor, part in parts if part)


class HalfTwice(Loss):
    """Half of the completions, each of them twice, and the others not at all."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        chosen = (inputs["completion_ids"].sum(1) % 2).nonzero()[:, 0].repeat_interleave(2).tolist()
        return inner(rows_of(inputs, chosen)) if chosen else 0.0 * log_probs_of(self, model, inputs).sum()


class HalfWeighted(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, "advantages": inputs["advantages"] * 2 * odd_rows(inputs)[:, 0]})


def odd_rows(inputs: Any) -> torch.Tensor:
    return (inputs["completion_ids"].sum(1) % 2)[:, None]


class Masked(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, "completion_mask": inputs["completion_mask"] * odd_rows(inputs)})


class Weighted(Loss):
    """Weights of tokens instead of a mask."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        weights = 0.5 + (inputs["completion_ids"] % 3) / 2
        return inner({**inputs, "tool_mask": weights})


class FirstToken(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, **{name: inputs[name][:, :1] for name in ("completion_ids", "completion_mask")}})


class OtherIds(Loss):
    """Scores other tokens than those that were sampled."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner({**inputs, "completion_ids": (inputs["completion_ids"] * 7 + 1) % 20 + 3})


FULL = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1.0}
BONUS = {"entropy_coef": 0.5}
PARTS: list[Any] = [
    (OneThird, {"loss_type": "bnpo", **BONUS}),
    pytest.param(OneThird, {"loss_aggregation": "prompt_mean"}, marks=pytest.mark.full),
    pytest.param(OneThird, {"loss_type": "luspo", "entropy_coef": 0.1}, marks=pytest.mark.full),
    (HalfTwice, {"loss_type": "grpo", **BONUS}),
    (Masked, {"loss_type": "bnpo", **BONUS}),
    (Masked, {"loss_type": "grpo", "kind": "moe", "router_aux_loss_coef": 1.0}),
    (Weighted, {"loss_type": "grpo"}),
    (FirstToken, {"loss_type": "bnpo", **BONUS}),
    (OtherIds, {"loss_type": "dapo", **BONUS}),
    pytest.param(OtherIds, {"loss_type": "grpo", "forward": "padded"}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("override", "settings"), PARTS, ids=str)
def test_other_rows_masks_and_tokens_are_counted_by_the_step_so_the_split_does_not_matter(tmp_path, override, settings):
    settings = {**FULL, "max_steps": 1, **settings}
    whole, cut = (change(build(tmp_path / str(size), GRPOTrainer, override, size, **settings)) for size in (16, 5))
    assert error(whole, cut) < UPDATE
    assert error(whole, change(build(tmp_path / "plain", GRPOTrainer, **settings))) > DIFFERENT


class BothOverridden(Reversed):
    """A loss with rows in another order, and log-probabilities that are passed on."""

    def _get_per_token_logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def test_overrides_of_a_loss_and_of_log_probabilities_go_together(tmp_path):
    """Under dropout, whose masks belong to the rows."""

    def learned(mixin: Any, rate: float) -> torch.Tensor:
        settings = {**FULL, "max_steps": 1, "loss_type": "grpo"}
        parts = {"model": tiny_model("gpt2", resid_pdrop=rate)}
        return change(build(tmp_path / "run", GRPOTrainer, mixin, 5, lambda: parts, **settings))

    both = learned(BothOverridden, 0.1)
    assert error(learned(None, 0.1), both) < UPDATE
    assert error(both, learned(BothOverridden, 0.0)) > DIFFERENT


def test_rows_that_come_twice_count_twice(tmp_path):
    settings = {**FULL, "max_steps": 1, "loss_type": "grpo"}
    twice, weighted = (
        change(build(tmp_path, GRPOTrainer, mixin, 5, **settings)) for mixin in (HalfTwice, HalfWeighted)
    )
    assert error(twice, weighted) < UPDATE


AS_TRL: list[Any] = [
    (OneThird, {"loss_type": "dapo", "max_steps": 2}),
    (Masked, {"loss_type": "dapo"}),
    (Masked, {"loss_type": "grpo"}),
    (OtherIds, {"loss_type": "grpo"}),
]


@stock_scores
@pytest.mark.parametrize(("override", "settings"), AS_TRL, ids=str)
@pytest.mark.full
def test_where_trl_divides_by_numbers_of_the_step_parts_and_masks_count_as_in_trl(tmp_path, override, settings):
    settings = {**FULL, "max_steps": 1, **settings}

    def run(base: type, mixin: Any, size: int = 16) -> torch.Tensor:
        return change(build(tmp_path / "run", base, mixin, size, **settings))

    expected = of_stock(lambda: run(trl.GRPOTrainer, override))
    assert error(expected, run(GRPOTrainer, override, 5)) < UPDATE
    assert error(expected, run(GRPOTrainer, None)) > DIFFERENT


def test_inputs_without_their_rows_are_an_error_that_names_the_column(tmp_path):
    class Forgets(Loss):
        def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
            return inner({name: value for name, value in inputs.items() if name != "grpo_ext_row"})

    with pytest.raises(ConfigError, match="have no column 'grpo_ext_row', which says to which completions"):
        build(tmp_path, GRPOTrainer, Forgets).train()


def test_the_same_tokens_in_other_tensors_change_no_bit(tmp_path):
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

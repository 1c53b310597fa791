"""Trainers of stock TRL and of grpo_ext with a user's overrides, on the same completions, and what they learn."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl

from grpo_ext import GRPOTrainer
from tests.support.kept import of_stock
from tests.support.own_generate import Sampler
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import change, error, log_of, make, on
from tests.tolerances import DIFFERENT, METRIC, UPDATE

SETTINGS: dict[str, Any] = {
    **{"shuffle_dataset": False, "learning_rate": 1e-2, "max_steps": 2},
    **{"global_batch_size": 16, "rollout_chunk_size": 8},
}
Parts = Callable[[], dict[str, Any]]
Mixin = type | None

# settings of a loss that are changed: names, the value of each, settings beside them (`kind`: of the model)
LOSS_CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("beta", 0.5, {"beta": 0.01}),
    ("epsilon_low", 0.01, {}),
    ("loss_type", "dr_grpo", {}),
    ("args.delta", 1.001, {"epsilon_high": 5.0}),
    ("max_completion_length", 30, {"loss_type": "dr_grpo", "max_grad_norm": 0.0}),
    ("entropy_coef", 0.5, {"entropy_coef": 0.001}),
    ("epsilon_high", 0.01, {}),
    ("importance_sampling_level", "sequence", {}),
    ("off_policy_mask_threshold", 1e-3, {}),
    ("top_entropy_quantile", 0.5, {}),
    ("router_aux_loss_coef", 5.0, {"kind": "moe"}),
    ("args.use_bias_correction_kl", False, {"beta": 1.0, "learning_rate": 0.05}),
    ("args.sapo_temperature_pos args.sapo_temperature_neg", 9.0, {"loss_type": "sapo"}),
    (" ".join(f"args.vespo_{a}_{b}" for a in ("k", "lambda") for b in ("pos", "neg")), 4.0, {"loss_type": "vespo"}),
]


def build(
    folder: Any,
    base: type,
    mixin: Mixin = None,
    size: int = 16,
    parts: Parts = dict,
    kind: str = "qwen2",
    **settings: Any,
) -> Any:
    """A trainer; both packages sample the same completions, because the model's own `generate` does it."""
    cls = type("Own", (mixin, base), {}) if mixin else base
    changes = {"train_dataset": prompts(8), **SETTINGS, "per_device_train_batch_size": size, **settings, **parts()}
    model = changes.pop("model", None) or sampling_model(kind)
    if changes.get("beta"):  # stock TRL loads the reference by its name
        model.save_pretrained(f"{folder}-reference")
        model.config._name_or_path = f"{folder}-reference"
    return make(folder, model, cls=cls, **changes)


def sampling_model(kind: str = "qwen2") -> Any:
    """A tiny model with a `generate` that answers from a prompt and the place in its group."""
    model = tiny_model(kind)
    model.generate = Sampler()
    return model


class Loss:
    """A user's loss, of which subclasses override `own`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        def inner(part: Any) -> Any:
            return super(Loss, self).compute_loss(model, part, return_outputs, num_items_in_batch)

        return self.own(model, inputs, inner)


def log_probs_of(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The log-probabilities of completions, as users' losses ask for them."""
    names = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
    ids, mask = (torch.cat([inputs[name] for name in pair], 1) for pair in names)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
    return logps


def setting(name: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute of a trainer, or of one of its parts: "args.delta"."""
    *path, last = name.split(".")

    def changed(trainer: Any) -> None:
        setattr(functools.reduce(getattr, path, trainer), last, value)

    return changed


def changing(change: Callable[[Any], None], at: int = 2) -> type:
    """A user's callback that changes the trainer once it has made `at` steps."""

    class Changing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(on("on_step_begin", lambda state: change(self), at))  # type: ignore[attr-defined]

    return Changing


_without: dict[tuple[Parts, str], torch.Tensor] = {}  # what stock TRL learns, by parts and settings


def _key(parts: Parts, settings: dict[str, Any]) -> tuple[Parts, str] | None:
    """What names the run without an override; None where the text of an object or of a local function would."""
    plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in settings.values())
    return (parts, str(settings)) if plain and parts.__qualname__.isidentifier() else None


def learns_as_in_trl(folder: Any, mixin: Mixin, parts: Parts = dict, differs: bool = True, **settings: Any) -> None:
    """Assert that overrides count, and as in stock TRL, also in micro-batches that do not divide the step."""

    def of_trl() -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        stock = build(folder / "stock", trl.GRPOTrainer, mixin, parts=parts, **settings)
        expected, key = change(stock), _key(parts, settings)
        without = None if key is None else _without.get(key)
        if without is None:
            without = change(build(folder / "other", trl.GRPOTrainer, parts=parts, **settings))
        if key is not None:
            _without[key] = without
        return expected, without, log_of(stock, "loss")

    expected, without, losses = of_stock(of_trl)
    assert (error(expected, without) > DIFFERENT) is differs
    ours = build(folder / "ours", GRPOTrainer, mixin, 5, parts, **settings)
    assert error(expected, change(ours)) < UPDATE
    assert log_of(ours, "loss") == pytest.approx(losses, rel=METRIC, abs=METRIC)

"""The exact update against other ways to compute it, faults that the table must show, and the rows of two trainers."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.conform import exact, given
from tests.conform.__main__ import ADAPTERS, ROOT, results
from tests.conform.given import OBJECTIVES, SPLITS, Split, gradient_of, log_probs, model, read
from tests.conform.rows_of_rollouts import rules
from tests.conform.table import RIGHT, is_wrong, page, summary, table
from tests.conform.worker import DEFAULTS, cell, error, load
from tests.estimators import objectives as of
from tests.estimators.policy import LENGTHS_N, REWARDS_PN, Distribution, flat_parameters
from tests.estimators.policy import log_probs as enumerated
from tests.estimators.rows import moved_by
from tests.support.selection import few_of

ROWS = read()
LENGTHS = [sum(row.trained) for row in ROWS]
Weights = list[float]  # of each token of a row


def exact_gradient(name: str) -> given.Gradient:
    policy = model(OBJECTIVES[name], torch.float64)
    return gradient_of(policy, lambda: exact.loss(OBJECTIVES[name], ROWS, policy))


def by_hand(weights: Weights) -> given.Gradient:
    """The clipped objective's gradient as a sum of gradients of log-probabilities, each with its number."""
    policy = model(OBJECTIVES["grpo"], torch.float64)
    numbers = []
    for row, advantage, weight in zip(ROWS, exact.advantages(ROWS, exact.Definition()), weights, strict=True):
        ratios = (log_probs(policy, row).detach() - torch.tensor(row.sampler_logps)).exp().tolist()
        clipped = [(advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8) for ratio in ratios]
        each = [
            -weight * advantage * ratio * counted * (not out)
            for ratio, out, counted in zip(ratios, clipped, row.trained, strict=True)
        ]
        numbers.append(torch.tensor(each, dtype=torch.float64))
    losses = [lambda row=row, each=each: log_probs(policy, row) @ each for row, each in zip(ROWS, numbers, strict=True)]
    return gradient_of(policy, *losses)


WEIGHTS: dict[str, Weights] = {
    "grpo": [1 / len(ROWS) / length for length in LENGTHS],
    "dapo": [1 / sum(LENGTHS)] * len(ROWS),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.full
def test_the_loop_has_the_gradient_of_a_second_implementation(name):
    assert error(by_hand(WEIGHTS[name]), exact_gradient(name)) < RIGHT / 10
    other = next(weights for key, weights in WEIGHTS.items() if key != name)
    assert error(by_hand(other), exact_gradient(name)) > 0.05


@pytest.mark.parametrize(
    ("loss", "term"),
    [
        ("grpo", of.clipped(0.8, 1.2)),
        pytest.param("sapo", of.sapo_term, marks=pytest.mark.full),
        ("vespo", of.vespo_term),
    ],
)
def test_the_loop_has_the_terms_of_the_enumerated_objectives(loss, term):
    """Those that `make estimators` compares with exact gradients of the expected reward."""
    policy = Distribution(enumerated(moved_by(0.02)), enumerated(flat_parameters()))
    ratios, positive = (policy.logps_PNT - policy.reference_PNT).exp(), REWARDS_PN[..., None] > 0
    wanted = term(ratios, policy.logps_PNT, positive).expand_as(ratios)
    compared = 0
    for prompt, completion in ((p, n) for p in range(len(ratios)) for n in range(0, ratios.size(1), 40)):
        length, advantage = int(LENGTHS_N[completion]), 1.0 if positive[prompt, completion] else -1.0
        whole = ratios[prompt, completion, :length].log().sum()
        for place in range(length):
            at = prompt, completion, place
            found = advantage * exact.term(loss, ratios[at], policy.logps_PNT[at], advantage, whole)
            assert float(found) == pytest.approx(float(wanted[at]), rel=1e-5)
            compared += 1
    assert compared > 50


def of_parts(size: int, lengths: list[int] = LENGTHS) -> list[int]:
    """The tokens of the part of so many rows that each row is in."""
    parts = [sum(lengths[start : start + size]) for start in range(0, len(ROWS), size)]
    return [parts[number // size] for number in range(len(ROWS))]


MASKED = [sum(OBJECTIVES["dapo, truncated masked"].mask(row)) for row in ROWS]
FAULTS: dict[str, tuple[str, Weights]] = {  # the objective that is meant, and the weight of each row's tokens
    "mean of micro-batch means": ("dapo", [1 / 4 / tokens for tokens in of_parts(4)]),
    "tokens of the micro-batch": ("dapo", [1 / tokens for tokens in of_parts(4)]),
    "tokens of each process": ("dapo", [1 / 2 / tokens for tokens in of_parts(8)]),
    "a truncated row counts": ("dapo, truncated masked", [1 / sum(LENGTHS)] * len(ROWS)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows_at_its_arithmetic_size(fault):
    """The fault as a trainer's loss makes it, and its size from the weights of tokens alone."""
    name, weights = FAULTS[fault]
    meant = MASKED if "truncated" in name else LENGTHS
    right = [bool(length) / sum(meant) for length in meant]

    def gradient(objective: given.Objective, split: Split, rows: list[given.Row], policy: object, _: object) -> object:
        if fault == "a truncated row counts":
            return gradient_of(policy, lambda: exact.loss(OBJECTIVES["dapo"], rows, policy))
        size = 8 if "process" in fault else 4
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        over = 1 if "tokens of the micro-batch" in fault else len(parts)
        return gradient_of(policy, *(lambda part=part: exact.loss(objective, part, policy) / over for part in parts))

    adapter = SimpleNamespace(**{**DEFAULTS, "gradient": gradient})
    found = cell(adapter, OBJECTIVES[name], Split(4), exact_gradient(name), torch.float64)["error"]
    assert found == pytest.approx(error(by_hand(weights), by_hand(right)), rel=1e-4)
    assert found > 0.05
    planted = {"objective": name, "split": "1 x 4", "dtype": "float64", "error": found}
    assert f"| {name} | **{found:.2g}** |" in table([{"name": fault, "entry": "planted", "cells": [planted]}])


@pytest.mark.parametrize("name", few_of(DEFAULTS["OBJECTIVES"], ("dapo",)))
def test_this_package_makes_the_exact_update(name):
    """One split that no other trainer takes; the others are in the table."""
    adapter = load(str(ADAPTERS / "grpo_ext.py"))
    objective = OBJECTIVES[name]
    policy, reference = (model(objective, torch.float64, seed) for seed in (0, 1))
    wanted = gradient_of(policy, lambda: exact.loss(objective, ROWS, policy, reference))
    assert cell(adapter, objective, Split(5), wanted, torch.float64)["error"] < RIGHT


@pytest.mark.full
def test_rules_for_rollouts_of_several_rows_are_as_wrong_as_the_page_says():
    assert f"\n{rules()}\n" in (ROOT / "docs" / "conform.md").read_text()


@pytest.mark.full
def test_the_adapter_of_the_page_is_exact_and_wrong_ones_show(tmp_path):
    text = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "conform.md").read_text(), re.DOTALL)[0]
    for name, change, splits in (
        ("exact", ("", ""), set()),
        ("unsynchronised", ("dist.all_reduce(value)", "pass"), {"2 x 8", "2 x 2"}),
        ("apart", ("if split.processes > 1", "if False"), {"2 x 8", "2 x 2"}),
        ("local", ("/ tokens", "/ sum(sum(row.trained) for row, _ in own)"), {"2 x 8", "2 x 2"}),
        (
            "nothing",
            ("loss.backward()", "(loss * float('nan')).backward()"),
            {one.name for one in SPLITS[:3] + SPLITS[4:]},
        ),
    ):
        (tmp_path / f"{name}.py").write_text(text.replace(*change) if change[0] else text)
        result = results(tmp_path / f"{name}.py")
        assert {cell["split"] for cell in result["cells"] if is_wrong(result, cell)} == splits, name


def test_the_page_keeps_what_is_written_by_hand():
    found = [{"name": "x", "failed": "no GPU"}]
    text = page("# Title\n\nBy hand.\n\n<!-- written by make conform -->\n\nold", found)
    assert text.startswith("# Title\n\nBy hand.\n")
    assert "Not run: no GPU." in text
    assert "old" not in text


# one of each kind: `make conform` takes all
COMPARED = ("grpo", "bnpo", "dapo", "luspo", "dapo, truncated masked", "grpo, KL", "dapo, top entropy")
COMPARED += ("dapo, load balance",)


@pytest.mark.full
def test_rows_of_this_package_and_of_stock_trl():
    """On one and two processes; the cells where stock TRL is right, and where it is not."""
    ours, stock = (results(ADAPTERS / f"{name}.py", COMPARED) for name in ("grpo_ext", "trl"))
    assert len(ours["cells"]) == len(COMPARED) * (6 + 2)  # the first split of each launch also in float32
    assert max(one["error"] for one in ours["cells"]) < RIGHT
    errors = {(one["objective"], one["split"]): one.get("error") for one in stock["cells"] if one["dtype"] == "float64"}
    assert {objective for (objective, split), found in errors.items() if split == "1 x 16" and found < RIGHT} == {
        *COMPARED
    }
    assert errors["grpo", "2 x 2"] < RIGHT
    assert errors["grpo, KL", "2 x 8"] < RIGHT
    assert errors["bnpo", "1 x 1"] > 0.1
    assert errors["dapo", "1 x 4, 2 rollouts"] > 0.1
    assert all(found is None for (_, split), found in errors.items() if split == "1 x 5")
    assert "| bnpo | 2e-7 |" in summary([ours])

"""Rows are a layout: a completion that is cut into rows is trained as the whole one, whatever the layout of the run."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.worker import build, train
from tests.support.cases import CASES, FILTERED, REUSED, Bench, CaseRun
from tests.support.cuts import CutRollouts, Cuts, cutting, token_reward
from tests.support.float64 import float64_throughout
from tests.support.images import FAMILIES
from tests.support.launches import REFERENCE, Launches, Trained, describe_difference, metric_difference
from tests.support.row_faults import FAULTS
from tests.support.selection import few_of
from tests.support.tiny import generated_rollout, given_rollout
from tests.support.trainers import error, update
from tests.tolerances import CUT_FLOAT64, DIFFERENT, METRIC, METRIC_BFLOAT16, UPDATE, UPDATE_BFLOAT16

full = pytest.mark.full
TIGHT = {"micro_batch_tokens": 24}  # fewer tokens than the rows of most completions have
TERMS = {"beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.5}
# a case of the matrix with other settings
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "gspo_terms": ("gspo", TERMS),
    "luspo_reused": ("luspo", {**REUSED, **TERMS}),
    "kl_biased": ("kl", {"use_bias_correction_kl": False}),
    "gspo_kl_biased": ("gspo", {**TERMS, "use_bias_correction_kl": False}),
    "token_sequence_mask": ("sequence_mask", {"importance_sampling_level": "sequence", **FILTERED}),
    "vespo_kl": ("vespo", {"beta": 0.1, "off_policy_mask_threshold": 1e-4}),
    "leave_one_out": ("grpo", {"advantage_estimator": "leave_one_out"}),
    "routed_terms": ("routed", {**TERMS, "importance_sampling_level": "sequence", "router_aux_loss_coef": 1.0}),
    "own_loss_truncated": ("own_loss", {"mask_truncated_completions": True}),
}
NAMES = [*VARIED, *(name for name, case in CASES.items() if case.model not in FAMILIES)]


@dataclass(frozen=True)
class Layout:
    processes: int
    size: int  # completions of a micro-batch
    config: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # settings of cases that it does not take


LAYOUTS = {
    "pieces": Layout(1, 5, TIGHT),
    "padded": Layout(1, 3, {"forward": "padded"}),
    "two": Layout(2, 3, TIGHT),
    "prefix": Layout(1, 5, {"forward": "prefix", "micro_batch_tokens": 40}),
    "three": Layout(3, 8, {"micro_batch_tokens": 16}),
    "shared": Layout(2, 2, {"sequence_parallel_size": 2}, ("rollout_lag", "forward")),
    "large": Layout(2, 8),
}
CUTTING, OTHERS = ("pieces", "two", "prefix", "three"), ("padded", "shared", "large")
MIXED = ("hybrid", "hybrid_kl", "hybrid_mamba", "hybrid_moe", "ahead_hybrid", "lora_dropout_hybrid")
FEW = {"gspo_terms": "two", "lora_dropout": "padded"}


def case_of(name: str) -> tuple[str, dict[str, Any]]:
    return VARIED.get(name, (name, {}))


def fits(name: str, layout: str) -> bool:
    """Whether a case may run in a layout: models with recurrent layers have neither prefixes nor sequence slices.

    In half precision another form rounds otherwise, and a token near the bound of its clip is clipped or not.
    """
    case, settings = case_of(name)
    config = {**CASES[case].config, **settings}
    without = (name in MIXED and layout in ("prefix", "shared")) or (config.get("bf16", False) and layout == "prefix")
    return not ({*config} & {*LAYOUTS[layout].refused} or without)


def layouts_of(name: str) -> list[str]:
    """A layout of each case whose budget cuts completions, and of every third one a layout that does not."""
    place = NAMES.index(name)
    cutting, others = ([one for one in layouts if fits(name, one)] for layouts in (CUTTING, OTHERS))
    found = [*([FEW[name]] if name in FEW else []), cutting[place % len(cutting)]]
    return list(dict.fromkeys([*found, *([others[place // 3 % len(others)]] if place % 3 == 2 else [])]))


def run_of(bench: Bench, name: str, label: str, size: int = REFERENCE, **changes: Any) -> CaseRun:
    case, settings = case_of(name)
    return bench.run(case, size, name=f"{name}-{label}", **{**settings, **changes})


def cut_run(bench: Bench, name: str, layout: str) -> CaseRun:
    return run_of(bench, name, layout, LAYOUTS[layout].size, cuts=Cuts(), **LAYOUTS[layout].config)


def other_context(bench: Bench, name: str) -> CaseRun:
    """The negative control: a token of each context is another one."""
    return run_of(bench, name, "other", cuts=Cuts(other_token=True))


# bitwise mode: processes and micro-batches, whose canonical units are the same
SPLITS = ((1, REFERENCE), (2, 3))
BITWISE = [
    *("replayed", "gspo_terms", "cut_moe", "routed_terms", "dropout_cut", "dynamic_reused", "ahead_teacher", "hybrid")
]


def bits_run(bench: Bench, name: str, size: int) -> CaseRun:
    return run_of(bench, name, f"{size}-bits", size, bitwise_invariant=True, trace=True, cuts=Cuts())


# processes, the case of the matrix, what it returns, and whether every process returns rollouts of several rows
RETURNED = {
    "given": (1, "rollout_func_few", given_rollout, True),
    "generated": (2, "generated", generated_rollout, True),
    "given on one": (2, "rollout_func_few", given_rollout, False),
}


def returned_run(bench: Bench, kind: str, label: str, most: int = 6, **changes: Any) -> CaseRun:
    """A run whose `rollout_func` returns rollouts of up to `most` rows."""
    _, name, function, everywhere = RETURNED[kind]
    settings = {"rewards": (token_reward,), "rollout_func": CutRollouts(function, most, everywhere), "trace": True}
    settings |= {**REUSED, "beta": 0.1, "loss_type": "grpo", "importance_sampling_level": "sequence", "max_steps": 3}
    settings["max_completion_length"] = 20
    return bench.run(name, changes.pop("size", REFERENCE), name=f"returned-{kind}-{label}", **{**settings, **changes})


def returned_runs(bench: Bench, kind: str) -> tuple[CaseRun, CaseRun, CaseRun]:
    """One row each; several that become one; and several, on the processes of this kind."""
    whole, joined = returned_run(bench, kind, "whole", most=1), returned_run(bench, kind, "joined")
    return whole, joined, returned_run(bench, kind, "cut", size=3, cuts=Cuts(most=1, joins=False), **TIGHT)


@pytest.fixture(scope="module")
def launches(tmp_path_factory, request) -> Launches:
    """The runs of the tests that were selected, launched together."""
    together = Launches(Bench(tmp_path_factory.mktemp("rows")))
    bench = together.bench
    for item in request.session.items:
        params = item.callspec.params if item.module is request.module and hasattr(item, "callspec") else {}
        if "layout" in params:
            together.plan(1, run_of(bench, params["name"], "whole"))
            together.plan(LAYOUTS[params["layout"]].processes, cut_run(bench, params["name"], params["layout"]))
        elif "bits" in params:
            for processes, size in SPLITS:
                together.plan(processes, bits_run(bench, params["bits"], size))
        elif "control" in params:
            together.plan(1, run_of(bench, params["control"], "whole"))
            together.plan(1, other_context(bench, params["control"]))
        elif "kind" in params:
            for processes, run in zip((1, 1, RETURNED[params["kind"]][0]), returned_runs(bench, params["kind"])):
                together.plan(processes, run)
    return together


def matrix() -> list:
    return [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=() if FEW.get(name) == layout else full)
        for name in NAMES
        for layout in layouts_of(name)
    ]


def assert_as_whole(whole: Trained, cut: Trained, half: bool = False) -> tuple[float, float]:
    """Returns the error of the update, and the largest difference of a logged value."""
    assert whole.error is None, whole.error
    assert cut.error is None, cut.error
    apart, (gap, metric) = update_error(whole.delta, cut.delta), metric_difference(whole.log, cut.log)
    assert apart <= (UPDATE_BFLOAT16 if half else UPDATE), f"{apart:.2e}: {describe_difference(whole.delta, cut.delta)}"
    assert gap <= (METRIC_BFLOAT16 if half else METRIC), f"{metric} differs by {gap:.2e}"
    assert sum(float(d.norm()) for d in whole.delta.values()) > 1e-4
    return apart, gap


@pytest.mark.parametrize(("name", "layout"), matrix())
def test_completions_cut_into_rows_are_trained_as_whole_ones(launches, record_property, name, layout):
    whole = launches.result(1, run_of(launches.bench, name, "whole"))
    cut = launches.result(LAYOUTS[layout].processes, cut_run(launches.bench, name, layout))
    half = CASES[case_of(name)[0]].config.get("bf16", False)
    record_property("update, log", assert_as_whole(whole, cut, half))


@pytest.mark.parametrize("control", few_of(["gspo_terms", "moe", "hybrid", "lora_dropout"], ["gspo_terms"]))
def test_another_token_in_their_contexts_learns_something_else(launches, control):
    runs = run_of(launches.bench, control, "whole"), other_context(launches.bench, control)
    whole, other = (launches.result(1, run) for run in runs)
    assert other.error is None, other.error
    assert update_error(whole.delta, other.delta) > DIFFERENT


@full  # resumed on other processes they have them in test_resume.py
@pytest.mark.parametrize("bits", BITWISE)
def test_rows_have_the_same_bits_for_every_split(launches, bits):
    one, other = (launches.result(processes, bits_run(launches.bench, bits, size)) for processes, size in SPLITS)
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert one.trace == other.trace
    assert one.trace[0] != one.trace[-1]
    assert metric_difference(one.log, other.log) == (0.0, "")


ABOUT_ROWS = re.compile(r"rollout/(rows|context_tokens|untrained_tokens)")


def without_rows(result: Trained) -> Trained:
    """The result without what is logged of rows, which depends on how they were cut."""
    log = [{name: v for name, v in line.items() if not ABOUT_ROWS.fullmatch(name)} for line in result.log]
    return replace(result, log=log)


@pytest.mark.parametrize("kind", few_of(RETURNED, ["given"]))
def test_rows_of_a_rollout_func_are_trained_as_one(launches, record_property, kind):
    """Joined they are one row, with its bits; without joining they are several."""
    processes = 1, 1, RETURNED[kind][0]
    runs = zip(processes, returned_runs(launches.bench, kind), strict=True)
    whole, joined, cut = (launches.result(count, run) for count, run in runs)
    assert (whole.error, joined.error) == (None, None)
    assert joined.trace == whole.trace
    assert metric_difference(without_rows(whole).log, without_rows(joined).log) == (0.0, "")
    record_property("update, log", assert_as_whole(without_rows(whole), without_rows(cut)))
    rows = [[line["rollout/rows"] for line in run.log if "rollout/rows" in line] for run in (whole, joined, cut)]
    assert {*rows[0], *rows[1]} == {1.0}
    assert min(rows[2]) > 1.5


# ---- In this process ------------------------------------------------------------------------------------------------

DOUBLE = [  # not experts, whose grouped products have no float64, nor a teacher, in float32
    *("gspo_terms", "gspo_kl_biased", "luspo_reused", "vespo_kl", "own_loss_truncated", "kl_biased"),
    *("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "two_sided", "kl", "trust_tv", "sequence_mask"),
    *("replayed", "prompt_mean", "lora_dropout", "dropout", "gpt2", "off_policy", "dynamic_reused"),
]
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


@full
@pytest.mark.parametrize("name", DOUBLE)
def test_the_gradient_is_the_same_in_float64(tmp_path, record_property, name):
    bench, loaded = Bench(tmp_path), {"model_init_kwargs": {"dtype": torch.float64}}  # the reference model too
    results = []
    for label, cuts, layout in (("whole", None, {}), ("cut", Cuts(), TIGHT)):
        run = run_of(bench, name, label, 5, cuts=cuts, max_steps=2, **SGD, **loaded, **layout)
        trainer = build(run, tmp_path, 1)
        with float64_throughout(trainer.model), cutting(cuts):
            results.append(train(run, trainer).delta)
    apart = update_error(*results)
    record_property("update", apart)
    assert apart <= CUT_FLOAT64, f"{apart:.2e}: {describe_difference(*results)}"


# what a fault is planted in, and what it is off by at least
PLANTED: dict[str, dict[str, Any]] = {
    "sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 2},
    "tokens": {"loss_type": "dapo"},
    "experts": {"loss_type": "grpo", "model": "moe", "router_aux_loss_coef": 1.0},
}
PLACES = {
    "row_ratio": "sequences",
    "row_mean": "sequences",
    "without_slopes": "sequences",
    "contexts_routed": "experts",
}
PLANTED_ERROR = 1e-2


def learned(folder: Path, place: str, cuts: Cuts | None, fault: str | None = None) -> torch.Tensor:
    settings = {**SGD, "learning_rate": 0.3, "rollout_batch_size": 16, "max_steps": 1, **PLANTED[place]}
    with cutting(cuts), nullcontext() if fault is None else FAULTS[fault]():
        return update(folder / f"{place}-{cuts}", **settings, **({} if cuts is None else TIGHT))[0]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What is learned of whole completions; filled by the tests."""
    return {}


@pytest.mark.parametrize("fault", few_of(FAULTS, ["row_ratio"]))
def test_a_planted_fault_learns_something_else(tmp_path, wholes, record_property, fault):
    place = PLACES.get(fault, "tokens")
    if place not in wholes:
        wholes[place] = learned(tmp_path, place, None)
        assert error(wholes[place], learned(tmp_path, place, Cuts())) <= UPDATE
    apart = error(wholes[place], learned(tmp_path, place, Cuts(), fault))
    record_property("update", apart)
    assert apart > PLANTED_ERROR

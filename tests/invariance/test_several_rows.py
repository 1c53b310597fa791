"""Rows are a layout: a completion that is cut into rows is trained as the whole one, whatever the layout of the run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from grpo_ext.tools.check.worker import build, train
from tests.support.cases import CASES, FILTERED, REUSED, Bench, CaseRun
from tests.support.cuts import CutRollouts, Cuts, cutting, token_reward
from tests.support.float64 import float64_throughout
from tests.support.images import FAMILIES
from tests.support.launches import REFERENCE, Launches, Trained, describe_difference, metric_difference
from tests.support.selection import few_of
from tests.support.tiny import generated_rollout, given_rollout
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
WHOLE_ONLY = ("micro_batch_tokens",)


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
MIXED = ("hybrid", "hybrid_kl", "hybrid_mamba", "hybrid_moe", "ahead_hybrid", "lora_dropout_hybrid")
FEW = {"gspo_terms": "two", "routed_terms": "pieces", "own_loss_truncated": "three", "lora_dropout": "padded"}


def case_of(name: str) -> tuple[str, dict[str, Any]]:
    return VARIED.get(name, (name, {}))


def fits(name: str, layout: str) -> bool:
    """Whether a case may run in a layout: models with recurrent layers have neither prefixes nor sequence slices."""
    case, settings = case_of(name)
    config = {**CASES[case].config, **settings}
    return not ({*config} & {*LAYOUTS[layout].refused} or (name in MIXED and layout in ("prefix", "shared")))


def layouts_of(name: str) -> list[str]:
    """Two layouts of each case, one of which is in one process with a budget that cuts completions."""
    others = [layout for layout in list(LAYOUTS)[1:] if fits(name, layout)]
    place = NAMES.index(name)
    return list(dict.fromkeys([*([FEW[name]] if name in FEW else []), "pieces", others[place % len(others)]]))


def run_of(bench: Bench, name: str, label: str, size: int = REFERENCE, **changes: Any) -> CaseRun:
    case, settings = case_of(name)
    return bench.run(case, size, name=f"{name}-{label}", **{**settings, **changes})


def cut_run(bench: Bench, name: str, layout: str) -> CaseRun:
    return run_of(bench, name, layout, LAYOUTS[layout].size, cuts=Cuts(), **LAYOUTS[layout].config)


def other_context(bench: Bench, name: str) -> CaseRun:
    """The negative control: a token of each context is another one."""
    return run_of(bench, name, "other", cuts=Cuts(other_token=True))


EXACT = {"bitwise_invariant": True, "trace": True, "cuts": Cuts()}
# what bitwise mode takes, and what two of its layouts take
BITWISE = few_of([name for name in NAMES if name in ("replayed", "gspo_terms", "cut_moe", "routed_terms", "dropout_cut", "dynamic_reused", "ahead_teacher", "hybrid")], ("replayed",))


def bits_run(bench: Bench, name: str, size: int) -> CaseRun:
    return run_of(bench, name, f"{size}-bits", size, **EXACT)


RETURNED = {"given": given_rollout, "generated": generated_rollout}


def returned_run(bench: Bench, kind: str, label: str, size: int = REFERENCE, most: int = 6, **changes: Any) -> CaseRun:
    settings = {"rewards": (token_reward,), "rollout_chunk_size": 4, "beta": 0.1, **REUSED, "max_steps": 3}
    settings |= {"loss_type": "grpo", "importance_sampling_level": "sequence", "trace": "joins" not in str(changes)}
    name = "generated" if kind == "generated" else "rollout_func_few"
    function = CutRollouts(RETURNED[kind], most)
    return bench.run(name, size, name=f"{kind}-{label}", **{**settings, "rollout_func": function, **changes})


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
    return together


SPLITS = ((1, REFERENCE), (2, 3))


def matrix() -> list:
    return [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=() if FEW.get(name) == layout else full)
        for name in NAMES
        for layout in layouts_of(name)
    ]


def assert_as_whole(whole: Trained, cut: Trained, half: bool = False) -> tuple[float, float]:
    assert whole.error is None, whole.error
    assert cut.error is None, cut.error
    error = update_error(whole.delta, cut.delta)
    gap, metric = metric_difference(whole.log, cut.log)
    assert error <= (UPDATE_BFLOAT16 if half else UPDATE), f"{error:.2e}: {describe_difference(whole.delta, cut.delta)}"
    assert gap <= (METRIC_BFLOAT16 if half else METRIC), f"{metric} differs by {gap:.2e}"
    assert sum(float(d.norm()) for d in whole.delta.values()) > 1e-4
    return error, gap


@pytest.mark.parametrize(("name", "layout"), matrix())
def test_completions_cut_into_rows_are_trained_as_whole_ones(launches, record_property, name, layout):
    whole = launches.result(1, run_of(launches.bench, name, "whole"))
    cut = launches.result(LAYOUTS[layout].processes, cut_run(launches.bench, name, layout))
    half = CASES[case_of(name)[0]].config.get("bf16", False)
    record_property("update, log", assert_as_whole(whole, cut, half))


@pytest.mark.parametrize("control", few_of(["gspo_terms", "moe", "hybrid", "lora_dropout"], ["gspo_terms"]))
def test_another_token_in_their_contexts_learns_something_else(launches, control):
    whole, other = (launches.result(1, run) for run in (run_of(launches.bench, control, "whole"), other_context(launches.bench, control)))
    assert other.error is None, other.error
    assert update_error(whole.delta, other.delta) > DIFFERENT

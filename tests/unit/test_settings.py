"""The table of settings: every field of GRPOConfig is in one row, and nothing else in the package lists settings."""

import ast
import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trl

from grpo_ext import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.run.diff import RunOnDisk
from grpo_ext.run.record import Record
from grpo_ext.run.rerun import Beginning
from grpo_ext.runtime.determinism import CUBLAS
from grpo_ext.settings import EXCLUDED, STAGES, TABLE, decides, named, read_at, refuse_excluded, resumes, row_of

PACKAGE = Path(__file__).parents[2] / "grpo_ext"
FIELDS = {spec.name for spec in dataclasses.fields(GRPOConfig)}
ROWS = [name for row in TABLE for name in row.names.split()]
MARKS = {*("keeps", "unlike_trl", "planned", "copied", "engine", "to_vllm", "truncates", "limit", "size", "once")}
MARKS |= {"part", "unmeasured", "case"}
MOST = 2  # names of settings in a list elsewhere


def problems(fields: set[str]) -> dict[str, int]:
    """Fields that are not in exactly one row, and in how many they are."""
    return {name: count for name in sorted(fields) if (count := ROWS.count(name)) != 1}


def test_every_field_is_in_exactly_one_row_and_a_new_one_is_named():
    assert problems(FIELDS) == {}
    assert problems(FIELDS | {"brand_new"}) == {"brand_new": 0}  # the control


def test_a_row_says_what_it_knows():
    known = {name for kind in (trl.GRPOConfig, transformers.TrainingArguments) for name in kind.__dataclass_fields__}
    for row in TABLE:
        assert {*row.decides.split()} <= {*STAGES, "layout", "output"}, row.names
        assert row.read in ("build", "rollout", "loss", "args"), row.names
        assert {*row.marks.split()} <= MARKS, row.names
        assert row.resume in ("always", "bitwise", "state", "size", "noted", "free"), row.names
    assert {*named("unlike_trl")} <= FIELDS - known
    assert all(row_of(setting) is not None for setting in EXCLUDED)


def test_every_fact_that_excludes_a_setting_is_a_setting_or_made_by_a_check():
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "settings.py")
    code += (PACKAGE / "checks" / "settings.py").read_text()
    facts = {fact for facts in EXCLUDED.values() for fact in facts}
    assert {fact for fact in facts if fact not in FIELDS and f'"{fact}"' not in code} == set()


# numbers that decide what a step computes and have no range
UNBOUNDED = {"seed", "data_seed", "neftune_noise_alpha"}


def test_a_number_that_decides_what_a_step_computes_has_a_range(tmp_path):
    steps = {*STAGES} - {"schedule", "optimizer"}
    usual = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False}
    taken = set()
    for spec in dataclasses.fields(GRPOConfig):
        kinds = {*re.findall(r"\w+", getattr(spec.type, "__name__", str(spec.type)))}
        if not kinds & {"int", "float"} or "list" in kinds or not {*row_of(spec.name).decides.split()} & steps:
            continue
        try:
            GRPOConfig(**usual, **{spec.name: math.nan})
        except ConfigError:
            continue
        taken.add(spec.name)
    assert taken == UNBOUNDED | {"canonical_unit_size"}  # which is read in bitwise mode


def test_values_that_work_in_trl_are_taken(tmp_path):
    usual = {"output_dir": str(tmp_path), "report_to": "none", "bf16": False}
    unbounded = {"entropy_target": math.inf, "entropy_coef_max": math.inf, "entropy_coef_min": -math.inf}
    numbers = {"epsilon_high": np.float32(0.28), "beta": np.float64(0.1), "top_p": np.float16(0.5)}
    config = GRPOConfig(**usual, **unbounded, **numbers)
    assert vars(config).items() >= (unbounded | numbers).items()
    with pytest.raises(ConfigError, match="entropy_coef=None: use a finite number"):
        GRPOConfig(**usual, entropy_coef=None)


@pytest.mark.parametrize("name", ["num_generations", "rollout_batch_size", "max_completion_length"])
def test_whole_numbers_of_numpy_are_taken_and_others_are_said_to_be_none(tmp_path, name):
    config = GRPOConfig(str(tmp_path), **{"rollout_batch_size": 16, name: np.int64(16)})
    assert type(getattr(config, name)) is int
    with pytest.raises(ConfigError, match=rf"{name}=16.0 must be a whole number"):
        GRPOConfig(str(tmp_path), **{name: 16.0})


def test_one_name_that_may_change_is_not_a_list_of_letters(tmp_path):
    config = GRPOConfig(str(tmp_path), allow_changed_on_resume="data")
    assert config.may_change == {"data"}
    config.allow_changed_on_resume = None
    assert config.may_change == set()
    config.allow_changed_on_resume = "temperature"  # set by a script
    assert config.may_change == {"temperature"}
    run = RunOnDisk(tmp_path, Record())
    again = Beginning(run, tmp_path, None, range(1, 2), False).arguments(config)
    assert again.may_change == {"temperature", "stopped_early"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "a group needs at least 2 completions"),
        (1, "a group needs at least 2 completions"),
        (8.0, "num_generations=8.0 must be a whole number, 2 or more"),
    ],
)
def test_the_size_of_a_group_says_its_rule(tmp_path, value, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), num_generations=value)


def test_a_check_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    config = GRPOConfig(output_dir=str(tmp_path), report_to="none", bf16=False)
    before = {**vars(config), "bitwise_invariant": True}
    config.bitwise_invariant = True
    config.check()
    assert vars(config) == before
    assert CUBLAS not in os.environ
    assert GRPOConfig(output_dir=str(tmp_path), report_to="none", bf16=False, bitwise_invariant=True).tf32 is False
    assert CUBLAS in os.environ or torch.cuda.is_initialized()


def test_settings_that_are_read_at_each_loss_are_those_of_the_documents():
    page = (PACKAGE.parent / "docs" / "overrides.md").read_text()
    [row] = [line for line in page.splitlines() if line.endswith("| read at each loss |")]
    names = re.findall(r"`([a-z_.]+)`", row)
    in_args = {name.removeprefix("args.") for name in names if name.startswith("args.")}
    assert in_args <= {*read_at("args")}
    on_trainer = {name for name in names if not name.startswith("args.")} - {"max_completion_length", "epsilon_low"}
    assert on_trainer | {"beta", "epsilon"} == {*read_at("loss")} - {"use_adaptive_entropy"}


def test_a_field_of_a_users_own_has_no_row_and_is_compared():
    assert row_of("of_mine") is None
    assert resumes("of_mine") == "always"
    assert not decides("of_mine", "loss")
    assert decides("data.by_column.answer", "rewards")
    assert decides("data.by_column.prompt", "prompts")
    assert decides("model.config.rope_theta", "completions")


def test_the_table_imports_neither_torch_nor_trl():
    code = "import sys; import grpo_ext.settings; print({'torch', 'trl', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "set()", done.stderr


def constants(nodes: list[Any]) -> list[str]:
    """The names of settings among the elements of a display, in unpacked displays too."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            found += constants(node.value.elts)
        elif isinstance(node, ast.Constant) and node.value in FIELDS:
            found.append(node.value)
    return found


def is_rule(node: ast.AST) -> bool:
    """Whether the value of a dictionary is a rule: a function, or a display, and no plain value or text."""
    return isinstance(node, ast.Lambda | ast.Tuple | ast.List | ast.Set | ast.Dict) or (
        isinstance(node, ast.Call) and getattr(node.func, "id", "")[:1].isupper()
    )


def lists_of_settings(path: str, text: str) -> Iterator[str]:
    """Tuples, lists and sets of more than `MOST` names of settings, and dictionaries that map as many to rules."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and len(constants(node.elts)) > MOST:
            yield f"{path}:{node.lineno}"
        elif isinstance(node, ast.Dict):
            rules = [key for key, value in zip(node.keys, node.values) if key is not None and is_rule(value)]
            if len(constants(rules)) > MOST:
                yield f"{path}:{node.lineno}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {*node.value.split()}
            if words <= FIELDS and len(words) > MOST:
                yield f"{path}:{node.lineno}"


def test_no_other_list_of_settings_stands_in_the_package():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "settings.py"]
    found = [line for path in files for line in lists_of_settings(str(path.relative_to(PACKAGE)), path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "planted",
    [
        'X = ("top_p", "top_k", "min_p")',
        'X = {*("top_p", "top_k"), "min_p"}',
        'X = {"top_p": lambda v: v > 0, "top_k": (1, 2), "min_p": [0]}',
        'X = "top_p top_k min_p".split()',
    ],
)
def test_a_planted_list_is_found(planted):
    assert [*lists_of_settings("planted.py", planted)] == ["planted.py:1"]
    values = 'X = {"top_p": 0.9, "top_k": 5, "min_p": 0.1}'
    assert [*lists_of_settings("values.py", values)] == []


def test_an_error_names_all_that_excludes_a_setting():
    facts = {"fsdp": True, "fp16": True, "tf32": False}
    with pytest.raises(ConfigError, match=r"^X cannot be combined with FSDP \(.*\); fp16 \(.*\)\. Turn one"):
        refuse_excluded("bitwise_invariant", "X", facts)
    refuse_excluded("bitwise_invariant", "X", {"tf32": False})

"""Two real processes through the configuration file that ships with the recipes."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from tests.distributed import tasks
from tests.support import forks
from tests.support.launch import ROOT, accelerate_launch, environment, launcher
from tests.support.selection import few_of
from tests.support.trainers import error
from tests.tolerances import METRIC, UPDATE


@pytest.fixture(scope="module")
def both(tmp_path_factory, request) -> dict[str, list[Any]]:
    """What each process has of every task.

    Through the launcher, with the file that ships with the recipes; with --full in interpreters of its own.
    """
    folder = tmp_path_factory.mktemp("both")
    env = environment(PYTHONPATH=str(ROOT))
    if forks.serves(env) and not request.config.getoption("--full"):
        status, _, output = forks.run_forked_by(launcher(), [tasks.__file__, str(folder)], env, 300)
    else:
        done = accelerate_launch(Path(tasks.__file__), str(folder))
        status, output = done.returncode, done.stderr
    assert status == 0, output[-3000:]
    first, second = tasks.results(folder)
    return {name: [first[name], second[name]] for name in first}


@pytest.fixture(scope="module")
def four_groups(both) -> list[dict[str, Any]]:
    return both["four groups"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return tasks.train_and_evaluate(tmp_path_factory.mktemp("alone"), 4)


def test_the_shipped_configuration_joins_two_processes(four_groups):
    assert [process["processes"] for process in four_groups] == [2, 2]
    assert four_groups[0]["parameters"] == four_groups[1]["parameters"]


def test_no_process_holds_the_buckets_of_ddp(four_groups, alone):
    assert {process["wrapper"] for process in four_groups} == {alone["wrapper"]}


def test_the_reference_has_the_weights_of_the_first_process(four_groups):
    first, *later = four_groups[0]["kl"]
    assert abs(first) < 1e-6  # nothing is learned yet
    assert later[0] > 1e-6


def test_a_process_without_rows_adds_none_to_what_is_gathered(both):
    assert [process["rows"] for process in both["gathered"]] == [[0.0, 1.0, 2.0]] * 2


def test_nested_values_arrive_on_every_process_and_texts_on_the_main_one(both):
    for process in both["gathered"]:
        assert len(process["nested"]) == 2
        for rank, found in enumerate(process["nested"]):
            sent = tasks.nested(rank)
            for one, other in ((found["ids"], sent["ids"]), (found["cube"], sent["cube"])):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert torch.equal(one, other)
            assert torch.equal(found["parts"][0]["flags"], sent["parts"][0]["flags"])
            assert found["parts"][1] == f"text {rank}"
    assert [process["on main"] for process in both["gathered"]] == [[0, 1, 1], []]
    assert [process["table"] for process in both["gathered"]] == [[16, 16, 32], [16, 16, 0]]


def test_rows_with_keys_of_their_own_give_reward_functions_the_same_on_two_processes(both, tmp_path):
    first, second = (process["columns"] for process in both["gathered"])
    for base in (GRPOTrainer, tasks.Rewards):
        name = base.__name__
        alone = tasks.row_columns(tmp_path / name, base)
        assert first[name] + second[name] == alone
        late = [] if base is GRPOTrainer else ["late"]
        assert {call[1] for call in alone} == {("a", "b", "c", "d", *late)}
        assert (len(alone), len(set(alone)), len(second[name])) == (16, 4, 8)


def test_what_is_not_finite_on_one_process_ends_the_run_on_both(both):
    first, second = both["gradient"]
    assert first == second
    error, moved, checkpoints = first
    assert re.match(r"the norm of the gradient of step 2 is nan: it comes from the completions \[\d+", error)
    assert not moved
    assert checkpoints == ["checkpoint-1"]
    first, second = both["weights"]
    assert first == second
    assert first[0].startswith("after step 2 trained weights are not finite")
    assert first[2] == ["checkpoint-1"]


def test_a_record_that_the_main_process_cannot_begin_ends_the_run_on_both(both):
    error = "LookupError: no source"
    assert both["unrecorded"] == [error, f"ProcessError: process 0 failed: {error}"]


def test_every_completion_is_scored_once(four_groups):
    # two steps of 16 completions, dealt to two processes; groups stay whole
    counts = [len(process["scored"]) for process in four_groups]
    assert counts == [16, 16]
    for process in four_groups:
        prompts = [prompt for prompt, _ in process["scored"]]
        assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 16, 4))
    assert four_groups[0]["logged_prompts"] == 16


def test_evaluation_prompts_are_dealt_whole_and_once(four_groups):
    assert sum(process["evaluated"] for process in four_groups) == 3 * 4
    assert four_groups[0]["eval_reward"] == four_groups[1]["eval_reward"]


def test_an_evaluation_for_which_one_process_has_no_memory_runs_again_on_both(four_groups, alone):
    assert [process["eval_failures"] for process in [alone, *four_groups]] == [0, 0, 1]
    for process in four_groups:
        assert process["eval_kl"] == pytest.approx(alone["eval_kl"], rel=METRIC)
        assert process["eval_loss"] == pytest.approx(alone["eval_loss"], rel=METRIC)


def test_what_reward_functions_log_and_see_is_that_of_one_process(four_groups, alone, tmp_path):
    for process in four_groups:
        assert process["metrics"] == alone["metrics"]
        assert process["table"] == alone["table"]
    logged = [line for line in alone["metrics"] if line.keys() & {"letters", "eval_letters"}]
    assert len(logged) == 3  # two steps and an evaluation
    rows = alone["logged_prompts"]
    for column in ("a", "none"):
        assert len(alone["table"][column]) == rows
        assert 0 < alone["table"][column].count(None) < rows  # or the columns of some calls would be those of all
    whole = tasks.train_and_evaluate(tmp_path, 4, chunk=16)  # as when a share is one call
    assert whole["metrics"] != alone["metrics"]
    assert whole["table"] != alone["table"]


def test_pass_at_k_is_that_of_one_process(both, alone):
    passes = alone["passes"]
    assert list(passes) == ["eval_mean@4", "eval_pass@1", "eval_pass@2", "eval_pass@3", "eval_pass@4"]
    assert 0 < passes["eval_pass@1"] < passes["eval_pass@4"]
    assert [process["passes"] for process in both["four groups"]] == [passes, passes]
    assert passes not in [process["passes"] for process in both["one group"]]  # another run


def test_a_process_without_a_group_scores_nothing_and_learns_and_logs_the_same(both, tmp_path):
    first, second = both["one group"]
    assert [len(first["scored"]), len(second["scored"])] == [8, 0]
    assert first["parameters"] == second["parameters"]
    alone = tasks.train_and_evaluate(tmp_path, 1)
    for process in both["one group"]:
        assert process["metrics"] == alone["metrics"]
        assert process["table"] == alone["table"]


@pytest.mark.full
def test_a_generate_of_the_models_own_is_asked_by_every_process_for_its_share(both, tmp_path):
    alone = tasks.train_and_evaluate(tmp_path, 1, own_model=True)
    assert alone["asked"] == [4] * 5  # two steps of one group, an evaluation of three
    # the second process had no group to train on
    assert [process["asked"] for process in both["own model"]] == [[4] * 4, [4]]
    for process in both["own model"]:
        assert process["metrics"] == alone["metrics"]
        assert process["table"] == alone["table"]
        assert process["parameters"] == pytest.approx(alone["parameters"], rel=UPDATE)


@pytest.mark.full
def test_images_that_an_environment_shows_reach_the_process_that_trains_on_them(both, tmp_path):
    """Groups, and so their rows, are scored by another process than trains on them."""
    alone = tasks.shown_images(tmp_path, 3)
    for update in both["images"]:
        assert error(alone, update) <= UPDATE


@pytest.mark.full
def test_a_checkpoint_on_a_disk_that_nodes_share_is_published_once(both):
    """A node that looks for its part while the checkpoint gets its name would move it away."""
    assert both["shared disk"] == [["README.md", "checkpoint-1", "steps.jsonl"]] * 2


@pytest.mark.parametrize("what", few_of(["fault", "refusal"], ["fault"]))
def test_packs_that_one_process_does_not_take_are_taken_by_none(both, what):
    first, second = both[what]
    assert first == second
    assert min(first) > 0


def test_processes_that_are_not_joined_are_refused(monkeypatch, tmp_path):
    from grpo_ext import GRPOConfig
    from grpo_ext.errors import ConfigError

    monkeypatch.setenv("WORLD_SIZE", "2")
    # as on a machine with one accelerator: Accelerate sees one process where the launcher started two
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: 1))
    with pytest.raises(ConfigError, match=r"launcher started 2 processes .* joins 1"):
        GRPOConfig(str(tmp_path), bf16=False)


@pytest.mark.parametrize("groups", few_of([3, 1], [3]))
def test_what_an_override_returns_is_trained_on_alike_on_two_processes(both, tmp_path, groups):
    """With 3 prompts a process has one more than the other; with one the second has none."""
    first, second = both[f"changed, {groups} groups"]
    assert first["update"].equal(second["update"])
    alone = tasks.changed_rollouts(tmp_path, groups, size=16)
    assert error(alone["update"], first["update"]) <= UPDATE
    one, few, *tokens = first["shapes"]
    assert (one, few, tokens[0]) == ([], [3 if groups > 1 else 2], tokens[1])


def test_a_model_that_padding_changes_learns_what_it_learns_on_one_process(both, tmp_path):
    first, second = both["padding"]
    assert first.equal(second)
    assert error(tasks.changed_by_padding(tmp_path, size=12), first) <= UPDATE


def test_a_step_runs_again(both, tmp_path):
    (text, about, rows), second = both["step again"]
    assert text == second[0]
    assert text.startswith("step 3: the same bits\n")
    assert len(rows) == 16
    assert all(len(row["tokens"]["training"]) == len(row["tokens"]["ids"]) for row in rows)
    own = [row["gradient"] for row in rows if row["gradient"] is not None]
    norms = [part["norm"] * part["cosine"] for part in own]
    assert math.fsum(norms) == pytest.approx(about["grad_norm"], rel=1e-5)
    alone = tasks.step_again(tmp_path)[1]  # on one process
    assert alone["layers"] == pytest.approx(about["layers"], rel=1e-4)
    assert "epsilon=0.1: no difference: the clip never binds in this step" in text
    for one, other in zip(alone["cases"][:2], about["cases"][:2], strict=True):
        assert one["gradient"]["all weights"]["difference"] > 0.01
        for what in ("gradient", "update"):
            for group, figures in one[what].items():
                assert figures == pytest.approx(other[what][group], rel=UPDATE, abs=UPDATE), group

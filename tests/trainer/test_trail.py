"""The trail of a run, and `grpo-ext diff`: planted differences are named with their stage and step."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.run import log as run_log
from grpo_ext.run import trail
from grpo_ext.run.diff import diff
from grpo_ext.run.record import STEPS, read_record
from grpo_ext.run.trail_comparison import SAME
from grpo_ext.tools.cli import app
from tests.support import trails
from tests.support.tiny import letter_reward, prompts, sparse_reward, tiny_model
from tests.support.trails import first_of, read_lines, write_lines
from tests.support.trainers import SAVE, make, on, parameters, passing_on

RUN: dict[str, Any] = {**trails.RUN, "max_steps": 4}
BITS: dict[str, Any] = {"bitwise_invariant": True}
ONE: dict[str, Any] = {"max_steps": 1}


def run(folder: Path, **changes: Any) -> Path:
    return trails.run(folder, **{**RUN, **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def bits(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("bits") / "run", **BITS)


@pytest.fixture(scope="module")
def thirds(tmp_path_factory) -> Path:
    """The run in smaller micro-batches."""
    return run(tmp_path_factory.mktemp("thirds") / "run", per_device_train_batch_size=3)


@pytest.fixture(scope="module")
def unskipped(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("unskipped") / "run", skip_zero_contribution=False)


@pytest.fixture
def copied(tmp_path, base) -> Path:
    """The folder of the run, for a test that writes to it."""
    return Path(shutil.copytree(base, tmp_path / "copy"))


def other_row() -> Any:
    return prompts(12).map(lambda row, number: row | ({"prompt": "zz"} if number == 7 else {}), with_indices=True)


class _Rewards:
    """Differs for one completion of the seventh call."""

    __name__ = "letter_reward"
    calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        rewards = letter_reward(completions=completions, **columns)
        return rewards if self.calls != 7 else [*rewards[:2], rewards[2] + 1, *rewards[3:]]


class _OtherToken(GRPOTrainer):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, *others = super()._generate_single_turn(*args, **kwargs)
        if self.state.global_step == 2:
            ids[5][0] = (ids[5][0] + 1) % 30 + 5
        return ids, *others


class _ScaledLoss(GRPOTrainer):
    calls = 0

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.calls += 1
        return super()._compute_loss(model, inputs) * (1.5 if self.calls == 5 else 1.0)


def nudge(model: torch.nn.Module) -> None:
    weight = model.get_output_embeddings().weight.data
    weight.view(torch.int32)[3, 5] += 1


def of_tokens(scale: float) -> Any:
    """A user's subclass with an advantage for each token."""

    class OfTokens(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            scored = super()._generate_and_score_completions(inputs)
            scored["advantages"] = scored["advantages"][:, None] * scored["completion_mask"] * scale
            return scored

    return OfTokens


PLANTED: dict[str, tuple[dict[str, Any], str, int, str, str]] = {
    "a data row": ({"train_dataset": other_row()}, "prompts", 1, "row 7", "data"),
    "a reward": ({"reward": _Rewards()}, "rewards", 2, "letter_reward gave", "reward function"),
    "a token": ({"cls": _OtherToken}, "completions", 3, "generation 1", "sampler itself"),
    "the loss": ({"cls": _ScaledLoss}, "values", 3, "grad_norm is", "override"),
    "beta": ({"beta": 0.1}, "values", 2, "loss is", "beta"),  # there is no divergence at step 1
    "the learning rate": ({"learning_rate": 2e-3}, "optimizer", 1, "learning_rate is", "learning_rate"),
    "the seed": ({"seed": 9}, "prompts", 1, "row", "seed"),
    "weight decay": ({"weight_decay": 0.5}, "weights", 1, "first in", "weight_decay"),
    # the weights differ by less than a hundredth of their change before a value does
    "a setting of Adam": ({"adam_beta2": 0.9}, "values", 3, "is", "optimizer has other settings: adam_beta2"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(tmp_path, base, name):
    changes, stage, step, what, meaning = PLANTED[name]
    found = diff(base, run(tmp_path / "run", **changes))
    assert found.verdict in ("different", "few tokens")
    assert first_of(found) == (stage, step), found.text
    assert re.search(f"^{stage}: .*{what}", found.text, re.MULTILINE)
    assert meaning in found.meaning


def test_what_no_setting_explains_is_named_before_a_guess(tmp_path, base):
    found = diff(base, run(tmp_path / "run", reward=_Rewards(), weight_decay=1e-12))
    assert first_of(found) == ("rewards", 2)
    assert "weight_decay (no setting that is known to decide this), or a reward function" in found.meaning


def test_a_difference_of_advantages_of_tokens_has_a_size(tmp_path):
    one, near, far = (run(tmp_path / str(scale), cls=of_tokens(scale), **ONE) for scale in (1.0, 1 + 1e-6, 1.5))
    found = diff(one, near)
    assert found.verdict == "rounding", found.text
    assert 0 < found.largest["advantages"] < 1e-5
    found = diff(one, far)
    assert first_of(found) == ("advantages", 1)
    assert re.search(r"advantages: .* and .* for generation \d of row \d", found.text)


def test_a_model_in_half_precision_differs_by_its_rounding(tmp_path):
    half = {"allow_split_dependent": True, "max_steps": 2}
    sizes = [(tiny_model("qwen2").to(torch.bfloat16), size) for size in (8, 3)]
    folders = [run(tmp_path / str(n), model=m, per_device_train_batch_size=n, **half) for m, n in sizes]
    assert diff(*folders).verdict in ("rounding", "few tokens"), diff(*folders).text


def test_reward_functions_of_one_name_are_told_apart(tmp_path):
    def doubled(completions, **columns):
        return [2 * reward for reward in letter_reward(completions=completions, **columns)]

    doubled.__name__ = letter_reward.__name__
    pairs = enumerate([[letter_reward, letter_reward], [doubled, letter_reward]])
    one, other = (run(tmp_path / str(i), reward=rewards, **ONE) for i, rewards in pairs)
    assert first_of(diff(one, other)) == ("rewards", 1)
    assert list(read_record(one).rollouts[1]["rounds"][0]["rewards"]) == ["letter_reward", "letter_reward (1)"]


def test_a_run_resumed_from_one_without_a_trail_is_compared_from_there_on(tmp_path, base):
    make(tmp_path / "first", **RUN, **{**SAVE, "save_steps": 2}, trail=False).train()
    trainer = make(tmp_path / "run", **RUN, per_device_train_batch_size=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    found = diff(base, tmp_path / "run")
    assert (found.verdict, found.steps) == ("rounding", 2), found.text
    assert found.text.splitlines()[1] == "B has no trail before step 3, so only later steps were compared."


def test_steps_that_a_trail_lacks_are_in_the_first_lines(base, copied):
    lines = read_lines(copied / STEPS)
    third = [("step", 3), ("rollout", 3)]
    write_lines(copied / STEPS, (line for line in lines if (line["line"], line["step"]) not in third))
    found = diff(base, copied)
    assert found.verdict == "same bits"
    assert found.text.splitlines()[1] == "B lacks 1 step in between, the first is 3; they were not compared."
    write_lines(copied / STEPS, (line for line in lines if (line["line"], line["step"]) != ("rollout", 1)))
    found = diff(base, copied)
    assert "prompts: only A has a rollout batch that begins here" in found.text


def test_a_run_that_has_not_ended_is_said(base, copied):
    write_lines(copied / STEPS, [line for line in read_lines(copied / STEPS) if line["line"] != "end"])
    said = "The last step of A is 4, that of B 4 (killed, or still training); 4 steps were compared."
    assert diff(base, copied).notes == [said]
    assert diff(base, base).notes == []


def test_the_text_is_short_and_shows_rewards_and_where_completions_part(tmp_path):
    folders = [run(tmp_path / str(cls), cls=cls, log_completions=True) for cls in (GRPOTrainer, _OtherToken)]
    text = diff(*folders).text
    assert "At step 3 the texts part at character 0: '" in text
    assert "Rewards of A and B: step 1: " in text
    assert "; step 4: " in text


def test_settings_and_data_that_differ_are_in_the_text(tmp_path, base):
    text = diff(base, run(tmp_path / "data", train_dataset=other_row(), learning_rate=2e-3, **ONE)).text
    assert "0.001 -> 0.002" in text
    assert re.search(r"data.by_column.prompt '[0-9a-f]{16}' -> '[0-9a-f]{16}'", text)


def test_a_setting_of_the_loss_is_named(tmp_path):
    reused = {"num_iterations": 2, "rollout_batch_size": 16, "max_steps": 2}
    one, other = (run(tmp_path / str(e), epsilon=e, **reused) for e in (0.1, 0.3))
    found = diff(one, other)
    assert first_of(found) == ("values", 2)
    assert found.meaning.endswith("epsilon.")


def test_a_bit_of_the_weights_is_found(tmp_path, bits):
    model: list[Any] = []
    callback = on("on_optimizer_step", lambda state: nudge(model[0]), at=2)
    trainer = make(tmp_path / "run", **RUN, **BITS, callbacks=[callback])
    model.append(trainer.model)
    trainer.train()
    found = diff(bits, tmp_path / "run")
    steps = [read_record(folder).steps for folder in (bits, tmp_path / "run")]
    equal = [one["weights"] == other["weights"] for one, other in zip(*(part.values() for part in steps))]
    assert equal[:3] == [True] * 3  # at the start and after two steps
    assert equal[3] is False
    assert found.verdict == "rounding"
    assert "Rounding begins at step 3, weights: first in " in found.text


def test_another_split_is_rounding(base, thirds):
    found = diff(base, thirds)
    assert (found.verdict, found.first) == ("rounding", None), found.text


@pytest.mark.full  # an override and a resume show it too
@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "same bits"),
        ({"forward": "padded"}, "rounding"),
        ({**BITS, "per_device_train_batch_size": 3}, "same bits"),
    ],
    ids=str,
)
def test_splits_are_the_same(tmp_path, base, bits, changes, verdict):
    found = diff(bits if "bitwise_invariant" in changes else base, run(tmp_path / "run", **changes))
    assert (found.verdict, found.first) == (verdict, None), found.text


def test_a_resumed_run_goes_on_in_its_trail(tmp_path, bits):
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "run", **RUN, **BITS, **SAVE, callbacks=[on("on_step_end", lambda state: 1 / 0, at=3)]).train()
    trainer = make(tmp_path / "run", **RUN, **BITS, **SAVE, per_device_train_batch_size=5)
    trainer.train(resume_from_checkpoint="latest")
    lines = read_lines(tmp_path / "run" / STEPS)
    assert [line["step"] for line in lines if line["line"] == "start"] == [0, 2]
    found = diff(bits, tmp_path / "run")
    assert (found.verdict, found.steps) == ("same bits", 4), found.text


def test_runs_that_log_nothing_have_a_trail(tmp_path):
    quiet = {"logging_strategy": "no", "logging_steps": 0, "max_steps": 3}
    folders = [run(tmp_path / str(size), **quiet, per_device_train_batch_size=size) for size in (8, 3)]
    assert diff(*folders).verdict == "rounding"
    assert [step for step, line in read_record(folders[0]).steps.items() if "weights" in line] == [0, 3]


def test_another_reward_under_dynamic_sampling_is_a_reward(tmp_path):
    def other(completions, **columns):
        return [None if r is None else r + 1.0 for r in sparse_reward(completions=completions, **columns)]

    other.__name__ = sparse_reward.__name__
    settings = {"dynamic_sampling": True, **ONE}
    folders = [run(tmp_path / str(i), reward=r, **settings) for i, r in enumerate((sparse_reward, other))]
    found = diff(*folders)
    assert (*first_of(found), found.verdict) == ("rewards", 1, "different")


def test_versions_and_settings_are_reported_and_are_no_difference(base, copied):
    first, *others = read_lines(copied / STEPS)
    write_lines(copied / STEPS, [{**first, "versions": {**first["versions"], "trl": "9"}}, *others])
    found = diff(base, copied)
    assert found.verdict == "same bits"
    assert any("versions.trl" in note for note in found.notes)


def test_a_few_tokens_that_rounding_changed_are_told_from_another_run(tmp_path, base, thirds):
    lines = read_lines(thirds / STEPS)
    for line in lines:
        if (line["line"], line["step"]) == ("rollout", 3):
            line["rounds"][0]["completions"][5] = "0" * 16
    shutil.copytree(thirds, tmp_path / "run")
    write_lines(tmp_path / "run" / STEPS, lines)
    found = diff(base, tmp_path / "run")
    assert found.verdict == "few tokens"
    assert "until step 3, where 1 of 16 completions changed" in found.text
    assert "the same up to rounding" in found.meaning


def test_runs_that_cannot_be_compared_say_why(tmp_path, base):
    with pytest.raises(ConfigError, match="global_batch_size"):
        diff(base, run(tmp_path / "size", global_batch_size=8, **ONE))
    with pytest.raises(ConfigError, match="had trail=False"):
        diff(base, run(tmp_path / "none", trail=False, **ONE))
    record = tmp_path / "size" / STEPS
    write_lines(record, [line for line in read_lines(record) if line["line"] != "end"])  # as after a kill
    run(tmp_path / "size", trail=False, **ONE)  # whose trail is of the earlier start
    with pytest.raises(ConfigError, match="had trail=False"):
        diff(base, tmp_path / "size")


def test_other_weights_at_the_start_are_named(tmp_path, base):
    found = diff(base, run(tmp_path / "run", model=tiny_model("qwen2", initializer_range=0.1), **ONE))
    assert first_of(found) == ("weights", 0)


def test_padding_of_an_override_is_no_difference(tmp_path, base):
    class Same(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return super()._generate_and_score_completions(inputs)

    found = diff(base, run(tmp_path / "run", cls=Same))
    assert found.verdict == "same bits", found.text


@pytest.mark.parametrize("name", ["compute_loss", "_compute_loss"])
def test_a_loss_that_is_passed_on_also_runs_what_contributes_nothing(tmp_path, base, unskipped, name):
    passed_on = run(tmp_path / "passed_on", cls=passing_on(name))
    assert diff(unskipped, passed_on).verdict == "same bits"
    found = diff(base, passed_on)
    assert found.verdict in SAME, found.text
    steps = [read_record(folder).steps for folder in (base, passed_on)]
    pairs = [[trail[step]["values"] for trail in steps] for step in range(1, 5)]
    skipped = [step for step, (one, other) in enumerate(pairs, 1) if one["counts/run"] < other["counts/run"] == 16]
    assert skipped == [
        step for step, (one, other) in enumerate(pairs, 1) if abs(one["entropy"] - other["entropy"]) > 1e-4
    ]
    assert skipped


def test_another_entropy_of_the_same_completions_is_a_difference(base, copied):
    lines = read_lines(base / STEPS)
    next(line for line in lines if (line["line"], line["step"]) == ("step", 2))["values"]["entropy"] += 0.01
    write_lines(copied / STEPS, lines)
    found = diff(base, copied)
    assert first_of(found) == ("values", 2)
    assert "values: entropy is" in found.text


def test_the_trail_changes_no_bit(tmp_path):
    trainers = [make(tmp_path / str(on), **{**RUN, "max_steps": 2}, trail=on) for on in (True, False)]
    for trainer in trainers:
        trainer.train()
    one, other = map(parameters, trainers)
    assert one.equal(other)
    assert [max(read_record(tmp_path / str(on)).steps, default=0) for on in (True, False)] == [2, 0]


def test_a_full_disk_ends_the_trail_and_not_the_run(tmp_path, monkeypatch, caplog):
    real = open

    def full(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(STEPS) and Path(path).is_file() and Path(path).stat().st_size > 10_000:
            raise OSError(28, "No space left on device")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(run_log, "open", full, raising=False)
    trainer = make(tmp_path / "run", **RUN)
    trainer.train()
    assert trainer.state.global_step == 4
    assert sum("continues without it" in r.getMessage() for r in caplog.records) == 1
    assert max(read_record(tmp_path / "run").steps) < 4


def test_entries_of_large_batches_are_blocks(monkeypatch):
    monkeypatch.setattr(trail, "MOST_ENTRIES", 4)
    assert trail.blocks([1, 2, 3]) == [1, 2, 3]
    one, other = trail.blocks(range(10)), trail.blocks([*range(9), 7])
    assert len(one) == 4
    assert [a == b for a, b in zip(one, other)] == [True, True, True, False]


@pytest.mark.full
def test_the_command_says_what_differs_on_a_page_too(tmp_path, base, thirds):
    other = run(tmp_path / "<b>other", seed=9, max_steps=2)
    files = [tmp_path / name for name in ("page.html", "result.json")]
    words = ["diff", str(base), str(other), "--html", str(files[0]), "--json", str(files[1])]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, json.loads(files[1].read_text())["verdict"]) == (1, "different")
    page = files[0].read_text()
    assert "What decides them: seed" in page
    assert "<b>" not in page
    assert page.count('src="data:image/png;base64,') >= 4
    assert CliRunner().invoke(app, ["diff", str(base), str(thirds)]).exit_code == 0
    words[4] = str(tmp_path / "none" / "page.html")
    assert "--html" in str(CliRunner().invoke(app, words).exception)

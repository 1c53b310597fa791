"""`trainer.rerun`: a step of a run again, what is recorded of it, and what tells that it is not the same."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, MemoryShortageError
from grpo_ext.run.checkpoint import checkpoints
from grpo_ext.run.record import STEP
from grpo_ext.run.rerun import Rerun
from grpo_ext.step.record import StepRecord
from tests.support.float64 import float64_throughout
from tests.support.selection import few_of
from tests.support.tiny import letter_reward, prompts, sparse_reward, tiny_model, tiny_tokenizer
from tests.support.tool_runs import always_calling
from tests.support.trainers import LORA, make, on, passing_on, watched

RUN: dict[str, Any] = {
    **{"report_to": "none", "max_steps": 6, "logging_steps": 1, "global_batch_size": 16, "disable_tqdm": True},
    **{"save_strategy": "steps", "save_steps": 2, "max_completion_length": 8},
}
SHORT: dict[str, Any] = {**RUN, "max_steps": 3}
BITS: dict[str, Any] = {"bitwise_invariant": True}
full = pytest.mark.full


def run(folder: Path, **changes: Any) -> Path:
    make(folder, **{**RUN, **changes}).train()
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def bits(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("bits") / "run", **BITS)


@pytest.fixture
def copied(tmp_path, base) -> Path:
    """The folder of the run, for a test that looks at it or breaks it."""
    return Path(shutil.copytree(base, tmp_path / "run", ignore=shutil.ignore_patterns("rerun")))


def rerun(folder: Path, step: int, options: Any = None, **changes: Any) -> Rerun:
    return make(folder, **{**RUN, **changes}).rerun(step, **(options or {}))


def recorded(again: Rerun) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is recorded of the step, and of each completion."""
    about, *rows = [json.loads(line) for line in (again.folder / STEP).read_text().splitlines()]
    return about, rows


def files(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "rerun" not in path.relative_to(folder).parts]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


# from the start, right after a checkpoint, and one step later
SIZES = [(2, 1, 3), (5, 5, 16), (6, 5, 3), (2, 1, 16), (5, 5, 3), (6, 5, 16)]


@pytest.mark.parametrize("case", few_of(SIZES, SIZES[:3]), ids=str)
def test_steps_have_the_same_bits_in_another_layout(bits, case):
    step, first, size = case
    before = files(bits)
    again = rerun(bits, step, **BITS, per_device_train_batch_size=size)
    assert (again.comparison.verdict, again.steps) == ("same bits", range(first, step + 1)), again.text
    assert files(bits) == before
    assert checkpoints(again.folder) == []


@full
@pytest.mark.parametrize("layout", [{"per_device_train_batch_size": 3}, {"forward": "padded"}], ids=str)
@pytest.mark.parametrize("step", [2, 5, 6])
def test_steps_are_the_same_by_default(base, step, layout):
    again = rerun(base, step, **layout)
    assert again.comparison.verdict == "rounding", again.text
    assert again.comparison.largest["values"] < 1e-5


KINDS: dict[str, dict[str, Any]] = {
    "lag": {"rollout_lag": 1},
    "LoRA": {"peft_config": LoraConfig(**LORA)},
    "iterations": {"num_iterations": 2, "rollout_batch_size": 32, "beta": 0.1, "max_steps": 6},
    "dynamic sampling": {"dynamic_sampling": True, "reward": sparse_reward},
    "truncated": {"mask_truncated_completions": True},
    "moved reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "two functions of one name": {"reward": [letter_reward, watched(lambda **columns: None)]},
    "half precision": {"bf16": True},
    "tools": always_calling(),
    "a stream": {"train_dataset": prompts(12).to_iterable_dataset()},
}


@pytest.mark.parametrize("kind", few_of(KINDS, ["lag"]))
def test_kinds_of_runs(tmp_path, kind):
    changes = {**RUN, "max_steps": 4, **KINDS[kind]}
    folder = run(tmp_path / "run", **changes)
    for step in (1, changes["max_steps"]):  # from the start, and from a checkpoint
        again = rerun(folder, step, **changes)
        assert again.comparison.verdict == "same bits", again.text
        about, rows = recorded(again)
        norm = math.hypot(*about["layers"].values())
        assert norm == pytest.approx(about["grad_norm"], rel=1e-5)
        assert len(rows) == changes["global_batch_size"]
        assert all(len(row["tokens"]["training"]) == len(row["tokens"]["ids"]) for row in rows)


def test_rewards_are_those_of_the_run(base):
    calls: list[Any] = []
    reward = watched(lambda **columns: calls.append(columns))
    again = rerun(base, 5, reward=reward)
    assert not calls
    rows = recorded(again)[1]
    assert [row["rewards"]["letter_reward"] for row in rows] == pytest.approx(
        letter_reward([row["prompt"] for row in rows], [row["completion"] for row in rows])
    )
    assert [row["row"] for row in rows][::4] != [None] * 4
    assert rerun(base, 5, {"call_rewards": True}, reward=reward).comparison.verdict == "same bits"
    assert calls


def test_an_edited_reward_is_reported_where_it_is_called(base):
    def edited(completions, **columns):
        return [
            value + ("b" in text)
            for value, text in zip(letter_reward(completions, completions), completions, strict=True)
        ]

    edited.__name__ = letter_reward.__name__
    assert rerun(base, 5, reward=edited).comparison.verdict == "same bits"
    found = rerun(base, 5, {"call_rewards": True}, reward=edited).comparison
    assert found.first is not None
    assert (found.verdict, found.first.stage, found.first.step) == ("different", "rewards", 5)


def log_probs(model: Any, row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a completion's tokens and entropies, by the model alone."""
    prompt = tiny_tokenizer()(row["prompt"], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([*prompt, *row["tokens"]["ids"]])
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return logits.gather(1, ids[len(prompt) :, None])[:, 0], -(logits.exp() * logits).sum(-1)


def values_of(tokens: dict[str, Any], name: str) -> torch.Tensor:
    return torch.tensor(tokens[name], dtype=torch.float64)


LOSSES = [{"loss_type": "grpo", "num_iterations": 2, "epsilon": 0.05}, {}, {"loss_type": "cispo", "num_iterations": 2}]


@pytest.mark.parametrize("changes", few_of(LOSSES, LOSSES[:1]), ids=str)
def test_values_of_tokens_are_those_of_plain_transformers(tmp_path, changes):
    settings = {**RUN, **changes, "max_steps": 2, "beta": 0.1, "save_strategy": "no"}
    steps: list[list[dict[str, Any]]] = []
    with float64_throughout(tiny_model()):
        start = tiny_model().double()
        make(tmp_path / "run", tiny_model().double(), **settings).train()
        for step in (1, 2):
            model = tiny_model().double()
            again = make(tmp_path / "run", model, **settings, per_device_train_batch_size=3).rerun(step)
            about, rows = recorded(again)
            steps.append(rows)
            assert math.fsum(row["share"] for row in rows) == pytest.approx(about["loss"], abs=1e-9)
            for number, row in enumerate(rows):
                reference, entropies = log_probs(start, row)
                expected = {"after": log_probs(model, row)[0]}
                if step == 1:
                    expected |= {"training": reference, "old": reference, "entropy": entropies}
                elif "num_iterations" in changes:
                    before = steps[0][number]["tokens"]
                    expected |= {"training": values_of(before, "after"), "old": values_of(before, "training")}
                tokens = {
                    name: values_of(row["tokens"], name) for name in (*expected, "kl", "ratio", "training", "old")
                }
                expected["ratio"] = (tokens["training"] - tokens["old"]).exp()
                change = reference - tokens["training"]
                expected["kl"] = (change.exp() - change - 1) * expected["ratio"]
                for name, values in expected.items():
                    assert (tokens[name] - values).abs().max() < 1e-9, (step, name)


WITH_KL = {"beta": 0.1, "per_device_train_batch_size": 5}


@pytest.mark.parametrize("changes", few_of([{}, BITS, WITH_KL], [{}]), ids=str)
def test_gradients_of_completions_add_up(tmp_path, base, bits, changes):
    folder = run(tmp_path / "run", **changes) if changes is WITH_KL else bits if changes is BITS else base
    about, rows = recorded(rerun(folder, 5, {"gradients": True}, **changes))
    own = [row["gradient"] for row in rows if row["gradient"] is not None]
    assert math.fsum(part["norm"] * part["cosine"] for part in own) == pytest.approx(about["grad_norm"], rel=1e-4)
    assert all(row["advantage"] == 0.0 for row in rows if row["gradient"] is None)
    assert len({part["norm"] for part in own}) > 4


def test_what_cannot_be_run_again_says_why(tmp_path, base):
    with pytest.raises(ConfigError, match=r"no step 7; its record has the steps 1 to 6"):
        rerun(base, 7)
    with pytest.raises(ConfigError, match=r"not the run of .*data.by_column"):
        rerun(base, 3, train_dataset=prompts(12, seed=5))
    with pytest.raises(ConfigError, match=r"not the run of .*settings\.beta|not the run of .*beta 0\.0 -> 0\.1"):
        rerun(base, 3, beta=0.1)
    with pytest.raises(ConfigError, match="must be a whole number"):
        rerun(base, "3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rollout_func"):
        rerun(base, 3, rollout_func=lambda prompts, trainer: {})
    with pytest.raises(ConfigError, match="had trail=False"):
        rerun(run(tmp_path / "run", max_steps=1, trail=False), 1)
    trainer = make(tmp_path / "other", **{**RUN, "max_steps": 1, "save_strategy": "no"})
    trainer.train()
    with pytest.raises(ConfigError, match="no checkpoint before step 1"):
        trainer.rerun(1)
    assert not [*(tmp_path / "other" / "rerun").iterdir()]


def test_a_checkpoint_that_is_broken_or_deleted_meanwhile_is_passed_over(copied, monkeypatch):
    next((copied / "checkpoint-4").glob("*.safetensors")).write_bytes(b"broken")
    real = shutil.copytree

    def copy_and_delete(source: Any, *args: Any, **options: Any) -> Any:
        made = real(source, *args, **options)
        shutil.rmtree(source)  # the run goes on
        return made

    monkeypatch.setattr(shutil, "copytree", copy_and_delete)
    again = rerun(copied, 5)
    assert (again.comparison.verdict, again.steps) == ("same bits", range(3, 6))
    assert [path.name for path in checkpoints(copied)] == ["checkpoint-6"]


def test_a_trainer_is_as_before_and_can_run_further_steps(copied):
    called: list[int] = []
    trainer = make(copied, **RUN, callbacks=[on("on_step_end", lambda state: called.append(state.global_step))])
    settings, callbacks = dict(vars(trainer.args)), list(trainer.callback_handler.callbacks)
    folders = [trainer.rerun(step).folder for step in (3, 3, 5)]
    assert [folder.name for folder in folders] == ["step-3", "step-3-2", "step-5"]
    assert not called
    assert dict(vars(trainer.args)) == settings
    assert [*trainer.callback_handler.callbacks] == callbacks
    assert "_calculate_rewards" not in vars(trainer)
    assert trainer.eval_dataset is None


class _Helper(GRPOTrainer):
    """Has a helper that knows the trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = lambda: 1.0 + self.state.global_step

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.scale()


def passing(method: Any) -> Any:
    return lambda *args, **kwargs: method(*args, **kwargs)


@full
def test_code_that_holds_the_trainer_sees_its_steps(tmp_path):
    """A helper of a subclass, a reward, and functions that a user has assigned to the trainer."""

    def built() -> Any:
        def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
            return [value * (1 + trainer.state.global_step) for value in letter_reward(prompts, completions)]

        trainer: Any = make(tmp_path / "run", cls=_Helper, reward=reward, **SHORT)
        for name in ("create_optimizer", "training_step", "_compute_loss", "log", "train"):
            setattr(trainer, name, passing(getattr(trainer, name)))
        return trainer

    built().train()
    before = files(tmp_path / "run")
    assert built().rerun(3, call_rewards=True).comparison.verdict == "same bits"
    assert files(tmp_path / "run") == before


@full
def test_a_step_runs_again_with_the_settings_that_made_it(tmp_path):
    saves = {"max_steps": 4, "save_steps": 1, "num_iterations": 2, "rollout_batch_size": 16}
    run(tmp_path / "run", **saves)
    later = {**saves, "epsilon": 0.3, "allow_changed_on_resume": ["epsilon"]}
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    make(tmp_path / "run", **{**RUN, **later}).train(resume_from_checkpoint="latest")
    assert rerun(tmp_path / "run", 2, **saves).comparison.verdict == "same bits"
    assert rerun(tmp_path / "run", 4, **saves, epsilon=0.3).comparison.verdict == "same bits"
    with pytest.raises(ConfigError, match=r"epsilon 0\.3 -> 0\.2"):
        rerun(tmp_path / "run", 4, **saves)


def cut_rewards(completions: list[str], **columns: Any) -> list[float]:
    """No variance in most groups, so that dynamic sampling takes further rounds."""
    return [float(text.count("a") + text.count("b") > 1) for text in completions]


@full
@pytest.mark.parametrize("case", ["dynamic", "plain"])
def test_completions_that_begin_alike_and_are_masked_out_are_told_apart(tmp_path, case):
    changes = {**SHORT, "mask_truncated_completions": True, "max_completion_length": 3, "temperature": 0.2}
    changes |= {"dynamic_sampling": True, "reward": cut_rewards} if case == "dynamic" else {}
    folder = run(tmp_path / "run", **changes)
    assert rerun(folder, 3, **changes).comparison.verdict == "same bits"
    found = rerun(folder, 3, {"call_rewards": True}, **changes, cls=_LaterTokens).comparison
    assert found.first is not None
    assert (found.first.stage, found.first.step) == ("completions", 3)


class _LaterTokens(GRPOTrainer):
    """Other tokens after the first."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        ids, *others = super()._generate_single_turn(*args, **kwargs)
        return [[*row[:1], *((token + 1) % 30 + 5 for token in row[1:])] for row in ids], *others


@full
def test_rewards_are_called_again_from_where_the_completions_are_sampled(tmp_path):
    def edited(completions, **columns):
        return [value + 1 for value in letter_reward(completions, completions)]

    edited.__name__ = letter_reward.__name__
    sizes = {**RUN, "num_iterations": 2, "rollout_batch_size": 16, "save_steps": 1, "max_steps": 4}
    folder = run(tmp_path / "run", **sizes)
    again = rerun(folder, 4, {"call_rewards": True}, **sizes, reward=edited)
    assert again.steps == range(3, 5)
    assert again.comparison.first is not None
    assert (again.comparison.first.stage, again.comparison.first.step) == ("rewards", 3)
    assert rerun(folder, 4, **sizes, reward=edited).steps == range(4, 5)


def test_steps_on_the_way_that_had_other_settings_are_named(tmp_path):
    saves = {"max_steps": 3, "save_steps": 1}
    run(tmp_path / "run", **saves)
    later = {**saves, "epsilon": 0.3, "allow_changed_on_resume": ["epsilon"]}
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    make(tmp_path / "run", **{**RUN, **later}).train(resume_from_checkpoint="latest")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"no checkpoint lies between it and step 2.*epsilon 0\.2 -> 0\.3"):
        rerun(tmp_path / "run", 3, **later)
    assert not (tmp_path / "run" / "rerun" / "step-3").exists()


def test_a_rerun_that_fails_leaves_nothing_on_the_trainer(copied, monkeypatch):
    fails = [True]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return letter_reward(*args, **kwargs)

    trainer = make(copied, **RUN)
    take = StepRecord.fill

    def take_failing(record: StepRecord, *parts: Any) -> None:
        *others, _, run_again = parts
        take(record, *others, failing, run_again)

    monkeypatch.setattr(StepRecord, "fill", take_failing)
    with pytest.raises(MemoryShortageError, match=r"for its record or .* does not"):
        trainer.rerun(5, gradients=True)
    assert trainer._step_planner.record is None
    assert not checkpoints(copied / "rerun" / "step-5")


@full
def test_weights_that_were_not_compared_are_said(tmp_path):
    changes = {**SHORT, "logging_steps": 2}
    folder = run(tmp_path / "run", **changes)
    assert "weights were not compared" in rerun(folder, 1, **changes).text
    assert "weights" not in rerun(folder, 2, **changes).text


def test_the_gradients_of_reentrant_checkpointing(base):
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    about, rows = recorded(rerun(base, 5, {"gradients": True}, **kwargs))
    own = [row["gradient"] for row in rows if row["gradient"] is not None]
    assert math.fsum(part["norm"] * part["cosine"] for part in own) == pytest.approx(about["grad_norm"], rel=1e-4)


def test_the_padding_of_an_override_is_not_recorded(base):
    again = rerun(base, 5, cls=passing_on("_generate_and_score_completions"))
    assert again.comparison.verdict == "same bits"
    for row in recorded(again)[1]:
        assert "<pad>" not in row["prompt"]
        assert set(row["tokens"]["mask"]) == {1}

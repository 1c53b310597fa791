"""A teacher: numbers against plain transformers, what it leaves alone, and what is refused.

The matrix has it for every split and with a lag (tests/support/cases.py).
"""

import copy
from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.algorithms.policy_losses import POLICY_LOSSES
from grpo_ext.errors import CheckpointError, ConfigError, GrpoExtError, ModelError
from grpo_ext.forward.columns import KEPT_COUNTS, KEPT_IDS, TEACHER_LOGPS
from grpo_ext.rollouts.batch import RolloutBatch
from tests.support.float64 import float64_throughout
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import (
    SAVE,
    batches_of,
    change,
    error,
    log_of,
    make,
    on,
    parameters,
    passing_on,
    ran,
    train_and_keep_first,
)
from tests.tolerances import DIFFERENT, METRIC, UPDATE

SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
ALONE: dict[str, Any] = {"reward": None, "num_generations": 1, "teacher_kl_coef": 1.0}
FILTERED = {"top_p": 0.7, "sampling_mask": "replay"}


def teacher(kind: str = "llama", **changes: Any) -> Any:
    return tiny_model(kind, seed=5, **changes)


def constant(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def plain_scores(model: Any, batch: RolloutBatch, row: int, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a completion by a forward of transformers, over the tokens that sampling kept, (T,)."""
    prompt, completion = (list(batch[name])[row].long() for name in ("prompt_ids", "completion_ids"))
    logits_TV = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    if KEPT_COUNTS in batch.columns:
        counts = list(batch[KEPT_COUNTS])[row]
        kept_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        for token, ids in enumerate(list(batch[KEPT_IDS])[row].long().split(counts.tolist())):
            kept_TV[token, ids] = True
        logits_TV = logits_TV.masked_fill(~kept_TV, -torch.inf)
    return logits_TV.log_softmax(-1).gather(1, completion[:, None])[:, 0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"temperature": 0.7, "teacher_kl_coef": 0.3}, marks=pytest.mark.full),
        {"temperature": 0.7, "reward": None, "num_generations": 1, "teacher_kl_coef": 1.5},
        {**FILTERED, "forward": "padded"},
    ],
    ids=str,
)
def test_the_update_is_that_of_plain_transformers_in_float64(tmp_path, settings):
    temperature, factor = settings.get("temperature", 1.0), settings.get("teacher_kl_coef", 1.0)
    with float64_throughout(tiny_model().double()) as model, float64_throughout(teacher().double()) as other:
        policy, plain_teacher = copy.deepcopy(model), copy.deepcopy(other)
        trainer = make(tmp_path, model, teacher_model=other, **SGD, **settings)
        batches = batches_of(trainer)
        found = change(trainer)
        (batch,) = batches
        kl, loss, tokens = 0.0, torch.zeros(()).double(), sum(batch.completions.lengths)
        for row, advantage in enumerate(batch["advantages"].tolist()):
            student_T = plain_scores(policy, batch, row, temperature)
            kl_T = (student_T - plain_scores(plain_teacher, batch, row, temperature)).detach()
            loss = loss - ((advantage - factor * kl_T) * student_T).sum() / tokens
            kl += float(kl_T.sum()) / tokens
        loss.backward()
    expected = torch.cat([-p.grad.flatten() for p in policy.parameters()])
    assert error(expected, found) < 1e-9
    assert log_of(trainer, "teacher_kl") == [pytest.approx(kl, abs=1e-9)]
    assert abs(kl) > 0.1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("llama", {"rollout_lag": 1, "max_steps": 3}, marks=pytest.mark.full),
        ("llama", {**FILTERED, "rollout_batch_size": 32, "forward": "prefix", "max_steps": 2}),
        pytest.param("gpt2", {"mask_truncated_completions": True, "beta": 0.1}, marks=pytest.mark.full),
        # which routes by itself
        pytest.param("moe", {"model": "moe", "routing_replay": True, "max_steps": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_column_is_the_teachers_own_and_the_teacher_stays_as_it_is(tmp_path, kind, settings):
    trainer = make(tmp_path, teacher_model=teacher(kind), **settings)
    start = copy.deepcopy(trainer.teacher_model.state_dict())
    batches = batches_of(trainer)
    trainer.train()
    with torch.no_grad():
        for batch in batches:
            for row, found in enumerate(batch[TEACHER_LOGPS]):
                if batch.completions.lengths[row]:
                    expected = plain_scores(teacher(kind), batch, row)
                    assert float((found - expected).abs().max()) < 10 * METRIC
    assert all(torch.equal(value, start[name]) for name, value in trainer.teacher_model.state_dict().items())
    assert not any(p.requires_grad for p in trainer.teacher_model.parameters())


def test_with_a_lag_the_copy_of_the_teacher_shares_its_weights(tmp_path):
    trainer = make(tmp_path, teacher_model=teacher(), rollout_lag=1)
    pairs: list[bool] = []

    def look(state: Any) -> None:
        copied = trainer._rollouts.ahead.snapshot.teacher
        assert copied is not trainer.teacher_model
        shared = zip(copied.parameters(), trainer.teacher_model.parameters(), strict=True)
        pairs.extend(one.data_ptr() == other.data_ptr() for one, other in shared)

    trainer.add_callback(on("on_step_end", look, at=1))
    trainer.train()
    assert pairs
    assert all(pairs)


def test_a_teacher_equal_to_the_policy_adds_nothing(tmp_path):
    """The same bits, beside rewards; another one changes them."""
    settings = {"bitwise_invariant": True, "max_steps": 1}
    without = change(make(tmp_path / "without", **settings))
    equal = make(tmp_path / "equal", teacher_model=tiny_model(), **settings)
    assert torch.equal(without, change(equal))
    assert log_of(equal, "teacher_kl") == [0.0]
    assert error(without, change(make(tmp_path / "other", teacher_model=teacher(), **settings))) > DIFFERENT


def test_groups_with_equal_rewards_learn_from_it(tmp_path, caplog):
    settings: dict[str, Any] = {"reward": constant, "max_steps": 1}
    assert not change(make(tmp_path / "without", **settings)).any()  # the control
    trainer = make(tmp_path / "with", teacher_model=teacher(), dynamic_sampling=True, **settings)
    assert change(trainer).any()
    assert "dynamic_sampling=True replaces no group beside a teacher" in caplog.text
    assert not any(name.startswith("dynamic_sampling/") for name in trainer.state.log_history[0])


@pytest.mark.full  # in 30 steps; the update of one step is compared above
def test_the_policy_moves_towards_it(tmp_path):
    settings = {**ALONE, "global_batch_size": 64, "max_steps": 30, "learning_rate": 1e-2, "max_completion_length": 6}
    trainer = make(tmp_path, teacher_model=teacher("qwen2"), lr_scheduler_type="constant", **settings)
    trainer.train()
    kl = log_of(trainer, "teacher_kl")
    assert sum(kl[-8:]) < 0.8 * sum(kl[:8])
    assert log_of(trainer, "rewards/no_reward/mean") == [0.0] * 30


def test_a_wider_vocabulary_is_fine(tmp_path):
    wide = teacher(vocab_size=len(tiny_tokenizer()) + 6)
    batch = train_and_keep_first(make(tmp_path, teacher_model=wide, max_steps=1, **FILTERED))
    found = next(iter(batch[TEACHER_LOGPS]))
    assert float((found - plain_scores(wide, batch, 0)).abs().max()) < 10 * METRIC


@pytest.mark.full
def test_overrides_pass_it_on(tmp_path):
    names = ("_generate_and_score_completions", "_get_per_token_logps_and_entropies", "compute_loss", "_compute_loss")
    expected = change(make(tmp_path / "plain", teacher_model=teacher(), max_steps=1))
    for name in names:
        trainer = make(tmp_path / name, cls=passing_on(name), teacher_model=teacher(), max_steps=1)
        assert error(expected, change(trainer)) < UPDATE


@pytest.mark.parametrize("name", ["_generate_and_score_completions", "compute_loss"])
def test_an_override_without_the_column_ends_the_run(tmp_path, name):
    def score(self: Any, inputs: Any) -> Any:
        scored = GRPOTrainer._generate_and_score_completions(self, inputs)
        return {column: value for column, value in scored.items() if column != TEACHER_LOGPS}

    def loss(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        kept = {column: value for column, value in inputs.items() if column != TEACHER_LOGPS}
        return GRPOTrainer.compute_loss(self, model, kept, **options)

    cls = type("Own", (GRPOTrainer,), {name: loss if name == "compute_loss" else score})
    with pytest.raises(ConfigError, match=rf"no {TEACHER_LOGPS}.*pass on"):
        make(tmp_path, cls=cls, teacher_model=teacher()).train()


def test_an_evaluation_logs_the_distance(tmp_path):
    trainer = make(tmp_path, teacher_model=teacher(), eval_dataset=make(tmp_path / "d").train_dataset, **ALONE)
    assert trainer.evaluate()["eval_loss"] > 0
    assert log_of(trainer, "eval_teacher_kl")[0] > 0.1


# ---- Resume ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits(tmp_path):
    settings = {"bitwise_invariant": True, "rollout_batch_size": 32, **SAVE}

    def run(name: str, checkpoint: Any = None) -> Any:
        return ran(make(tmp_path / name, teacher_model=teacher(), **settings), checkpoint)

    straight = run("out")
    resumed = run("resumed", str(tmp_path / "out" / "checkpoint-1"))  # within a rollout batch
    assert torch.equal(parameters(straight), parameters(resumed))
    assert log_of(straight, "teacher_kl") == log_of(resumed, "teacher_kl")


def test_a_run_is_resumed_with_its_own_teacher_alone(tmp_path):
    with_teacher, without = {"teacher_model": teacher(), **SAVE}, SAVE
    make(tmp_path / "with", max_steps=1, **with_teacher).train()
    make(tmp_path / "without", max_steps=1, **without).train()
    other = {"teacher_model": tiny_model("llama", seed=6)}
    for folder, changes, named in (
        ("with", {}, "teacher"),
        ("without", {"teacher_model": teacher()}, "teacher"),
        ("with", other, r"model\.frozen"),
        ("with", {"teacher_model": teacher(), "teacher_kl_coef": 2.0}, "teacher_kl_coef: 1.0 in the checkpoint, 2"),
    ):
        checkpoint = str(tmp_path / folder / "checkpoint-1")
        with pytest.raises(CheckpointError, match=named):
            make(tmp_path / "again", **changes).train(checkpoint)
    allowed = ["teacher_kl_coef", "max_steps"]
    make(tmp_path / "weaker", allow_changed_on_resume=allowed, teacher_kl_coef=0.5, **with_teacher).train(checkpoint)


# ---- What is refused ------------------------------------------------------------------------------------------------


def saved(folder: Any, tokens: list[str] | None = None) -> str:
    teacher().save_pretrained(folder)
    (tiny_tokenizer() if tokens is None else tiny_tokenizer(tokens=tokens)).save_pretrained(folder)
    return str(folder)


def test_a_name_loads_it_and_its_tokens_are_compared(tmp_path):
    same = make(tmp_path / "out", teacher_model=saved(tmp_path / "same"), max_steps=1)
    assert error(change(make(tmp_path / "object", teacher_model=teacher(), max_steps=1)), change(same)) == 0.0
    turned = list(tiny_tokenizer().get_vocab())
    turned[10], turned[11] = turned[11], turned[10]
    other = saved(tmp_path / "other", turned)
    loaded = type(teacher()).from_pretrained(other)
    for changes in ({"teacher_model": other}, {"teacher_model": loaded}):
        with pytest.raises(ConfigError, match=r"tokens differ in the teacher's tokenizer.*same vocabulary"):
            make(tmp_path / "out", **changes)


REFUSED: list[tuple[dict[str, Any], type[GrpoExtError], str]] = [
    ({"teacher_kl_coef": 0.5}, ConfigError, r"teacher_kl_coef=0\.5.*without a teacher; set teacher_model"),
    ({"teacher_kl_coef": 0.0}, ConfigError, r"teacher_kl_coef=0\.0: use a number above 0"),
    ({"num_generations": 1}, ConfigError, r"num_generations=1.*or 1 with a teacher .* and no reward function"),
    (
        {"num_generations": 1, "teacher_kl_coef": 1.0, "teacher_model": teacher},
        ConfigError,
        "a teacher.*reward functions and num_generations=1.*Leave one",
    ),
    (
        {"teacher_model": teacher, "teacher_model_init_kwargs": {"dtype": "bfloat16"}},
        ConfigError,
        "a teacher.*teacher_model_init_kwargs in GRPOConfig",
    ),
    ({"teacher_model": lambda: teacher(vocab_size=40)}, ModelError, r"vocab_size=40.*resize_token_embeddings\(\d+\)"),
    ({"teacher_model": lambda: teacher().model}, ModelError, "cannot both sample and score"),
    ({"teacher_model": "nowhere/at/all"}, ModelError, "there is no folder 'nowhere/at/all' with a model"),
    ({"reward": None}, ValueError, "No reward source"),  # TRL's
]


@pytest.mark.parametrize(("changes", "kind", "match"), REFUSED, ids=[match for *_, match in REFUSED])
def test_what_cannot_work_is_refused_before_training(tmp_path, changes, kind, match):
    made = {name: value() if name == "teacher_model" and callable(value) else value for name, value in changes.items()}
    with pytest.raises(kind, match=match):
        make(tmp_path, **made)


def test_a_teacher_that_would_move_with_the_policy_is_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"weights that the policy shares.*pass a copy"):
        make(tmp_path, model, teacher_model=model)
    replaced = teacher()
    replaced.model.layers[0].forward = lambda *args, **kwargs: None
    with pytest.raises(ModelError, match=r"layers\.0 was replaced.*rollout_lag=0"):
        make(tmp_path, teacher_model=replaced, rollout_lag=1)
    trainer = make(tmp_path / "changed", teacher_model=teacher())
    trainer.add_callback(on("on_step_begin", lambda state: setattr(trainer, "teacher_model", None), at=1))
    with pytest.raises(ConfigError, match="teacher_model was changed"):
        trainer.train()


def test_a_teacher_serves_the_trainers_of_one_temperature(tmp_path):
    shared = teacher()
    make(tmp_path / "first", teacher_model=shared)
    make(tmp_path / "alike", teacher_model=shared)
    with pytest.raises(ModelError, match=r"a trainer with temperature=1\.0, and this one has 0\.5; load it"):
        make(tmp_path / "cooler", teacher_model=shared, temperature=0.5)


def test_an_attribute_of_a_subclass_that_has_the_name_is_left_alone(tmp_path):
    class Theirs(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.teacher_model = "theirs"
            super().__init__(*args, **kwargs)

    trainer = make(tmp_path / "out", cls=Theirs, max_steps=1)
    trainer.train()
    assert trainer.teacher_model == "theirs"
    plain = make(tmp_path / "plain", max_steps=1)
    plain.train()
    assert torch.equal(parameters(trainer), parameters(plain))


def test_a_registered_loss_has_to_fit_advantages_per_token(tmp_path, monkeypatch):
    def row_mean(logps_BT: Any, old_BT: Any, advantages: Any, mask_BT: Any) -> Any:
        return -advantages.mean(1, keepdim=True) * logps_BT  # over padding too

    monkeypatch.setitem(POLICY_LOSSES, "row_mean", (row_mean, False))
    make(tmp_path / "without", loss_type="row_mean")
    with pytest.raises(ConfigError, match="'row_mean' depends on the split"):
        make(tmp_path / "with", loss_type="row_mean", teacher_model=teacher())

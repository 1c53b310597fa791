"""What samples ahead of training (`rollout_lag`): weights of the right step, errors, memory, refusals.

And beside what users do: subclasses, callbacks, contexts around `train()`.
"""

import contextvars
import functools
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, ModelError, ProcessError, RewardError
from grpo_ext.forward.snapshot import Abandoned, Snapshot
from grpo_ext.runtime.determinism import computing_with
from tests.support.architectures import architecture
from tests.support.selection import few_of
from tests.support.server import StandIn, stand_in
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import LORA, SAVE, batches_of, log_of, make, on, other, parameters, passing_on, ran, watched


def log_probs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Of the tokens of a completion, by transformers alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]


def assert_sampled_by(rollout: Any, model: Any) -> None:
    """The old log-probabilities of a rollout batch are those of this model."""
    for prompt, ids, logps in zip(*(rollout[name] for name in ("prompt_ids", "completion_ids", "old_per_token_logps"))):
        assert torch.allclose(logps, log_probs(model, prompt.tolist(), ids.tolist()), atol=2e-5)


def test_old_log_probabilities_are_those_of_the_step_that_is_named(tmp_path):
    trainer = make(tmp_path, max_steps=4, rollout_lag=2, **SAVE)
    rollouts = batches_of(trainer)
    trainer.train()
    for step, rollout in enumerate(rollouts):
        sampled_at = max(0, step - 2)
        sampled = tmp_path / f"checkpoint-{sampled_at}"
        assert_sampled_by(rollout, AutoModelForCausalLM.from_pretrained(sampled) if sampled_at else tiny_model())


def test_buffers_are_those_of_the_step_that_is_named(tmp_path):
    def balanced(folder: Any) -> Any:
        model = architecture("deepseek_v3", initializer_range=0.2)  # whose router has a bias that is a buffer

        def balance(state: Any) -> None:
            generator = torch.Generator().manual_seed(state.global_step)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn(buffer.shape, generator=generator).to(buffer))

        return other(folder, model=model, rollout_lag=1, callbacks=[on("on_step_end", balance)])

    whole = balanced(tmp_path)
    rollouts = batches_of(whole)
    whole.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float32).eval()
    assert_sampled_by(rollouts[2], model)
    again = ran(balanced(tmp_path), tmp_path / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(again))


@pytest.mark.full
def test_a_reward_function_sees_the_progress_that_the_weights_had(tmp_path):
    seen: list[int] = []

    def note(trainer_state: Any, **columns: Any) -> None:
        time.sleep(random.SystemRandom().uniform(0, 0.05))
        seen.append(trainer_state.global_step)
        assert all(entry["step"] <= trainer_state.global_step for entry in trainer_state.log_history)

    make(tmp_path, reward=watched(note), max_steps=6, rollout_lag=1, rollout_chunk_size=16).train()
    assert seen == [0, 0, 1, 2, 3, 4]


def leaves(completions: list[str], **columns: Any) -> list[float]:
    sys.exit(3)


@pytest.mark.parametrize(
    ("reward", "error", "words"),
    [
        (lambda completions, **columns: [float("nan")] * len(completions), RewardError, "returned nan in row 0"),
        (leaves, ProcessError, r"the sampling thread ended by SystemExit\(3\)"),
    ],
)
def test_an_error_in_the_thread_is_the_error_of_the_run(tmp_path, reward, error, words):
    with pytest.raises(error, match=words):
        make(tmp_path, reward=reward, rollout_lag=1).train()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def test_copies_compute_in_the_precision_of_training(tmp_path):
    kinds: dict[str, set[torch.dtype]] = {"training": set(), "sampling": set()}
    trainer = make(tmp_path, rollout_lag=1, bf16=True, max_steps=2)

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        main = threading.current_thread() is threading.main_thread()
        kinds["training" if main else "sampling"].add(output.dtype)

    trainer.model.model.layers[0].self_attn.q_proj.register_forward_hook(note)
    trainer.train()
    assert kinds == {"training": {torch.bfloat16}, "sampling": {torch.bfloat16}}


def test_an_adapter_shares_the_weights_that_are_not_trained(tmp_path):
    trainer = other(tmp_path, peft_config=LoraConfig(**LORA), rollout_lag=1, beta=0.1)
    live = trainer.model
    snapshot = Snapshot(live, None, False, "cpu", lambda model: model)
    pairs = list(zip(live.named_parameters(), snapshot.policy.parameters()))
    for (name, own), copied in pairs:
        assert own is not copied
        assert own.data_ptr() == copied.data_ptr(), name  # until weights are put in place
        assert not copied.requires_grad
    weights = snapshot.copy_weights({"global_step": 0})
    assert set(weights.policy) == {name for name, p in live.named_parameters() if p.requires_grad}
    snapshot.put_in_place(weights)
    for (name, own), copied in pairs:
        assert (own.data_ptr() == copied.data_ptr()) == (not own.requires_grad), name


@pytest.fixture
def server(tmp_path, monkeypatch) -> StandIn:
    return stand_in(tmp_path / "server", monkeypatch.setattr)


@pytest.mark.parametrize(("evaluates", "dynamic"), [(True, False), pytest.param(False, True, marks=pytest.mark.full)])
def test_a_server_has_the_weights_that_sample_and_no_others(tmp_path, server, evaluates, dynamic):
    lag = 1 + evaluates
    settings = {"use_vllm": True, "vllm_mode": "server", "max_steps": 4, "learning_rate": 1e-2, "top_k": 0}
    settings["dynamic_sampling"] = dynamic
    if evaluates:
        settings |= {"eval_dataset": prompts(4, seed=1), "eval_strategy": "steps", "eval_steps": 1}
    trainer = ran(other(tmp_path, rollout_lag=lag, **settings))
    for name in ("min", "max"):  # of the trainer's log-probabilities to the server's
        ratios = log_of(trainer, f"sampling/importance_sampling_ratio/{name}")
        assert len(ratios) >= 4
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4)
    assert max(log_of(trainer, "sampling/ratio_max")) > 1.2
    assert server.sent >= 4 - lag


@pytest.mark.parametrize("adapter", [False, True])
def test_what_was_abandoned_stops_at_its_next_forward(adapter):
    model = tiny_model()
    model = get_peft_model(model, LoraConfig(**LORA)) if adapter else model
    snapshot = Snapshot(model, None, False, "cpu", lambda twin: twin)
    ids = torch.tensor([[3, 4]])
    snapshot.policy.generate(input_ids=ids, max_new_tokens=2)
    snapshot.abandoned.set()
    for run in (snapshot.policy, snapshot.policy.generate):
        with pytest.raises(Abandoned):
            run(input_ids=ids)


@pytest.mark.full
def test_the_threads_of_a_cpu_are_divided(tmp_path):
    seen: set[tuple[str, int]] = set()

    def note(part: str) -> None:
        seen.add((part, torch.get_num_threads()))

    trainer = make(tmp_path, reward=watched(lambda **columns: note("sampling")), rollout_lag=1, max_steps=2)
    trainer.add_callback(on("on_step_end", lambda state: note("training")))
    with computing_with(4):
        trainer.train()
        assert torch.get_num_threads() == 4
    assert seen == {("training", 2), ("sampling", 2)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout_lag": -1}, "rollout_lag=-1"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching"),
        ({"torch_compile": True}, "torch_compile"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"generation_kwargs": {"do_sample": False}}, r"do_sample=False.*only this trainer's own sampling"),
        (
            {"train_dataset": IterableDataset.from_generator(lambda: iter(prompts(12)))},
            r"a stream \(rows are read before their step",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **{"rollout_lag": 1, **settings})


@pytest.mark.parametrize(("part", "name"), [("", "Qwen2ForCausalLM"), ("lm_head", "lm_head")])
def test_a_model_with_a_forward_of_its_own_is_refused(tmp_path, part, name):
    model = tiny_model()
    module = model.get_submodule(part)
    inner = module.forward
    module.forward = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    with pytest.raises(ModelError, match=f"the forward of {name} was replaced"):
        make(tmp_path / "one", model=model, rollout_lag=1)
    used = tiny_model()
    make(tmp_path / "two", model=used)
    # a trainer before it has left the head of this package
    make(tmp_path / "three", model=used, rollout_lag=1, max_steps=1).train()


def longer(trainer: GRPOTrainer, seconds: float) -> TrainerCallback:
    """Lets completions grow; and takes its time."""

    def grow(state: Any) -> None:
        trainer.generation_config.max_new_tokens = 4 + 2 * state.global_step
        if state.global_step == 2:
            trainer.reward_funcs[0] = lambda completions, **columns: [float(len(text)) for text in completions]
        time.sleep(seconds)

    return on("on_step_end", grow)


@pytest.mark.full
def test_settings_of_sampling_and_rewards_change_with_the_steps_and_not_with_the_speed(tmp_path):
    runs = []
    for training, rewards in ((0.05, 0.0), (0.0, 0.05)):
        reward = watched(lambda slow=rewards, **columns: time.sleep(slow))
        settings = {"rollout_lag": 2, "max_steps": 5, "max_completion_length": 4, "rollout_chunk_size": 16}
        trainer = make(tmp_path / str(training), reward=reward, **settings)
        trainer.add_callback(longer(trainer, training))
        trainer.train()
        runs.append(trainer)
    assert torch.equal(parameters(runs[0]), parameters(runs[1]))
    assert log_of(runs[0], "completions/max_length") == log_of(runs[1], "completions/max_length")
    assert log_of(runs[0], "completions/max_length")[-1] > 4
    assert log_of(runs[0], "reward")[-1] > 2.0  # no share of letters


@pytest.mark.parametrize("dynamic", few_of([False, True], [False]))
def test_rewards_are_joined_and_logged_as_at_the_submission(tmp_path, dynamic):
    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    settings = {"dynamic_sampling": dynamic, "dynamic_sampling_max_rounds": 1} if dynamic else {}

    def replace_rewards(state: Any) -> None:
        trainer.reward_funcs = [lambda completions, v=value, **_: [v] * len(completions) for value in (2.0, 3.0)]
        trainer.reward_func_names = ["two", "three"]
        trainer.reward_processing_classes = [None, None]
        trainer.reward_weights = torch.tensor([1.0, 10.0])

    trainer = make(tmp_path, reward=one, rollout_lag=2, max_steps=5, **settings)
    trainer.add_callback(on("on_step_end", replace_rewards, at=1))
    trainer.train()
    assert log_of(trainer, "reward") == [1.0, 1.0, 1.0, 32.0, 32.0]
    assert log_of(trainer, "rewards/one/mean") == [1.0] * 3
    assert log_of(trainer, "rewards/three/mean") == [3.0] * 2


request: contextvars.ContextVar[str] = contextvars.ContextVar("request")


def test_what_is_set_around_training_is_set_for_sampling(tmp_path):
    seen: set[tuple[str, str]] = set()

    reward = watched(lambda **columns: seen.add((threading.current_thread().name, request.get())))
    token = request.set("seven")
    try:
        trainer = make(tmp_path, reward=reward, rollout_lag=1, max_steps=2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trainer.train()
    finally:
        request.reset(token)
    assert seen == {("rollouts", "seven")}
    # nothing has been trained yet: old log-probabilities are those of the policy only in the same precision
    assert log_of(trainer, "sampling/ratio_max")[0] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("copied", "words"), [({"rollout_lag": 1}, "cannot be copied"), ({"beta": 0.1}, "a folder that")]
)
def test_a_model_that_cannot_be_copied_is_refused_where_it_has_to_be(tmp_path, copied, words):
    model = tiny_model()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match=words):
        make(tmp_path / "one", model=model, **copied)
    make(tmp_path / "two", model=model)


def test_noise_that_speed_would_order_is_refused(tmp_path):
    settings = {"allow_split_dependent": True, "disable_dropout": False}
    noisy = tiny_model()
    noisy.config.attention_dropout = 0.1
    for layer in noisy.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match=r"attention_dropout=0.1 .two threads would draw from one stream"):
        make(tmp_path / "one", model=noisy, rollout_lag=1, **settings)
    make(tmp_path / "two", rollout_lag=1, **settings)


@pytest.mark.parametrize("name", ["_generate_and_score_completions", "_generate_single_turn"])
def test_an_override_of_sampling_is_refused_with_a_lag(tmp_path, name):
    subclass = passing_on(name)
    with pytest.raises(ConfigError, match=rf"Own\.{name}: .* Use rollout_lag=0"):
        make(tmp_path, cls=subclass, rollout_lag=1)
    make(tmp_path / "without", cls=subclass)
    assigned = make(tmp_path / "assigned", rollout_lag=1)
    setattr(assigned, name, getattr(subclass, name))
    with pytest.raises(ConfigError, match=rf"GRPOTrainer\.{name}: .* Use rollout_lag=0"):
        assigned.train()


class Gathering(GRPOTrainer):
    """Overrides that gather, as TRL's methods do."""

    gathered: set[tuple[str, str, int]]

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        self.gathered.add(("rewards", threading.current_thread().name, len(self.accelerator.gather(torch.ones(2)))))
        return super()._calculate_rewards(*args)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.gathered.add(("logps", threading.current_thread().name, 0))
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def test_overrides_that_work_with_a_lag_run_where_they_may_gather(tmp_path):
    Gathering.gathered = set()
    make(tmp_path, cls=Gathering, rollout_lag=1, max_steps=2).train()
    where = {("rewards", "MainThread", 2), ("logps", "rollouts", 0), ("logps", "MainThread", 0)}
    assert Gathering.gathered == where

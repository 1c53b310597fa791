"""Settings of sampling, rewards and processes: refused before training, or said at its start."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from trl.rewards import think_format_reward

from grpo_ext import GRPOConfig, GRPOTrainer, compat
from grpo_ext.errors import ConfigError
from tests.support.drop_in import conversations
from tests.support.tiny import letter_reward, own_config, prompts, tiny_model, tiny_tokenizer, tokenizer_with
from tests.support.trainers import SAVE, change, error, make
from tests.tolerances import DIFFERENT, UPDATE

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}a:<think>{% endif %}"


def with_settings(folder: Any, size: int, **settings: Any) -> torch.Tensor:
    """What one step changes where each `generate` call samples a number of completions."""
    pad = {"model": tiny_model(pad_token_id=1), "per_device_train_batch_size": 4}
    return change(make(folder, max_steps=1, rollout_chunk_size=size, generation_kwargs=settings, **pad))


@pytest.mark.full
def test_the_prompts_that_share_a_call_change_nothing_where_processors_read_rows(tmp_path):
    settings = {"min_length": 9, "no_repeat_ngram_size": 2, "bad_words_ids": [[0, 4]]}
    whole = with_settings(tmp_path, 16, **settings)
    assert error(whole, with_settings(tmp_path, 4, **settings)) < UPDATE
    assert error(whole, with_settings(tmp_path, 16, no_repeat_ngram_size=2)) > DIFFERENT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"generation_kwargs": {"max_time": 60.0}}, "max_time=60.0"),
        ({"generation_kwargs": {"encoder_no_repeat_ngram_size": 2}}, "encoder_no_repeat_ngram_size=2"),
        ({"model": own_config(max_time=60.0)}, "max_time=60.0"),
    ],
)
def test_settings_that_are_not_covered_are_said_and_refused_in_bitwise_mode(tmp_path, caplog, settings, named):
    make(tmp_path, max_steps=1, **settings).train()
    assert caplog.text.count(f"{named}: completions are not sampled by key") == 1
    with pytest.raises(ConfigError, match=f"bitwise_invariant=True cannot be combined with {named}"):
        make(tmp_path, bitwise_invariant=True, **settings)


FAIL = [
    ({"top_kk": 5}, "'top_kk' in generation_kwargs is not a setting of transformers; did you mean 'top_k'"),
    ({"stop": ["d"]}, "'stop' in generation_kwargs is not a setting of transformers; .* of vLLM; use stop_strings"),
    ({"top_k": -1}, "transformers cannot sample with these settings.*but is -1"),
    ({"stop_strings": [""]}, "an empty text would end every completion"),
    ({"min_p": 2.0}, "transformers cannot sample with these settings.*`min_p`"),
    ({"sequence_bias": [[[4000], 1.0]]}, "transformers cannot sample with these settings.*4000"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate cannot be used"),
    ({"token_healing": True}, "token_healing cannot be used"),
]


@pytest.mark.parametrize(("settings", "words"), FAIL, ids=[next(iter(s)) for s, _ in FAIL])
def test_settings_that_would_end_the_first_rollout_end_the_construction(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        make(tmp_path, generation_kwargs=settings)


def test_keys_that_vllm_does_not_know_are_refused(tmp_path, monkeypatch):
    parameters = SimpleNamespace(__struct_fields__=("min_tokens", "logit_bias"))
    monkeypatch.setattr(compat.vllm_generation, "SamplingParams", parameters, raising=False)
    with pytest.raises(ConfigError, match=r"'min_token' in .* is not a setting of vLLM; did you mean 'min_tokens'"):
        make(tmp_path, use_vllm=True, generation_kwargs={"min_token": 3})


def same_name(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


same_name.__name__ = "letter_reward"
CHAT = {"train_dataset": conversations(12), "processing_class": tiny_tokenizer(chat=True)}
THINK = {"reward": think_format_reward, **CHAT}
SAID: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": (
        {"generation_kwargs": {"temperature": 0.5}},
        "set GRPOConfig(temperature=0.5) instead): completions are sampled from other scores",
    ),
    "repetition_penalty": ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 (it changes scores"),
    "bad words": ({"generation_kwargs": {"bad_words_ids": [[5]]}}, "bad_words_ids=[[5]] (it changes scores"),
    "names": ({"reward": [letter_reward, same_name]}, "Several reward functions are named letter_reward"),
    "best": (
        {**SAVE, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4)},
        "the lowest eval_loss",
    ),
    "bfloat16": ({"model": tiny_model().bfloat16(), "bf16": None}, "27 of 27 trained tensors are bfloat16"),
    "think": ({**THINK, "processing_class": tokenizer_with(chat_template=TEMPLATE)}, "think_format_reward is always 0"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_seldom_meant_is_said_once_at_the_start(tmp_path, caplog, name):
    changes, words = SAID[name]
    make(tmp_path, max_steps=1, **changes).train()
    assert caplog.text.count(words) == 1


def test_each_trainer_says_once_that_it_samples_from_other_scores(tmp_path, caplog):
    for name in ("first", "second"):
        make(tmp_path / name, max_steps=2, repetition_penalty=1.2).train()
    assert caplog.text.count("completions are sampled from other scores") == 2


def test_nothing_is_said_of_ordinary_settings(tmp_path, caplog):
    make(tmp_path, max_steps=1, generation_kwargs={"temperature": 0.7}, temperature=0.7, **THINK).train()
    for words in ("are sampled from other", "are named", "eval_loss", "always 0", "does not cover this run"):
        assert words not in caplog.text


class Mesh(ParallelismConfig):
    """A mesh of processes that were not started."""

    def get_device_mesh(self, device_type: str | None = None) -> None:
        return None

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        return None


@pytest.mark.parametrize("name", [name for name in vars(ParallelismConfig()) if name.endswith("_size")])
def test_every_dimension_of_a_mesh_is_refused(tmp_path, monkeypatch, name):
    sizes = {name: 2} | ({"dp_shard_size": 2} if name == "dp_replicate_size" else {})
    monkeypatch.setattr(Accelerator, "parallelism_config", Mesh(**sizes))
    with pytest.raises(ConfigError, match=f"{name}=2"):
        make(tmp_path)


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
@pytest.mark.parametrize("launched", [False, True])
def test_a_mesh_that_splits_tokens_names_the_setting_that_shares_them(tmp_path, monkeypatch, name, launched):
    mesh = {} if launched else {"parallelism_config": ParallelismConfig(**{name: 2})}
    if launched:  # as Accelerate's launcher sets it
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")
    with pytest.raises(ConfigError, match=f"{name}=2 .*sequence_parallel_size=2"):
        GRPOConfig(str(tmp_path), **mesh)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2, "does not divide the number of processes, 1; start 2"),
        (0, "must be a whole number, 1 or more"),
        ("2", "is text, and takes int"),
        (None, "must be a whole number"),
    ],
)
def test_a_size_that_cannot_be_is_refused(tmp_path, value, words):
    with pytest.raises(ConfigError, match=f"sequence_parallel_size={value!r} {words}"):
        make(tmp_path, sequence_parallel_size=value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"forward": "prefix"}, "forward='prefix'"),
        ({"bitwise_invariant": True}, "bitwise_invariant=True"),
        ({"rollout_lag": 1}, "rollout_lag=1"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed"),
    ],
)
def test_what_does_not_go_with_shared_completions_is_refused(tmp_path, other, words):
    with pytest.raises(ConfigError, match=f"sequence_parallel_size=2 cannot be combined with {words}"):
        GRPOConfig(str(tmp_path), sequence_parallel_size=2, **other)


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        (GRPOTrainer, "get_tp_size", lambda self: 2, "tp_size=2"),
        (Accelerator, "distributed_type", DistributedType.MEGATRON_LM, "the engine MEGATRON_LM: "),
        (AcceleratorState, "fsdp_plugin", SimpleNamespace(fsdp_version=1, activation_checkpointing=False), "FSDP 1: "),
    ],
)
def test_engines_that_are_not_known_to_work_are_refused(tmp_path, monkeypatch, owner, name, value, words):
    monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(ConfigError, match=words):
        make(tmp_path)

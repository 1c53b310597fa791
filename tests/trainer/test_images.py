"""Models that take images train through TRL's own step, chosen once, when the trainer is built."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.tiny import config_kwargs, stock_scores, tiny_tokenizer
from tests.support.trainers import error, parameters
from tests.tolerances import ADAM_EPSILON, DIFFERENT, UPDATE

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# the one that needs no torchvision, by the name that transformers gives it
IMAGE_PROCESSOR = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor


def processor() -> LlavaProcessor:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    images = IMAGE_PROCESSOR(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, image_token="<image>", **options)


def model() -> LlavaForConditionalGeneration:
    tokenizer = processor().tokenizer
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, image_size=8, patch_size=4, **heads)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    text = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, **heads, **ids)
    token = tokenizer.convert_tokens_to_ids("<image>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlavaForConditionalGeneration(
            LlavaConfig(vision_config=vision, text_config=text, image_token_index=token)
        )


def rows() -> Dataset:
    images = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(8)]
    prompts = [[{"role": "user", "content": f"what {letter}"}] for letter in "abcdefgh"]
    return Dataset.from_list([{"prompt": p, "image": image} for p, image in zip(prompts, images)])


def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def make(folder: Any, cls: Any = GRPOTrainer, reward: Any = reward, **settings: Any) -> Any:
    kwargs = config_kwargs(folder, **{"per_device_train_batch_size": 4, "adam_epsilon": ADAM_EPSILON, **settings})
    if not issubclass(cls, GRPOTrainer):
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
        args: Any = trl.GRPOConfig(**kwargs, gradient_accumulation_steps=4)
    else:
        args = GRPOConfig(**kwargs)
    return cls(model(), reward, args, rows(), processing_class=processor())


def update(trainer: Any, seed: int = 3) -> torch.Tensor:
    transformers.set_seed(seed)  # TRL's sampling draws from torch's own generator
    start = parameters(trainer)
    trainer.train()
    return parameters(trainer) - start


@stock_scores
def test_they_learn_what_stock_trl_learns_and_the_start_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        ours = make(tmp_path / "ours")
        expected, found = update(make(tmp_path / "stock", trl.GRPOTrainer)), update(ours)
    assert "does not cover this run: images: trains through TRL's own code path" in caplog.text
    assert error(expected, found) <= UPDATE
    assert error(expected, update(make(tmp_path / "seed"), seed=4)) > DIFFERENT


@stock_scores
def test_a_users_overrides_of_the_step_are_around_trls_own(tmp_path):
    class Own(GRPOTrainer):
        seen: list[str]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = [*getattr(self, "seen", ()), "training_step"]
            return super().training_step(*args, **kwargs)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            assert "pixel_values" in inputs
            self.seen.append("_compute_loss")
            return super()._compute_loss(model, inputs)

    own = make(tmp_path / "own", Own)
    assert torch.equal(update(make(tmp_path / "ours")), update(own))
    assert own.seen == ["training_step", "_compute_loss"] * 8  # TRL's calls, one for each micro-batch


@stock_scores
def test_a_run_is_kept_and_its_rewards_are_checked(tmp_path):
    trainer = make(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    resumed = make(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, allow_changed_on_resume=["max_steps"])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    assert (tmp_path / "manifest.json").is_file()
    with pytest.raises(ValueError, match="returned nan in row 0"):
        make(tmp_path / "nan", reward=lambda completions, **kwargs: [float("nan")] * len(completions)).train()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"micro_batch_tokens": 64}, "micro_batch_tokens: images train through TRL's own code"),
        ({"advantage_estimator": "leave_one_out"}, "advantage_estimator: images"),
        ({"bitwise_invariant": True}, "images train through TRL's own code. Turn one"),
        ({"per_device_train_batch_size": 5}, "is not a multiple of per_device_train_batch_size=5 .*images"),
    ],
)
def test_what_trls_step_does_not_know_is_refused(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        make(tmp_path, **settings)

"""A short run that reports to trackers."""

from __future__ import annotations

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def train(folder, callbacks=(), resume=None, **settings):
    trainer = GRPOTrainer(
        tiny_model(),
        letter_reward,
        GRPOConfig(**config_kwargs(folder, **settings)),
        prompts(),
        eval_dataset=prompts(4, seed=1) if "eval_strategy" in settings else None,
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer

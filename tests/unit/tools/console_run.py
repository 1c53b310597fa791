"""A tiny run that is watched on the console while others speak too; started by test_console.py."""

from __future__ import annotations

import logging
import tempfile

from accelerate.logging import get_logger

from grpo_ext import Console, GRPOConfig, GRPOTrainer
from grpo_ext.runtime.quiet import quiet_libraries
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def talking_reward(prompts, completions, **kwargs):
    print("a print of the reward")
    get_logger("grpo_ext.trainer").warning("a warning of the project")
    logging.getLogger("mine").error("an error on a logger made before")
    return letter_reward(prompts, completions, **kwargs)


def main(folder: str) -> None:
    logging.getLogger("mine").addHandler(logging.StreamHandler())  # holds the stream of now
    quiet_libraries()
    settings = config_kwargs(
        folder, log_completions=True, num_completions_to_print=2, eval_strategy="steps", eval_steps=2, max_steps=3
    )
    Console().install(
        GRPOTrainer(
            model=tiny_model(),
            reward_funcs=talking_reward,
            args=GRPOConfig(**settings | {"disable_tqdm": False}),
            train_dataset=prompts(),
            eval_dataset=prompts(4, seed=1),
            processing_class=tiny_tokenizer(),
        )
    ).train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)

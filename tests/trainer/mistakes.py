"""Mistakes that scripts make; tests/trainer/test_tracebacks.py makes them in its own process and in a script.

python -m tests.trainer.mistakes NAME FOLDER
"""

import sys
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.failing import failing
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def short(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


def not_finite(completions: list[str], **_: Any) -> list[float]:
    return [float("nan") for _ in completions]


def run(
    folder: Path, model: Any = None, reward: Any = letter_reward, rows: Any = None, resume: Any = None, **settings: Any
):
    args = GRPOConfig(**{**config_kwargs(folder), "max_steps": 1, **settings})
    trainer = GRPOTrainer(
        tiny_model() if model is None else model,
        reward,
        args=args,
        train_dataset=prompts(8) if rows is None else rows,
        processing_class=tiny_tokenizer(),
    )
    trainer.train(resume_from_checkpoint=resume)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a setting's name": ({"global_batchsize": 8}, "no setting 'global_batchsize'; did you mean 'global_batch_size'?"),
    "text for a number": ({"learning_rate": "1e-3"}, "learning_rate='1e-3' is text, and takes float: no quotes"),
    "no group": ({"num_generations": 1}, "num_generations=1: a group needs at least 2"),
    "sizes": ({"rollout_batch_size": 9}, "rollout_batch_size=9 is not a multiple of"),
    "an empty micro-batch": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be"),
    "a negative bound": ({"epsilon": -0.2}, "epsilon=-0.2: use 0 or more"),
    "a loss": ({"loss_type": "dappo"}, "loss_type='dappo' is unknown; use one of"),
    "an estimator": ({"advantage_estimator": "rloo"}, "'rloo' is unknown; use one of"),
    "all splits": ({"rows": DatasetDict(train=prompts(8), test=prompts(2))}, "pass one of them, as dataset['train']"),
    "a column": ({"rows": prompts(8).rename_column("prompt", "question")}, "has no 'prompt' column"),
    "no rows": ({"rows": prompts(0)}, "the training data set is empty"),
    "a path": ({"model": "./models/mine"}, "there is no folder './models/mine' with a model"),
    "a reward's name": ({"reward": "./acuracy"}, "there is no folder './acuracy' with a reward model"),
    "a failing reward": ({"reward": failing}, "reward function 'failing' raised AttributeError"),
    "too few rewards": ({"reward": short}, "reward function 'short' returned 1 rewards"),
    "a reward of nan": ({"reward": not_finite}, "reward function 'not_finite' returned nan"),
    "no checkpoint": ({"resume": "nowhere"}, "nowhere does not exist, so nothing can be resumed"),
}

if __name__ == "__main__":
    run(Path(sys.argv[2]), **MISTAKES[sys.argv[1]][0])

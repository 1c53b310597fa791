"""Metrics that differ from stock TRL's on purpose: docs/coming-from.md names each of them, and no others."""

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import trl

import grpo_ext
from tests.parity.harness import GROUP, ROWS, Run, difference, run_one
from tests.parity.scripts import parts_of
from tests.support.kept import of_stock
from tests.support.tiny import config_kwargs, letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer

pytestmark = stock_scores
PAGE = Path(grpo_ext.__file__).parents[1] / "docs" / "coming-from.md"
SIZES = {"num_generations": GROUP, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
EVALUATION = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}  # three batches


def documented() -> list[str]:
    """The names in the first column of the page's table of metrics; a star stands for any text."""
    _, _, table = PAGE.read_text().partition("| metric | TRL | here |\n")
    rows = table.partition("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1]) if name != "beta"]


def differing(folder: Path, **settings: Any) -> set[str]:
    """Names of values that only one of the two logs, or that differ, of a run of the same completions."""

    def act(trainer: Any) -> None:
        trainer.train()
        trainer.evaluate()

    def run(package: Any) -> Run:
        def parts(journal: Any) -> Any:
            found = parts_of(journal, eval_dataset=prompts(6, seed=4))
            if settings.get("beta"):  # TRL loads the reference by the policy's name
                found["model"].config._name_or_path = str(folder / "model")
                found["model"].save_pretrained(folder / "model")
            return found

        sizes = {**SIZES, **EVALUATION, **settings}
        return run_one(package, folder / package.__name__, parts, act=act, **sizes)

    stock, ours = of_stock(lambda: run(trl)), run(grpo_ext)
    assert [mode for mode, _ in stock.lines] == [mode for mode, _ in ours.lines]
    lines = [(theirs, own) for (_, theirs), (_, own) in zip(stock.lines, ours.lines, strict=True)]
    return {
        name
        for theirs, own in lines
        for name in theirs.keys() | own.keys()
        if name not in theirs or name not in own or difference(theirs[name], own[name]) is not None
    }


def logged_by(trainer: Any) -> list[dict[str, Any]]:
    trainer.train()
    return trainer.state.log_history  # type: ignore[no-any-return]


def only_here(folder: Path) -> set[str]:
    """Names that only grpo_ext logs where the trainer samples."""
    names = []
    for package in (trl, grpo_ext):
        kwargs = config_kwargs(folder / package.__name__, per_device_train_batch_size=ROWS, max_steps=1)
        del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
        data = {"train_dataset": prompts(8), "processing_class": tiny_tokenizer()}
        trainer = package.GRPOTrainer(tiny_model(), letter_reward, args=package.GRPOConfig(**kwargs), **data)
        lines = of_stock(functools.partial(logged_by, trainer)) if package is trl else logged_by(trainer)
        names.append({name for line in lines for name in line})
    return names[1] - names[0]


def test_the_page_names_every_metric_that_differs_and_no_other(tmp_path):
    found = differing(tmp_path / "once")
    found |= differing(tmp_path / "reused", num_iterations=2, max_steps=2, learning_rate=0.05, epsilon=0.01, beta=0.1)
    found |= only_here(tmp_path / "sampled")
    patterns = documented()
    assert len(patterns) > 5
    assert {name for name in found if not any(fnmatchcase(name, one) for one in patterns)} == set()
    assert [one for one in patterns if not any(fnmatchcase(name, one) for name in found)] == []

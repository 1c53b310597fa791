"""`make predict`: does what a setting does to one step say what it does to a run? (`trainer.rerun(step, cases=...)`)

    python -m tests.bench.predict                            the demo: 10 seeds, six cases, 60 steps; about half an hour
    python -m tests.bench.predict --demo sums                SmolLM2-135M adds: 3 seeds, four cases, 20 steps; hours
    python -m tests.bench.predict --seeds 2 --steps 4 --at 2 a rehearsal

For each seed a run with the demo's settings, one of its steps run again with every case, and for each case a run of its
own. Compared over all pairs of a seed and a case, by ranks: how far the case moves the update of that step (the norm of
the difference over the update's), against how far the weights of its run end from those of the run (over what training
has changed), and against the difference of their held-out scores. Intervals draw seeds with replacement, because the
cases of one seed share a run: 2.5% to 97.5% of 10,000 draws.
"""

import argparse
import gc
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from scipy.stats import spearmanr

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.demo import EMBEDDED
from grpo_ext.demo.task import Demo, demo_named
from grpo_ext.runtime.quiet import quiet_libraries
from tests.support.forks import ROOT
from tests.support.toy_recipe import load_recipe

TWICE = {"num_iterations": 2}  # without it every ratio is one, and no clip binds
DEMO_CASES: list[dict[str, Any]] = [
    {"epsilon": 0.02},
    {"loss_type": "dr_grpo"},
    {"scale_rewards": "none"},
    {"learning_rate": 2e-4},
    {"top_entropy_quantile": 0.2},
    {"entropy_coef": 0.03},
]
SUMS_CASES: list[dict[str, Any]] = [
    {"epsilon": 0.02},
    {"scale_rewards": "none"},
    {"top_entropy_quantile": 0.2},
    {"entropy_coef": 0.03},
]
MEASURES = ("update", "gradient")  # of one step
ENDS = ("weights", "score")
Row = dict[str, Any]


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([part.detach().float().flatten().cpu() for part in trainer.model.parameters()])


class Study:
    def __init__(self, demo: Demo, steps: int, at: int, folder: Path) -> None:
        self.demo, self.steps, self.at, self.folder = demo, steps, at, folder
        self.recipe, self.task = load_recipe(), demo.load(None)
        self.settings = {name: value for name, value in demo.settings.items() if name not in ("rewards", "demo")}

    def trainer(self, name: str, seed: int, **case: Any) -> Any:
        sizes = {"rollout_batch_size": self.settings["global_batch_size"], **TWICE}
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        settings = self.settings | sizes | quiet | {"max_steps": self.steps, "seed": seed} | case
        parts = {"train_dataset": self.task.train_dataset, "reward_funcs": self.task.reward_funcs}
        config = GRPOConfig(str(self.folder / f"{seed}" / name), **settings)
        return GRPOTrainer(str(self.task.model_path), args=config, **parts)

    def run(self, name: str, seed: int, **case: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The weights before and after a run, and its held-out score."""
        trainer = self.trainer(name, seed, **case)
        start = weights_of(trainer)
        trainer.train()
        held_out = self.recipe.HeldOut(self.task, trainer.args.max_completion_length)
        ends = start, weights_of(trainer), held_out.answers(trainer.model)[0]
        del trainer
        gc.collect()
        return ends

    def rows(self, seed: int, cases: list[dict[str, Any]]) -> list[Row]:
        """For each case of a seed: what it does to one step, and to the run."""
        start, end, score = self.run("run", seed)
        compared = self.trainer("run", seed).rerun(self.at, cases=cases).cases
        rows = []
        for case, one in zip(cases, compared, strict=True):
            _, other, other_score = self.run("case", seed, **case)
            row = {"seed": seed, "case": one["title"]} | {
                what: one[what]["all weights"]["difference"] for what in MEASURES
            }
            row |= {"weights": float((other - end).norm() / (end - start).norm()), "score": abs(other_score - score)}
            rows.append(row | {"scores": [score, other_score]})
            print(json.dumps(rows[-1]), flush=True)
        return rows


def correlation(rows: list[Row], measure: str, end: str) -> float:
    return float(spearmanr([row[measure] for row in rows], [row[end] for row in rows]).statistic)


def interval(rows: list[Row], measure: str, end: str, draws: int = 10_000) -> tuple[float, float]:
    """Of the correlation over seeds that are drawn with replacement; NaN where no draw has one."""
    by_seed = [[row for row in rows if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in rows)]
    generator, found = numpy.random.default_rng(0), list[float]()
    for _ in range(draws):
        drawn = generator.integers(len(by_seed), size=len(by_seed))
        found.append(correlation([row for place in drawn for row in by_seed[place]], measure, end))
    low, high = numpy.nanquantile(found, [0.025, 0.975])
    return float(low), float(high)


def summary(rows: list[Row], draws: int) -> dict[str, Any]:
    """The rank correlation of each measure of a step with each end of a run, and its interval."""
    pairs = [(measure, end) for measure in MEASURES for end in ENDS]
    return {f"{m} and {e}": [correlation(rows, m, e), *interval(rows, m, e, draws)] for m, e in pairs}


def as_text(rows: list[Row], found: dict[str, Any]) -> str:
    columns = (*MEASURES, *ENDS)
    lines = [f"| case (medians of {len({row['seed'] for row in rows})} seeds) | {' | '.join(columns)} |"]
    lines.append("|---|" + "---|" * len(columns))
    for case in dict.fromkeys(row["case"] for row in rows):
        values = [statistics.median(row[name] for row in rows if row["case"] == case) for name in columns]
        lines.append(f"| `{case}` | " + " | ".join(f"{value:.2g}" for value in values) + " |")
    lines += [f"{name}: rank correlation {r:.2f} ({low:.2f} to {high:.2f})" for name, (r, low, high) in found.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", default=EMBEDDED, choices=[EMBEDDED, "sums"])
    parser.add_argument("--seeds", type=int, help="10, with sums 3")
    parser.add_argument("--steps", type=int, help="60, with sums 20")
    parser.add_argument("--at", type=int, help="the step that is run again with each case: 12, with sums 6")
    parser.add_argument("--draws", type=int, default=10_000, help="of seeds, for the intervals")
    parser.add_argument("--json", type=Path, help="also write all figures here, after every seed")
    options = parser.parse_args(argv)
    quiet_libraries()
    logging.getLogger("grpo_ext").setLevel(logging.WARNING)
    torch.set_num_threads(1 if options.demo == EMBEDDED else torch.get_num_threads())
    large, rows = options.demo == "sums", list[Row]()
    options.steps, options.at = options.steps or (20 if large else 60), options.at or (6 if large else 12)
    demo = demo_named(f"{ROOT / 'recipes' / 'smollm2.py'}:sums" if large else EMBEDDED)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grpo_ext_predict_") as folder:
        study = Study(demo, options.steps, options.at, Path(folder))
        for seed in range(options.seeds or (3 if large else 10)):
            rows += study.rows(seed, SUMS_CASES if large else DEMO_CASES)
            report = {"options": vars(options) | {"json": str(options.json)}, "rows": rows}
            report["correlations"] = summary(rows, options.draws)
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(as_text(rows, report["correlations"]))
    return report


if __name__ == "__main__":
    main()

"""Trains the demos with several estimators and draws their held-out pass rates: the figure of docs/algorithms.md.

    python -m tests.estimators.learning RUNS FILE.svg [DEMO...]

Every run is a process of `recipes/grpo.py` with one thread, as many at a time as there are cores, in a folder of RUNS;
a run that has ended is not repeated. Six settings and three seeds take 8 minutes for letters, 25 for last_word and 45
for sums on two cores.
"""

import concurrent.futures
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
SEEDS = (42, 43, 44)
MEASURED = ("pass@1", "pass@8")
COMPLETIONS = {"letters": 128, "last_word": 64, "sums": 64}  # of a step
# steps, and steps between two measurements: where the settings still differ
LENGTH = {"letters": (100, 10), "last_word": (8, 4), "sums": (16, 16)}
_CENTRED = {"advantage_estimator": "group_centered"}
# what defines each algorithm; one update for each rollout, so nothing is clipped, and no KL term
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", **_CENTRED},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group", "epsilon_high": 0.28},
    "max_rl": {"loss_type": "dapo", "advantage_estimator": "max_rl"},
    "pass_at_k": {"loss_type": "dapo", "advantage_estimator": "pass_at_k", "advantage_k": 4},
    "rloo": {"loss_type": "grpo", "advantage_estimator": "leave_one_out", "loss_aggregation": "sequence_sum"},
}
Key = tuple[str, str, int]  # demo, algorithm, seed


FIRST = next(iter(ALGORITHMS))


def train(runs: Path, key: Key) -> dict[str, Any]:
    """The metrics of a run, which is made unless it has ended before."""
    demo, algorithm, seed = key
    folder = runs / f"{demo}-{algorithm}-{seed}"
    if not (folder / "metrics.json").is_file():
        steps, between = LENGTH[demo]
        options = {
            **{"output_dir": folder, "seed": seed, "max_steps": steps, "beta": 0.0, **ALGORITHMS[algorithm]},
            **{"eval_strategy": "steps", "eval_steps": between, "num_generations_eval": 8},
            "eval_on_start": algorithm == FIRST,  # the others start from the same weights and seed
            **({} if demo == "letters" else {"demo": demo, "per_device_eval_batch_size": 96}),
        }
        command = [sys.executable, str(RECIPE), *itertools.chain(*((f"--{n}", str(v)) for n, v in options.items()))]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads((folder / "metrics.json").read_text())


def curves(metrics: dict[str, Any], start: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Held-out pass rates by step, from the `start` of another run."""
    log = [e for e in start["log_history"] if "eval_pass@1" in e and e["step"] == 0]
    log += [e for e in metrics["log_history"] if "eval_pass@1" in e and e["step"] > 0]
    return {name: {entry["step"]: entry[f"eval_{name}"] for entry in log} for name in MEASURED}


def write(found: dict[Key, dict[str, dict[int, float]]], path: Path) -> None:
    """The mean over seeds for each algorithm, with bars from the least to the largest, over completions."""
    demos = list(dict.fromkeys(demo for demo, _, _ in found))
    figure = Figure(figsize=(7.5, 2.5 * len(demos)))
    axes = figure.subplots(len(demos), len(MEASURED), squeeze=False)
    for (demo, row), (column, name) in itertools.product(zip(demos, axes, strict=True), enumerate(MEASURED)):
        axis = row[column]
        for shift, algorithm in enumerate(ALGORITHMS):
            seeds = [found[demo, algorithm, seed][name] for seed in SEEDS]
            steps = list(seeds[0])
            values = [[curve[step] for curve in seeds] for step in steps]
            means = list(map(statistics.mean, values))
            below = [mean - min(v) for mean, v in zip(means, values, strict=True)]
            above = [max(v) - mean for mean, v in zip(means, values, strict=True)]
            apart = (shift - 2.5) * steps[-1] / 150  # so that no bar hides another
            x = [(step + apart) * COMPLETIONS[demo] for step in steps]
            axis.errorbar(x, means, (below, above), fmt="o-", markersize=2, linewidth=1, label=algorithm)
        axis.set_title(f"{demo}: held-out {name}", fontsize=8)
        axis.set_xlabel("completions trained on", fontsize=7)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def table(found: dict[Key, dict[str, dict[int, float]]]) -> str:
    """Mean, least and largest of the last measurement, in Markdown."""
    demos = list(dict.fromkeys(demo for demo, _, _ in found))
    lines = [f"| | {' | '.join(f'{d}, {n}' for d in demos for n in MEASURED)} |", "|---" * (1 + 2 * len(demos)) + "|"]
    for algorithm in ALGORITHMS:
        cells = []
        for demo, name in itertools.product(demos, MEASURED):
            last = [list(found[demo, algorithm, seed][name].values())[-1] for seed in SEEDS]
            cells.append(f"{statistics.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})")
        lines.append(f"| `{algorithm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(runs: Path, path: Path, *demos: str) -> None:
    keys: list[Key] = list(itertools.product(demos or LENGTH, ALGORITHMS, SEEDS))
    found: dict[Key, dict[str, dict[int, float]]] = {}
    starts: dict[tuple[str, int], dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for key, metrics in zip(keys, pool.map(lambda key: train(runs, key), keys), strict=True):
            found[key] = curves(metrics, starts.setdefault((key[0], key[2]), metrics))
            print(*key, {name: round(list(curve.values())[-1], 3) for name, curve in found[key].items()}, flush=True)
    print(table(found))
    write(found, path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:])

"""Stock TRL and grpo_ext side by side: what both do with the same completions, compared key by key.

Compared are the update, the dictionary of `_generate_and_score_completions`, the rows it was given afterwards,
`_metrics` and `_logs` whenever a trainer logs, the lines of the log, the names of timings that trackers get, and what
the functions of a test wrote down. Nothing of grpo_ext is named but its public classes; the rest are names of TRL's.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from PIL import Image
from trl.extras.profiling import ProfilingContext
from trl.trainer import grpo_trainer

import grpo_ext
from tests.parity.scripts import Journal
from tests.support.kept import of_stock
from tests.support.tiny import config_kwargs
from tests.support.trainers import error, parameters
from tests.tolerances import ADAM_EPSILON, METRIC, UPDATE

GROUP, ROWS = 4, 8  # generations, completions of a rollout batch


@dataclass(frozen=True)
class Known:
    """A difference that is meant."""

    part: str  # of a `Run`
    name: str  # of a key; a star stands for any text
    extra: bool  # TRL has no such key; otherwise the values may differ, or the key be missing
    reason: str

    def covers(self, part: str, name: str) -> bool:
        return part == self.part and fnmatchcase(name, self.name)


SPEEDS = ("runtime", "samples_per_second", "steps_per_second")
CLOCK = "the seconds of a run are not those of another"
PHASES = "grpo_ext logs seconds by phase as time/*"
OF_IMAGES = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "num_tiles")
OF_IMAGES += ("token_type_ids", "mm_token_type_ids", "image_position_ids")
OF_FORWARD = "a forward prepares the images of the rows it runs, and what its model wants beside them"
KNOWN = [
    Known(
        "outputs", "num_items_in_batch", False, "denominators are counted by the plan of a step (docs/architecture.md)"
    ),
    *(Known("outputs", name, extra, OF_FORWARD) for name in OF_IMAGES for extra in (False, True)),
    *(Known(part, "step_time", False, CLOCK) for part in ("metrics", "lines")),
    *(Known("lines", f"train_{name}", False, CLOCK) for name in SPEEDS),
    *(Known("lines", f"eval_{name}", False, CLOCK) for name in SPEEDS),
    *(Known(part, "time/*", True, PHASES) for part in ("metrics", "lines")),
    *(Known(part, "layout/*", True, "what a layout costs; TRL has one layout") for part in ("metrics", "lines")),
    Known(
        "metrics", "loss", True, "grpo_ext logs the exact loss of a step by TRL's record; the line of the log is alike"
    ),
    Known("timings", "_prepare_inputs", False, PHASES),
    Known("timings", "_get_per_token_logps_and_entropies", False, PHASES),
    *(Known("lines", f"eval_{name}@*", True, "grpo_ext's metrics of an evaluation") for name in ("pass", "mean")),
]
BY_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


@dataclass
class Run:
    """What a trainer did."""

    # by call of the scoring, with the mode: its dictionary, and the rows it was given as they were afterwards
    outputs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    rows: list[tuple[str, Any]] = field(default_factory=list)
    metrics: list[tuple[str, dict[str, list[float]]]] = field(default_factory=list)
    tables: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    timings: list[str] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    update: torch.Tensor = field(default_factory=lambda: torch.zeros(1))


def recording(base: type, run: Run, scoring: bool) -> type:
    """A trainer that writes into `run`; with `scoring` it overrides `_generate_and_score_completions`, as users may."""

    class Recorder(base):  # type: ignore[misc]
        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            mode = "train" if self.model.training else "eval"
            run.metrics.append((mode, copy.deepcopy(dict(self._metrics[mode]))))
            run.tables.append((mode, {name: plain(values) for name, values in self._logs.items()}))
            super().log(logs, start_time)
            run.lines.append((mode, dict(logs)))

    class Scoring(Recorder):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            mode = "train" if self.model.training else "eval"
            output = super()._generate_and_score_completions(inputs)
            run.outputs.append((mode, without_padding(copy.deepcopy(dict(output)))))
            run.rows.append((mode, copy.deepcopy([dict(row) for row in inputs])))
            return output

    return Scoring if scoring else Recorder


def without_padding(output: dict[str, Any]) -> dict[str, Any]:
    """TRL's dictionary with zeros where a log-probability or ratio belongs to no token: nothing reads it there."""
    absent = output["completion_mask"] == 0
    fields = {name: output[name] for name in BY_TOKEN if name in output}
    return output | {name: one.masked_fill(absent, 0.0) for name, one in fields.items() if one.shape == absent.shape}


def plain(value: Any) -> Any:
    """A copy with lists and dictionaries in the place of deques and the like."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


Parts = Callable[[Journal], dict[str, Any]]
Act = Callable[[Any], Any]
train: Act = methodcaller("train")  # what is done with a trainer by default


def run_one(package: Any, folder: Path, parts: Parts, scoring: bool = False, act: Act = train, **settings: Any) -> Run:
    """Build a trainer of a package (trl, grpo_ext) and act with it; see `alike`."""
    run = Run()
    steps = settings.get("steps_per_generation", 1)
    common = {"per_device_train_batch_size": ROWS // steps, "steps_per_generation": steps, "shuffle_dataset": False}
    # for other losses TRL counts tokens of the rollout batch, and grpo_ext those of a step
    common |= {"loss_type": "grpo", "adam_epsilon": ADAM_EPSILON}
    kwargs = config_kwargs(folder, **{**common, "per_device_eval_batch_size": ROWS, "max_steps": 1, **settings})
    del kwargs["global_batch_size"], kwargs["rollout_chunk_size"]
    if package is grpo_ext:
        # TRL calls a reward function once for all rows of a process
        kwargs["rollout_chunk_size"] = kwargs["per_device_train_batch_size"] * kwargs["steps_per_generation"]
        kwargs["skip_zero_contribution"] = False  # TRL runs what adds nothing; entropy and clip ratios count it
    cls = recording(package.GRPOTrainer, run, scoring)
    begins = f"{cls.__name__}."

    def note(context: ProfilingContext, seconds: float) -> None:
        run.timings.append(context.name.removeprefix(begins))

    with (
        mock.patch.object(ProfilingContext, "_log_metrics", note),
        mock.patch.object(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch),  # a step's rows stay in order
    ):
        run.journal.trainer = trainer = cls(args=package.GRPOConfig(**kwargs), **parts(run.journal))
        start = parameters(trainer)
        act(trainer)
        run.update = parameters(trainer) - start
    run.journal.trainer = None
    return run


def three_runs(folder: Path, parts: Parts, act: Act = train, **settings: Any) -> list[Run]:
    """The runs of a case: stock TRL, grpo_ext with an override of the scoring as in `recording`, and without it."""
    kinds = (("stock", trl, True), ("scored", grpo_ext, True), ("ours", grpo_ext, False))

    def run(name: str, package: Any, scoring: bool) -> Run:
        return run_one(package, folder / name, parts, scoring, act, **settings)

    return [of_stock(lambda: run(*kinds[0])), *(run(*kind) for kind in kinds[1:])]


def alike(folder: Path, parts: Parts, act: Act = train, known: Sequence[Known] = (), **settings: Any) -> Run:
    """Run a case with stock TRL and with grpo_ext, and assert that they do the same; the run of stock TRL.

    One step on one rollout batch of ROWS completions by default; with `steps_per_generation=2`, two. The rows of an
    epoch are whole rollout batches: TRL drops the rest, which grpo_ext trains as a smaller step.
    """
    stock, scored, ours = three_runs(folder, parts, act, **settings)
    lines = [f"with an override: {line}" for line in compare(stock, scored, known)]
    lines += compare(Run(**{**vars(stock), "outputs": [], "rows": []}), ours, known)
    assert not lines, "\n".join(lines)
    return stock


def compare(stock: Run, ours: Run, known: Sequence[Known] = ()) -> list[str]:
    """Every difference of two runs that is neither in `KNOWN` nor in `known`, a line each."""
    known, lines = [*KNOWN, *known], []
    if not stock.update.equal(ours.update) and not (distance := error(stock.update, ours.update)) <= UPDATE:
        lines.append(f"update: relative error {distance:.1e}")
    for part in ("outputs", "rows", "metrics", "tables", "lines"):
        theirs, own = getattr(stock, part), getattr(ours, part)
        modes, own_modes = [mode for mode, _ in theirs], [mode for mode, _ in own]
        if modes != own_modes:
            lines.append(f"{part}: {modes} against {own_modes}")
        for number, ((mode, expected), (_, value)) in enumerate(zip(theirs, own)):
            lines += [f"{part} {number} ({mode}) {line}" for line in _compare_keys(part, expected, value, known)]
    names = [dict.fromkeys(run.timings, True) for run in (stock, ours)]
    lines += [f"timings {line}" for line in _compare_keys("timings", *names, known)]
    channels = [dict.fromkeys(name for name, _ in run.journal) for run in (stock, ours)]
    for name in channels[0] | channels[1]:
        if (line := difference(stock.journal.of(name), ours.journal.of(name))) is not None:
            lines.append(f"journal {name}{line}")
    return lines


def _compare_keys(part: str, expected: Any, value: Any, known: Sequence[Known]) -> list[str]:
    if not isinstance(expected, Mapping):
        line = difference(expected, value)
        return [] if line is None else [line]
    lines = []
    for name in expected:
        if any(one.covers(part, name) for one in known if not one.extra):
            continue
        line = ": missing" if name not in value else difference(expected[name], value[name])
        lines += [] if line is None else [f"{name}{line}"]
    for name in value.keys() - expected.keys():
        if not any(one.covers(part, name) for one in known if one.extra):
            lines.append(f"{name}: TRL has none")
    return lines


def difference(expected: Any, value: Any) -> str | None:
    """Where two values differ, and how; None if they do not.

    Numbers are compared with the tolerance of a logged value, all else exactly.
    """
    tensors = isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor)
    if tensors or (type(expected) is float and type(value) in (float, int)):
        try:
            one = value if tensors else float(value)
            torch.testing.assert_close(one, expected, rtol=METRIC, atol=METRIC, equal_nan=True)
        except AssertionError as error:
            return f": {' '.join(str(error).split())}"
        return None
    if isinstance(expected, Image.Image) and isinstance(value, Image.Image):
        return None if expected.tobytes() == value.tobytes() else ": another image"
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        if expected.keys() != value.keys():
            return f": keys {sorted(expected)} against {sorted(value)}"
        pairs = [(f"[{key!r}]", expected[key], value[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        if len(expected) != len(value):
            return f": {len(expected)} entries against {len(value)}"
        pairs = [(f"[{place}]", *both) for place, both in enumerate(zip(expected, value))]
    else:
        return None if expected == value else f": {expected!r} against {value!r}"
    return next((f"{at}{line}" for at, a, b in pairs if (line := difference(a, b)) is not None), None)

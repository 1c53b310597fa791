"""`grpo-ext report`: one page about a run, without server, network or JavaScript.

Differs from a tracker: it is written from the run's folder, even while the run trains or after it was killed, and shows
the settings of every start, what warns, completions, and the tokens of steps that were run again.
"""

import base64
import contextlib
import io
import itertools
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..algorithms.pass_at_k import PASS, first_and_last
from ..errors import ConfigError
from ..run.record import STEP, STEPS, Record, differences, read_record, tables_of
from ..runtime.messages import logger
from .samples import STRENGTHS, messages_of, reruns_of, rollouts_of, shown
from .warning_signs import warnings_of

Series = tuple[list[int], list[float]]  # optimizer steps, values
HELD_OUT = "held_out_exact_match"  # the demo's own measurement

_SHARES = ("completions/clipped_ratio", "(clip_ratio/region_mean|cispo_clip_ratio|.+/left_out)", "frac_reward_zero_std")
# for each plot: title, unit, patterns of the names of its values
_PLOTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "reward", ("reward", "rewards/.+/mean")),
    ("Evaluation", "mean over prompts", (HELD_OUT, f"eval_{PASS}", "eval_reward")),
    ("Completion length", "tokens", ("completions/(mean|min|max)_length",)),
    ("Entropy, KL to the reference and the teacher", "nats per token", ("entropy", "kl", "teacher_kl")),
    ("Cut completions, clipped tokens, groups without variance", "share", _SHARES),
    ("Gradient norm before clipping", "norm", ("grad_norm",)),
    ("Time by phase", "seconds per step", ("step_time", "time/.+")),
)
_BESIDE = ("reward", "eval_reward", "completions/mean_length", "entropy", "kl", "loss", "grad_norm")  # of two runs
_MARK = "grpo-ext report"  # the page's generator
# control characters, marks that change the direction of text, halves of a character: shown by their number
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COMPARED = ("settings", "geometry", "versions", "data", "model", "tokenizer", "rewards")  # parts of a start


def _status(log: Record) -> str:
    if log.starts and "ended" in log.starts[-1]:
        return str(log.starts[-1]["ended"])
    # in transformers' last line; a callback writes the report before the end of the run is logged
    finished = any("train_runtime" in entry["values"] for entry in log.entries[-1:])
    return "finished" if finished else "not finished: it is still running, or was killed"


def _changes(log: Record) -> list[tuple[str, Any, Any]]:
    """Differences between each start and the one before it: name, both values."""
    return [
        (f"start {number}: {name}", old, new)
        for number, (before, after) in enumerate(itertools.pairwise(log.starts), start=2)
        for name, old, new in differences({part: (before.get(part), after.get(part)) for part in _COMPARED})
        if old != new
    ]


def _require_libraries() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the report needs {error.name}; run `pip install matplotlib jinja2`.") from None


def _page(title: str, **parts: Any) -> str:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": shown, "messages": messages_of}
    template = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    text = template.render(title=title, mark=_MARK, strengths=STRENGTHS, **parts)
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def report(run: str | Path) -> Path:
    """Write the report of a run into its folder and return the page; a ConfigError if there can be none."""
    _require_libraries()
    log, series = load_run(run)
    pictures = {title: _picture(unit, curves) for title, (unit, curves) in plots_of(series).items()}
    scores = ("reward", *first_and_last(series), HELD_OUT, "eval_reward")
    time = timedelta(seconds=round(log.seconds))
    about = {"status": _status(log), "changes": _changes(log), "scores": scores, "time": time}
    about |= {"warnings": warnings_of(series, str(run)), "reruns": reruns_of(Path(run))}
    rollouts = rollouts_of(tables_of(run, log))
    text = _page(f"Run {run}", log=log, series=series, pictures=pictures, rollouts=rollouts, **about)
    page = Path(run).resolve() / "report" / "index.html"
    if page.resolve() != page:
        raise ConfigError(f"{page} is a link to {page.resolve()}, which a report would overwrite; remove the link.")
    try:
        if page.exists() and f'content="{_MARK}"' not in page.read_text(errors="replace")[:2000]:
            raise ConfigError(f"{page} is not a report and would be overwritten; move it elsewhere.")
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written ({error.strerror}); move what is there elsewhere.") from None
    return page


def comparison_page(text: str, runs: Mapping[str, str | Path]) -> str:
    """A page with the text of a comparison, and the curves of the runs, by their names, beside each other."""
    _require_libraries()
    series = {name: load_run(folder)[1] for name, folder in runs.items()}
    pictures = {}
    for value in _BESIDE:
        curves = {f"{value}, {name}": known[value] for name, known in series.items() if value in known}
        if len(curves) == len(series):
            pictures[value] = _picture("", curves)
    title = " and ".join(f"{name}: {folder}" for name, folder in runs.items())
    return _page(title, text=text, pictures=pictures, log=Record())


def load_run(path: str | Path) -> tuple[Record, dict[str, Series]]:
    """Read the log in a run's folder, and every number in it by name and in order.

    A ConfigError if it is empty; that of a step that was run again may be.
    """
    folder = Path(path)
    again = (folder / STEP).is_file()
    log = Record() if again and not (folder / STEPS).is_file() else read_record(folder, trail=False)
    if not log.entries and not again:
        raise ConfigError(f"{folder / STEPS} has no log yet; name the output_dir of a run that has logged a step.")
    series: dict[str, Series] = {}
    for entry in log.entries:
        for name, value in {**entry["values"], "peak_memory_mib": entry.get("peak_memory_mib")}.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = series.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(float(value))
    with contextlib.suppress(OSError, ValueError, KeyError):  # not a demo, or it has not ended
        scores: Mapping[str, float] = json.loads((folder / "metrics.json").read_text())["exact_match_by_step"]
        series[HELD_OUT] = [*map(int, scores)], [*scores.values()]
    return log, series


def plots_of(series: dict[str, Series]) -> dict[str, tuple[str, dict[str, Series]]]:
    """The unit and the curves of each plot by its title, without plots of constant values."""
    plots, ends = {}, first_and_last(series)
    k_of = {name: int(name.partition("@")[2]) for name in series if re.fullmatch(PASS, name)}
    between = {name for name, k in k_of.items() if k & (k - 1) and name not in ends}  # 3 adds little to 2 and 4
    for title, unit, patterns in _PLOTS:
        names = [name for pattern in patterns for name in series if re.fullmatch(pattern, name)]
        curves = {name: series[name] for name in names if name not in between}
        if len({value for _, values in curves.values() for value in values}) > 1:
            plots[title] = (unit, curves)
    return plots


def _picture(unit: str, curves: dict[str, Series]) -> str:
    from matplotlib.figure import Figure  # opens no window and leaves the caller's plots alone

    figure = Figure(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axis: Any = figure.subplots()
    for place, (name, (steps, values)) in enumerate(curves.items()):
        # each curve has shorter dashes, so that the curves below show through the gaps
        style: Any = (0, (4 / place, 8 - 4 / place)) if place else "solid"
        label = name.replace("$", r"\$")  # not a formula
        axis.plot(steps, values, linestyle=style, marker="." if len(steps) <= 12 else None, label=label)
    axis.set(xlabel="optimizer step", ylabel=unit)
    if len(places := {step for steps, _ in curves.values() for step in steps}) == 1:
        axis.set_xlim(min(places) - 1, min(places) + 1)  # matplotlib's own limits are fractions of a step
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return base64.b64encode(out.getvalue()).decode()


def report_or_reason(folder: str | Path) -> str:
    """Write the report of a run and return a sentence: where it is, or why there is none. Never raises."""
    try:
        return f"Report: {report(folder)}"
    except ConfigError as error:
        return f"No report was written: {error}"
    except Exception as error:  # training is done and must not fail because of its report
        return f"No report was written ({type(error).__name__}: {error}); the run itself is complete."


class ReportCallback(TrainerCallback):
    """Writes the report when training ends: `GRPOTrainer(callbacks=[ReportCallback()])`."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            logger.info(report_or_reason(args.output_dir))

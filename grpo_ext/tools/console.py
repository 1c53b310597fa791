"""The console of a run: a bar with the time left and one line per log on a terminal, plain lines everywhere else.
Unlike the Trainer's dictionaries, a line holds what matters, drops the least of it where it does not fit, never tears.
A callback: `Console().install(trainer)` before `train()`; the main process alone speaks. recipes/grpo.py uses it."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rich import console as rich_console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback

from ..algorithms.pass_at_k import first_and_last
from ..run.interrupts import RunCallback
from ..runtime.quiet import quiet_libraries

__all__ = ["Console", "fitting", "plain_line", "quiet_libraries"]

Trainer = TypeVar("Trainer")
Field = tuple[int, str, str]  # rank (the highest goes first where a line is too wide), name, value
Measure = Callable[[Any], Mapping[str, float]]

# key in the logs, rank, name, value: what a line holds, in this order
_FIELDS = (
    ("reward", 1, "reward", "{:5.2f}"),
    ("completions/mean_length", 2, "length", "{:4.0f}"),  # tokens
    ("completions/clipped_ratio", 5, "truncated", "{:3.0%}"),
    ("tools/call_frequency", 3, "tool calls", "{:.1f}"),  # per completion
    ("tools/failure_frequency", 4, "failed", "{:3.0%}"),  # of them
    ("entropy", 4, "entropy", "{:.2f}"),
    ("frac_reward_zero_std", 6, "no variance", "{:3.0%}"),  # share of the groups
    ("kl", 7, "kl", "{:.2g}"),
    ("clip_ratio/region_mean", 9, "clipped", "{:.1%}"),  # share of the tokens
    ("cispo_clip_ratio", 9, "clipped", "{:.1%}"),
    ("grad_norm", 8, "grad", "{:.2g}"),
    ("step_time", 3, "s/step", "{:.2f}"),
    ("time/wait_rollout", 4, "waited", "{:.2f}"),  # seconds of it, for what is sampled ahead
    ("layout/useful_tokens_per_second", 10, "tokens/s", "{:,.0f}"),  # forward and backward
)
_GAP = "  "
_WIDE_ENOUGH = 80  # columns from which the bar shows the reward beside it


class Console(RunCallback):
    """Shows a run as it goes: a bar and coloured lines on a terminal, plain lines in a file, a pipe or a notebook.

    Args:
        measure: from the model to named figures of your own, such as a held-out score. It is called on the main process
            alone, so not for sharded models (FSDP, ZeRO-3), whose forwards every process has to join.
        every: optimizer steps between two measurements; lines are then printed for those steps alone.
        out: where to write, a `rich.console.Console`; default: standard output.

    Example:

    ```python
    from grpo_ext import Console

    Console().install(trainer)
    trainer.train()
    ```
    """

    def __init__(self, measure: Measure | None = None, every: int = 0, out: rich_console.Console | None = None) -> None:
        self.measure, self.every = measure, every
        self.measured: dict[int, dict[str, float]] = {}  # by step
        self._given = out is not None
        self._out = rich_console.Console() if out is None else out
        self._logs: dict[str, Any] = {}  # of the last training step
        self._unsaid: int | None = None  # a measured step whose line waits for its log
        self._bar: Progress | None = None
        self._task: Any = None
        self._handlers: list[tuple[Any, Any]] = []

    def install(self, trainer: Trainer) -> Trainer:
        """Add this to a trainer in place of transformers' own progress callbacks; returns the trainer. The terminal is
        put in order also where `train()` ends with an error (with another trainer, at the program's end)."""
        from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # in notebooks transformers sets another callback

        changed: Any = trainer
        for other in (*changed.callback_handler.callbacks,):
            if isinstance(other, (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK)):
                changed.remove_callback(other)
        if self not in changed.callback_handler.callbacks:
            changed.add_callback(self)
        return trainer

    # ---- Events of the Trainer ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar, where there is a terminal."""
        self.close()
        self._logs, self._unsaid = {}, None
        if not (state.is_world_process_zero and self._is_terminal()):
            return
        self._bar = Progress(
            *_columns(self._out.width), console=self._out, expand=True, refresh_per_second=2, speed_estimate_period=3600
        )
        self._bar.live.transient = True  # leaves no line behind when it is hidden for other output
        self._task = self._bar.add_task("GRPO", total=state.max_steps, completed=state.global_step, status="")
        atexit.register(self.close)
        self._show()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar again after a table of samples."""
        self._show()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Move the bar, and measure if it is time."""
        if not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)
        if self._measures and state.global_step % self.every == 0:
            assert self.measure is not None
            self.measured[state.global_step] = dict(self.measure(model))
            self._unsaid = state.global_step
            if not control.should_log:
                self._say_measured(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """A line for a step or an evaluation."""
        if not state.is_world_process_zero or not logs:
            return
        if "reward" in logs:
            self._logs = dict(logs)
            if self._bar is not None and logs["reward"] is not None:
                self._bar.update(self._task, status=f"reward {logs['reward']:.2f}")
            if self._unsaid is not None:
                self._say_measured(state)
            elif not self._measures or state.global_step == state.max_steps:  # the last one, measured or not
                self._line("step", state, _fields(logs))
        elif any(key.startswith("eval_") for key in logs):
            values = {key.removeprefix("eval_"): value for key, value in logs.items()}
            passes: list[Field] = [(0, name, f"{values[name]:.2f}") for name in first_and_last(values)]
            self._line("eval", state, [*_fields(values), *passes])
        if getattr(args, "log_completions", False):
            self._hide()  # TRL prints its table next, straight to the terminal

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it is, finished."""
        if self._unsaid is not None:
            self._say_measured(state)
        if self._bar is not None:
            self._show()
            self._bar.live.transient = False
        self.close()

    def on_run_end(self) -> None:
        """Training has ended, perhaps with an error."""
        self.close()

    def close(self) -> None:
        """Give the terminal back; again and again if need be."""
        self._hide()
        self._bar = None
        atexit.unregister(self.close)

    # ---- Drawing --------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        return self.measure is not None and self.every > 0

    def _is_terminal(self) -> bool:
        # FORCE_COLOR makes rich take a file for a terminal, and a bar does not belong there
        real = self._given or sys.stdout.isatty()
        return real and self._out.is_interactive and not self._out.is_jupyter

    def _show(self) -> None:
        if self._bar is None or self._bar.live.is_started:
            return
        real = {id(getattr(sys, name)): name for name in ("stdout", "stderr")}
        self._bar.start()
        # rich stands in for sys.stderr, but loggers hold the stream they were made with and would write over the bar
        for handler in _stream_handlers():
            if (name := real.get(id(handler.stream))) is not None:
                self._handlers.append((handler, handler.stream))
                handler.setStream(getattr(sys, name))

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()

    def _say_measured(self, state: Any) -> None:
        step, self._unsaid = self._unsaid, None
        own: list[Field] = [(0, name, f"{value:.2f}") for name, value in self.measured[step or 0].items()]
        self._line("step", state, [*_fields(self._logs), *own])

    def _line(self, kind: str, state: Any, fields: list[Field]) -> None:
        head = f"{kind} {state.global_step:>4}/{state.max_steps}"
        if not self._is_terminal():
            print(plain_line(head, fields), file=self._out.file, flush=True)
            return
        text = Text(head, style="bold" if kind == "step" else "bold cyan", no_wrap=True, overflow="crop")
        for _, name, value in fitting(head, fields, self._out.width):
            text.append(f"{_GAP}{name} ", style="dim")
            text.append(value, style="green" if name == "reward" else "none")
        self._out.print(text, highlight=False)


def plain_line(head: str, fields: Iterable[Field]) -> str:
    """A line without colours: "step   15/150  reward 0.32 +- 0.41  length 12"."""
    return _GAP.join([head, *(f"{name} {value}" for _, name, value in fields)])


def fitting(head: str, fields: list[Field], width: int) -> list[Field]:
    """The fields in their order, without the least important ones that make a line wider than `width` columns."""
    shown = list(fields)
    while shown and len(plain_line(head, shown)) > width:
        shown.remove(max(shown, key=lambda field: field[0]))
    return shown


def _fields(logs: Mapping[str, Any]) -> list[Field]:
    found: list[Field] = []
    for key, rank, name, form in _FIELDS:
        if logs.get(key) is None:
            continue
        value = form.format(float(logs[key]))
        if key == "reward" and logs.get("reward_std") is not None:
            value += f" +- {float(logs['reward_std']):.2f}"
        found.append((rank, name, value))
    return found


def _columns(width: int) -> list[ProgressColumn]:
    columns: list[ProgressColumn] = [
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]left"),
        TimeRemainingColumn(),
    ]
    return columns if width < _WIDE_ENOUGH else [*columns, TextColumn("[green]{task.fields[status]}")]


def _stream_handlers() -> list[Any]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]

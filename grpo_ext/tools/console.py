"""The console of a run: a bar with the time left and one line per log on a terminal, plain lines everywhere else.

Unlike the Trainer's dictionaries, a line holds what matters and is cropped where it does not fit. A callback:
`Console().install(trainer)` before `train()`; the main process alone prints. recipes/grpo.py uses it.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich import console as rich_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback

from ..algorithms.pass_at_k import first_and_last
from ..run.interrupts import RunCallback
from ..runtime.quiet import quiet_libraries

__all__ = ["Console", "quiet_libraries"]

Trainer = TypeVar("Trainer")
Measure = Callable[[Any], Mapping[str, float]]

# key in the logs, name, value: what a line holds, in this order
_FIELDS = (
    ("reward", "reward", "{:5.2f}"),
    ("completions/mean_length", "length", "{:4.0f}"),  # tokens
    ("completions/clipped_ratio", "truncated", "{:3.0%}"),
    ("tools/call_frequency", "tool calls", "{:.1f}"),  # per completion
    ("tools/failure_frequency", "failed", "{:3.0%}"),  # of them
    ("entropy", "entropy", "{:.2f}"),
    ("frac_reward_zero_std", "no variance", "{:3.0%}"),  # share of the groups
    ("kl", "kl", "{:.2g}"),
    ("clip_ratio/region_mean", "clipped", "{:.1%}"),  # share of the tokens
    ("cispo_clip_ratio", "clipped", "{:.1%}"),
    ("grad_norm", "grad", "{:.2g}"),
    ("step_time", "s/step", "{:.2f}"),
    ("time/wait_rollout", "waited", "{:.2f}"),  # seconds of it, for what is sampled ahead
    ("layout/useful_tokens_per_second", "tokens/s", "{:,.0f}"),  # forward and backward
)


class Console(RunCallback):
    """Shows a run as it goes: a bar and coloured lines on a terminal, plain lines in a file, a pipe or a notebook.

    Args:
        measure: from the model to named figures of your own, such as a held-out score. It is called on the main process
            alone, so not for sharded models (FSDP, ZeRO-3), whose forwards every process has to join.
        every: optimizer steps between two measurements; those steps are logged, and lines printed for them alone.
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
        self._is_file = out is None and not sys.stdout.isatty()  # rich takes one for a terminal under FORCE_COLOR
        self._out = rich_console.Console() if out is None else out
        self._bar: Progress | None = None
        self._task: Any = None

    def install(self, trainer: Trainer) -> Trainer:
        """Add this to a trainer in place of transformers' own progress callbacks; returns the trainer.

        The bar is removed too when `train()` ends with an error; with another trainer than ours, at the program's end.
        """
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
        if not (state.is_world_process_zero and self._is_terminal()):
            return
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            TextColumn("[green]{task.fields[status]}"),
            console=self._out,
            expand=True,
            refresh_per_second=2,
            speed_estimate_period=3600,
        )
        self._bar.live.transient = True  # leaves no line behind when it is hidden for other output
        self._task = self._bar.add_task("GRPO", total=state.max_steps, completed=state.global_step, status="")
        atexit.register(self.close)
        self._bar.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar again after a table of samples."""
        if self._bar is not None:
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Move the bar, and measure if it is time."""
        measures = self.measure is not None and self.every > 0 and state.global_step % self.every == 0
        control.should_log |= measures  # on every process: logging is a collective
        if not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)
        if measures and self.measure is not None:
            self.measured[state.global_step] = dict(self.measure(model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """A line for a step or an evaluation."""
        if not state.is_world_process_zero or not logs:
            return
        if "reward" in logs:
            if self._bar is not None and logs["reward"] is not None:
                self._bar.update(self._task, status=f"reward {logs['reward']:.2f}")
            measured = self.measured.get(state.global_step, {})
            if measured or not self.every or state.global_step == state.max_steps:
                self._line("step", state, logs, measured)
        elif any(key.startswith("eval_") for key in logs):
            values = {key.removeprefix("eval_"): value for key, value in logs.items()}
            self._line("eval", state, values, {name: values[name] for name in first_and_last(values)})
        if getattr(args, "log_completions", False) and self._bar is not None:
            self._bar.stop()  # TRL prints its table next, straight to the terminal

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it is, finished."""
        if self._bar is not None:
            self._bar.start()
            self._bar.live.transient = False
        self.close()

    def on_run_end(self) -> None:
        """Training has ended, perhaps with an error."""
        self.close()

    def close(self) -> None:
        """Take the bar away; may be called again."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        atexit.unregister(self.close)

    # ---- Drawing --------------------------------------------------------------------------------------------------

    def _is_terminal(self) -> bool:
        return not self._is_file and self._out.is_interactive and not self._out.is_jupyter

    def _line(self, kind: str, state: Any, logs: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Print a line: figures of this kind of line, then what was logged."""
        text = Text()
        text.append(f"{kind} {state.global_step:>4}/{state.max_steps}", style="bold" if kind == "step" else "bold cyan")
        for name, value in [*((name, f"{value:.2f}") for name, value in figures.items()), *_fields(logs)]:
            text.append(f"  {name} ", style="dim")
            text.append(value, style="green" if name == "reward" else "none")
        if self._is_terminal():
            self._out.print(text, highlight=False, no_wrap=True, overflow="ellipsis")
        else:
            print(text.plain, file=self._out.file, flush=True)


def _fields(logs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what was logged."""
    fields = []
    for key, name, form in _FIELDS:
        if logs.get(key) is None:
            continue
        value = form.format(float(logs[key]))
        if key == "reward" and logs.get("reward_std") is not None:
            value += f" +- {float(logs['reward_std']):.2f}"
        fields.append((name, value))
    return fields

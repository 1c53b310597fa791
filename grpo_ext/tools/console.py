"""The console of a run: a bar with the time left and one line per log on a terminal, plain lines everywhere else.

Differs from transformers' ProgressCallback, its base class, in its lines: selected values, not a dictionary.
Call `Console().install(trainer)` before `train()`; only the main process prints. recipes/grpo.py uses it.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK  # a different one in notebooks

from ..algorithms.pass_at_k import first_and_last

Kind = TypeVar("Kind", bound=Trainer)

# the values of a line, in their order: key in the logs, name, format
_FIELDS = (
    ("reward", "reward", "{:5.2f}"),
    ("completions/mean_length", "length", "{:4.0f}"),  # tokens
    ("completions/clipped_ratio", "truncated", "{:3.0%}"),
    ("tools/call_frequency", "tool calls", "{:.1f}"),  # per completion
    ("tools/failure_frequency", "failed", "{:3.0%}"),  # share of the calls
    ("entropy", "entropy", "{:.2f}"),
    ("frac_reward_zero_std", "no variance", "{:3.0%}"),  # share of the groups
    ("kl", "kl", "{:.5f}"),
    ("teacher_kl", "teacher kl", "{:.5f}"),
    ("clip_ratio/region_mean", "clipped", "{:.1%}"),  # share of the tokens
    ("cispo_clip_ratio", "clipped", "{:.1%}"),
    ("trust_region/left_out", "left out", "{:.1%}"),
    ("sequence_mask/left_out", "completions left out", "{:.0%}"),
    ("grad_norm", "grad", "{:.3f}"),
    ("step_time", "s/step", "{:.2f}"),
    ("time/wait_rollout", "waited", "{:.2f}"),  # seconds per step, for completions sampled ahead
    ("layout/useful_tokens_per_second", "tokens/s", "{:,.0f}"),  # forward and backward
)


class Console(ProgressCallback):
    """Shows the progress of a run: a bar and one line per log on a terminal, plain lines in a file, pipe or notebook.

    Args:
        measure: computes named figures of your own from the model, such as a held-out score. Called on the main process
            alone, so not for sharded models (FSDP, ZeRO-3), whose forwards every process has to join.
        every: optimizer steps between two measurements; only those steps get a line.
    """

    def __init__(self, measure: Callable[[Any], Mapping[str, float]] | None = None, every: int = 0) -> None:
        super().__init__()
        self.measure, self.every = measure, every
        self.measured: dict[int, dict[str, float]] = {}  # by step

    def install(self, trainer: Kind) -> Kind:
        """Add this to a trainer in place of transformers' progress callbacks; returns the trainer."""
        for other in (PrinterCallback, ProgressCallback, DEFAULT_PROGRESS_CALLBACK):
            trainer.remove_callback(other)
        trainer.add_callback(self)
        return trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar if there is a terminal; a resumed run starts at its step."""
        self.current_step = state.global_step
        self._begun: tuple[float, int] | None = None
        if state.is_world_process_zero:
            shown = _on_terminal()
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=not shown
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar again after a table of completions; time counts from the first step."""
        self._begun = self._begun or (time.perf_counter(), state.global_step)
        if self.training_bar is not None:
            self.training_bar.refresh()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_step_end(args, state, control)
        if self.measure is not None and self.every > 0 and state.global_step % self.every == 0:
            control.should_log = True  # on every process: logging is a collective
            if state.is_world_process_zero:
                self.measured[state.global_step] = dict(self.measure(model))

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if _on_terminal():
            super().on_prediction_step(*args, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "reward" in logs:
            if self.training_bar is not None and logs["reward"] is not None:
                self.training_bar.set_postfix_str(f"reward {logs['reward']:.2f}", refresh=False)
            measured = self.measured.get(state.global_step, {})
            if measured or not self.every or state.global_step == state.max_steps:
                times = "" if _on_terminal() else f"  {self._times(state)}"  # the bar shows them
                _print(_line("step", state, logs, measured) + times)
        elif any(key.startswith("eval_") for key in logs):
            values = {key.removeprefix("eval_"): value for key, value in logs.items()}
            _print(_line("eval", state, values, {name: values[name] for name in first_and_last(values)}))
        if getattr(args, "log_completions", False):
            for bar in (self.prediction_bar, self.training_bar):
                if bar is not None:
                    bar.clear()  # TRL prints its table next, past tqdm

    def _times(self, state: Any) -> str:
        """How long this start has trained, and how long the rest will take at that rate."""
        step = state.global_step
        begun, first = self._begun or (time.perf_counter(), step)
        elapsed = time.perf_counter() - begun
        left = elapsed / max(step - first, 1) * (state.max_steps - step)
        return f"{tqdm.format_interval(elapsed)} elapsed, {tqdm.format_interval(left)} left"


def _on_terminal() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()  # lines go to the former, bars to the latter


def _print(line: str) -> None:
    """Print a line above the bar, cropped to the width of a terminal."""
    if _on_terminal() and len(line) > (columns := shutil.get_terminal_size().columns):
        line = f"{line[: columns - 1]}…"
    tqdm.write(line)
    sys.stdout.flush()


def _line(kind: str, state: Any, logs: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    parts = [f"{kind} {state.global_step:>4}/{state.max_steps}", *(f"{name} {x:.2f}" for name, x in figures.items())]
    for key, name, form in _FIELDS:
        if logs.get(key) is not None:
            parts.append(f"{name} {form.format(float(logs[key]))}")
            if key == "reward" and logs.get("reward_std") is not None:
                parts[-1] += f" +- {float(logs['reward_std']):.2f}"
    return "  ".join(parts)

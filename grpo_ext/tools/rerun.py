"""`grpo-ext rerun`: starts the script of a run again, with the run's settings, to run one of its steps."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..run.record import RERUNS, STEP, read_record, refuse_unknown
from ..settings import named

RECIPE = "recipe.json"  # in a run's folder, by recipes/grpo.py: its path, the folder it ran in, and the settings


def rerun(run: Path, step: int, options: Sequence[str], processes: int, script: Path | None) -> int:
    """Run a step again with the script of the run, and further options.

    Returns 0 if the step is the same, 1 if it is different, 2 if it was not run. The script is recipes/grpo.py beside
    this package; any other has to be named, because the run's folder may come from somebody else.
    """
    if fixed := [option for option in options if option.split("=")[0] in ("--output_dir", "--config")]:
        raise ConfigError(f"{', '.join(fixed)}: a step runs again in the run's folder, with the run's settings.")
    refuse_unknown(step, read_record(run), run)
    path, missing = run.resolve() / RECIPE, "build its trainer in a script, and call trainer.rerun(step=N)"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, because recipes/grpo.py did not start this run; {missing}.")
    try:
        recipe = json.loads(path.read_text())
        named_script, home, known = Path(recipe["script"]), Path(recipe["folder"]), dict(recipe["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not as it was written ({type(error).__name__}: {error}); {missing}.") from None
    if script is None and named_script.resolve() != (ours := Path(__file__).parents[2] / "recipes" / "grpo.py"):
        raise ConfigError(
            f"{named_script} started this run, and not {ours}; to run that script, pass --script {named_script}."
        )
    script = script or named_script
    if gone := [str(place) for place in (script, home) if not place.exists()]:
        raise ConfigError(f"{', '.join(gone)}, from which this run was started, is gone; {missing}.")
    before = {*run.glob(f"{RERUNS}/*/{STEP}")}
    status = _started(script.resolve(), home, known, path.parent, options, processes)
    again = {*run.glob(f"{RERUNS}/*/{STEP}")} - before
    return status if again and status in (0, 1) else 2


def _started(script: Path, home: Path, known: dict[str, Any], run: Path, options: Sequence[str], processes: int) -> int:
    """The exit status of a script with these settings."""
    once = {*named("once")}
    settings = {name: value for name, value in known.items() if name not in once and not name.startswith("rerun")}
    with tempfile.TemporaryDirectory(prefix="grpo_ext_rerun_") as folder, contextlib.ExitStack() as ending:
        # the signal ends the processes below too
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        ending.callback(signal.signal, signal.SIGTERM, before)
        file = Path(folder, "settings.yaml")
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, str(script), "--config", str(file), "--output_dir", str(run), *options]
        workers, environments = [], [{**os.environ}]
        if processes > 1:
            from .check.runs import on_cpus, ranked  # imports torch

            environments = ranked(environments[0] | on_cpus(processes), processes)
        for environment in environments:
            workers.append(subprocess.Popen(command, env=environment, cwd=home))
            ending.callback(_end, workers[-1])
        while None in (statuses := [worker.poll() for worker in workers]) and not any(statuses):
            time.sleep(0.1)
        if None in statuses:
            time.sleep(2.0)  # the others have a moment to say what they know
        return next((status for status in statuses if status), 0)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.terminate()
    try:
        worker.wait(30)
    except subprocess.TimeoutExpired:
        worker.kill()

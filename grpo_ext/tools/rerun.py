"""`grpo-ext rerun`: starts the script of a run again, with the run's settings, to run one of its steps."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..run.record import RERUNS, STEP, lines_of, read_record, refuse_unknown
from ..run.trail_comparison import SAME
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
    if script is None:
        _refuse_unknown_code(named_script, known)
    script = script or named_script
    if gone := [str(place) for place in (script, home) if not place.exists()]:
        raise ConfigError(f"{', '.join(gone)}, from which this run was started, is gone; {missing}.")
    before = {*run.glob(f"{RERUNS}/*/{STEP}")}
    _run(script.resolve(), home, known, path.parent, options, processes)
    again = {*run.glob(f"{RERUNS}/*/{STEP}")} - before
    verdicts = [next(lines_of(file), {}).get("verdict") for file in again]
    return 2 if not verdicts else int(verdicts[0] not in SAME)


def _refuse_unknown_code(script: Path, settings: Mapping[str, Any]) -> None:
    """A ConfigError for a run whose folder names other code than the recipe of this package."""
    ours = Path(__file__).resolve().parents[2] / "recipes" / "grpo.py"
    code = {name: value for name, value in settings.items() if ".py:" in str(value) or name == "trust_remote_code"}
    if not script.is_absolute() or script.resolve() != ours or any(code.values()):
        what = ", ".join([f"{script}", *(f"{name}={value}" for name, value in code.items())])
        raise ConfigError(
            f"this run's folder names code beyond {ours}: {what}. If you know that code, pass --script {script}."
        )


def _run(script: Path, home: Path, known: dict[str, Any], run: Path, options: Sequence[str], processes: int) -> None:
    """Run a script with these settings until one process fails, or all have ended."""
    left_out = {*named("once"), "env"}  # variables of the environment are those of now
    settings = {name: value for name, value in known.items() if name not in left_out and not name.startswith("rerun")}
    launcher: list[str] = []
    environment = {**os.environ}
    if processes > 1:
        from .check.runs import on_cpus  # imports torch

        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        environment |= on_cpus(processes)
    with tempfile.TemporaryDirectory(prefix="grpo_ext_rerun_") as folder:
        file = Path(folder, "settings.yaml")
        file.write_text(yaml.safe_dump(settings))
        options = ["--config", str(file), "--output_dir", str(run), *options]
        with subprocess.Popen([sys.executable, *launcher, str(script), *options], env=environment, cwd=home) as process:
            before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            try:
                process.wait()
            finally:
                process.terminate()  # and with it all that it has started
                signal.signal(signal.SIGTERM, before)

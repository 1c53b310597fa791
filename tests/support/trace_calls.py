"""The calls of a small run, for docs/architecture.md: which override runs when, and what it calls.

python -m tests.support.trace_calls          writes the listings into the page (`make docs`; a few seconds)
python -m tests.support.trace_calls print    prints the page instead

A run of two steps with an evaluation and a checkpoint is traced with `sys.setprofile`. The first listing has every
method of the trainer that transformers, TRL or a user calls, in the order of the run. The second has the calls between
files of a training step that samples: every function and method once below its caller, to a depth. Left out are
properties, private functions, special methods, and files of small helpers (`LEFT_OUT`).
"""

import contextlib
import functools
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpo_ext
from grpo_ext import GRPOTrainer
from tests.support.setting_tables import between
from tests.support.tiny import prompts
from tests.support.trainers import make

PACKAGE = Path(grpo_ext.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
# helpers that are called everywhere
LEFT_OUT = ("errors.py", "loading.py", "compat.py", "view.py", "config.py", "runtime/", "batching/sizes.py")
LEFT_OUT += ("algorithms/digests.py", "algorithms/exact.py", "forward/architecture.py")
DEPTH = 4  # files below `training_step`
WIDTH = 50  # of a call with its indentation
STEP = ("GRPOTrainer.training_step", "trainer.py")


@dataclass
class Call:
    """A function of the package, and the functions of other files that it calls, in the order of their first call."""

    name: str
    file: str
    calls: dict[tuple[str, str], "Call"] = field(default_factory=dict)

    def child(self, name: str, file: str) -> "Call":
        return self.calls.setdefault((name, file), Call(name, file))


@functools.cache
def place_of(code: CodeType) -> tuple[str, str] | None:
    """Name and file of a function of the package; None elsewhere, and for comprehensions and lambdas."""
    if not in_package(code) or "<" in code.co_name:
        return None
    return re.sub(r".*<locals>\.", "", code.co_qualname), Path(code.co_filename).relative_to(PACKAGE).as_posix()


@functools.cache
def in_package(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(PACKAGE)


@functools.cache
def is_shown(name: str, file: str) -> bool:
    """Whether a function is in the listing of calls."""
    owner, _, method = name.rpartition(".")
    if any(file.startswith(part) for part in LEFT_OUT) or method.startswith("_"):
        return False
    module = sys.modules[".".join(["grpo_ext", *Path(file).with_suffix("").parts])]
    found = vars(getattr(module, owner, object)).get(method) if owner else None
    return not isinstance(found, property | functools.cached_property)


def method_of_trainer(place: tuple[str, str]) -> str | None:
    """The name of a method of the trainer, but for properties; None for other functions."""
    name, file = place
    owner, _, method = name.partition(".")
    of_trainer = file == "trainer.py" and owner == "GRPOTrainer"
    return method if of_trainer and not isinstance(getattr(GRPOTrainer, method), property) else None


@dataclass
class Tracer:
    overrides: list[tuple[int, str, str]] = field(default_factory=list)  # depth, name, who calls it
    step: Call = field(default_factory=lambda: Call("training_step", "trainer.py"))

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (place := place_of(frame.f_code)) is None:
            return
        codes: list[CodeType] = []  # the callers, the nearest first
        above = frame.f_back
        while above is not None:
            codes.append(above.f_code)
            above = above.f_back
        path = [*filter(None, map(place_of, reversed(codes))), place]
        if (name := method_of_trainer(place)) is not None:
            # the wrapper that shortens tracebacks is called by who calls the method
            callers = [code for code in codes if not code.co_filename.endswith("runtime/tracebacks.py")]
            if not in_package(callers[0]):
                theirs = callers[0].co_qualname if "site-packages" in callers[0].co_filename else "you"
                self.overrides.append((len([*filter(None, map(method_of_trainer, path[:-1]))]), name, theirs))
        if is_shown(*place) and STEP in path:
            node = self.step
            for name, file in path[path.index(STEP) + 1 :]:
                if file != node.file and is_shown(name, file):
                    node = node.child(name, file)


def traced() -> Tracer:
    """The calls of a run; what comes back is the same on every machine."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"use_cpu": True, "max_steps": 2, "rollout_batch_size": 32, "beta": 0.1, "disable_tqdm": True}
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        sys.setprofile(tracer)
        try:
            make(folder, eval_dataset=prompts(4), **settings).train()
        finally:
            sys.setprofile(None)
    return tracer


def overrides_of(tracer: Tracer) -> Iterator[str]:
    """A line for each override, at its first call by a caller; deeper ones below the override that led to them."""
    seen: set[tuple[int, str, str]] = set()
    for depth, name, caller in tracer.overrides:
        if (depth, name, caller) not in seen:
            seen.add((depth, name, caller))
            yield f"{'  ' * depth}{name}".ljust(WIDTH) + caller


def calls_of(call: Call, depth: int = 0) -> Iterator[str]:
    for part in call.calls.values():
        yield f"{'  ' * depth}{part.name}".ljust(WIDTH) + part.file
        if depth + 1 < DEPTH:
            yield from calls_of(part, depth + 1)


def with_listings(page: str, tracer: Tracer) -> str:
    """The page with both listings between their markers."""
    for name, lines in (("overrides", overrides_of(tracer)), ("step", calls_of(tracer.step))):
        page = between(page, name, "\n".join(["```", *(line.rstrip() for line in lines), "```"]))
    return page


if __name__ == "__main__":
    with contextlib.redirect_stdout(None):
        written = with_listings(PAGE.read_text(), traced())
    PAGE.write_text(written) if sys.argv[1:] != ["print"] else print(written, end="")

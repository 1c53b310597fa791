"""The fields of GRPOConfig, read from the source of its classes: to import them loads torch, which takes seconds.

Used for options, their errors and `--help`. Differs from the class: a type that is not Python's own or an enum is text,
and `--help` does not show a default that is computed.
"""

import argparse
import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..settings import LOG_LEVELS, setting

# of enums, and of the classes from TrainingArguments to ours
_SOURCES = (
    *("transformers/trainer_utils.py", "transformers/training_args.py"),
    *("trl/trainer/base_config.py", "trl/trainer/grpo_config.py", "grpo_ext/config.py"),
)
# what their fields name, beside types
_NAMES = {"field": field, "setting": setting, "ExplicitEnum": Enum, "Any": Any, "Literal": Literal}
_NAMES |= {"trainer_log_levels": dict.fromkeys(LOG_LEVELS), "default_optim": argparse.SUPPRESS}


def fields_in_source() -> type:
    """A dataclass with the fields of GRPOConfig: their names, types, defaults and help."""
    names, fields = defaultdict[str, Any](lambda: str, vars(builtins) | _NAMES), {}
    for kind in _classes():
        if any(ast.unparse(base).endswith("Enum") for base in kind.bases):
            exec(ast.unparse(kind), {}, names)
        for line in kind.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                parts = (eval(ast.unparse(part), {}, names) for part in (line.annotation, line.value))
                name = ast.unparse(line.target)
                fields[name] = (name, *parts)
    return make_dataclass("GRPOConfig", fields.values())


def _classes() -> Iterator[ast.ClassDef]:
    for source in _SOURCES:
        package, _, file = source.partition("/")
        path = Path(str(getattr(find_spec(package), "origin", None))).parent / file
        yield from (line for line in ast.parse(path.read_text()).body if isinstance(line, ast.ClassDef))

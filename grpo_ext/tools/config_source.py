"""The fields of GRPOConfig, read from the source of its classes: to import them loads torch, which takes seconds.

Used for options, their errors and `--help`. Differs from the class: a type that is not Python's own or an enum is text,
and `--help` does not show a default that is computed.
"""

import argparse
import ast
import builtins
import functools
from collections import defaultdict
from dataclasses import field, make_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from ..batching.micro_batches import Form
from ..settings import LOG_LEVELS, setting

# from transformers' to ours, with a class that each must have; of the others only enums are read
_SOURCES = {
    "transformers/trainer_utils.py": "SchedulerType",
    "transformers/training_args.py": "TrainingArguments",
    "trl/trainer/base_config.py": "_BaseConfig",
    "trl/trainer/grpo_config.py": "GRPOConfig",
    "grpo_ext/config.py": "GRPOConfig",
}
# what their fields name, beside types
_NAMES = {"field": field, "setting": setting, "ExplicitEnum": Enum, "Any": Any, "Literal": Literal}
_NAMES |= {"trainer_log_levels": dict.fromkeys(LOG_LEVELS), "default_optim": argparse.SUPPRESS}
_NAMES |= {"Form": Form, "get_args": get_args}


@functools.cache
def fields_in_source() -> type:
    """A dataclass with the fields of GRPOConfig: their names, types, defaults and help; any error if it reads others.

    A name that is unknown is a type where it is part of an annotation, and an error where it is part of a value.
    """
    names, fields = vars(builtins) | _NAMES, {}
    for source, name in _SOURCES.items():
        package, _, file = source.partition("/")
        path = Path(str(getattr(find_spec(package), "origin", None))).parent / file
        classes = {line.name: line for line in ast.parse(path.read_text()).body if isinstance(line, ast.ClassDef)}
        for enum in classes.values():
            if [ast.unparse(base) for base in enum.bases] == ["ExplicitEnum"]:
                exec(ast.unparse(enum), {}, names)
        for line in classes[name].body:
            if isinstance(line, ast.AnnAssign):
                option = ast.unparse(line.target)
                kind = eval(ast.unparse(line.annotation), {}, defaultdict[str, Any](lambda: str, names))
                # without a value the whole line, which is not an expression
                fields[option] = (option, kind, eval(ast.unparse(line.value or line), {}, names))
    return make_dataclass("GRPOConfig", fields.values())

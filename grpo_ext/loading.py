"""Loads functions and other objects by name: `package.module.name`, or `path/to/file.py:name`."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError

FILE_MODULE_PREFIX = "grpo_ext_file_"  # names of modules that are loaded from a file


def load_file(path: str) -> ModuleType:
    """Load a Python file as a module that pickle can find; the same module until the file changes."""
    file = Path(path).expanduser().resolve()
    name = f"{FILE_MODULE_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    source, loaded = file.read_bytes(), sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__grpo_ext_source__", None) == source:
        return loaded
    spec: Any = importlib.util.spec_from_file_location(name, file)  # a file with this suffix always has a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["__grpo_ext_source__"] = source  # set last: a module that failed to load lacks it
    return module


def load_named(name: str, setting: str, kind: Any) -> Any:
    """The object of this class and name, or a ConfigError that begins with `setting`, the setting and its value."""
    is_file = ".py:" in name
    source, _, attribute = name.rpartition(":" if is_file else ".")
    try:
        module = load_file(source) if is_file else importlib.import_module(source)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(f"{setting} cannot be loaded ({error}); check the path or the module's name.") from error
    value = getattr(module, attribute, None)
    if not isinstance(value, kind):
        names = [key for key, value in vars(module).items() if isinstance(value, kind) and not key.startswith("_")]
        raise ConfigError(
            f"{setting}: {source} defines no {kind.__name__} {attribute}; it defines {', '.join(names) or 'none'}."
        )
    return value


def require_registered(name: Any, setting: str, register: Callable[[str], Any], known: Callable[[], list[str]]) -> None:
    """Register `path/to/file.py:function` under that name; raise a ConfigError for any other name that is not known."""
    if name not in known() and ".py:" in str(name):
        register(name)(load_named(name, f"{setting}={name!r}", Callable))
    if name not in (names := known()):
        raise ConfigError(f"{setting}={name!r} is unknown; use one of {', '.join(names)}, or path/to/file.py:function.")

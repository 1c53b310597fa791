"""Results of stock TRL alone, kept between runs of the tests where pytest has its cache.

They change with the libraries, the machine and the tests, all of which are in their key. Nothing that this package
computes is kept.
"""

import functools
import hashlib
import os
import pickle
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
LIBRARIES = (
    *("torch", "trl", "transformers", "accelerate", "peft"),
    *("datasets", "tokenizers", "numpy", "pillow", "jinja2"),
)
folder: Path | None = None  # set by tests/conftest.py
_calls: dict[str, int] = {}  # of the test that runs


@functools.cache
def machine() -> str:
    """The libraries with their versions, the platform, and the number of threads."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    versions = [f"{name} {installed(name)}" for name in LIBRARIES]
    processor = torch.backends.cpu.get_cpu_capability()
    return "\n".join([*versions, platform.platform(), processor, str(torch.get_num_threads())])


@functools.cache
def source_of(test_file: str) -> str:
    """A hash of a file of tests and of all that such files share."""
    shared = [*ROOT.glob("tests/*.py"), *ROOT.glob("tests/support/*.py"), *ROOT.glob("tests/parity/*.py")]
    digest = hashlib.sha256()
    for path in sorted({*shared, ROOT / test_file}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def of_stock(compute: Callable[[], T]) -> T:
    """What stock TRL computes in the test that runs, of an earlier run of the tests where that is the same."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    if test not in _calls:
        _calls.clear()
    _calls[test] = _calls.get(test, 0) + 1
    if folder is None:
        return compute()
    key = source_of(test.partition("::")[0])
    name = hashlib.sha256(f"{test}\n{_calls[test]}\n{machine()}".encode()).hexdigest()[:24]
    path = folder / name
    if path.exists():
        kept_key, result = pickle.loads(path.read_bytes())
        if kept_key == key:
            return result  # type: ignore[no-any-return]
    result = compute()
    partial = path.with_name(f"{name}.{os.getpid()}")
    partial.write_bytes(pickle.dumps((key, result)))
    partial.replace(path)
    return result

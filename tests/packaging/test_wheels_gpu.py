"""What `make wheels-gpu` brings and what a machine with a GPU holds (tests/gpu/machine.txt) are all that is required.

Read from the installed packages' metadata, for Python 3.12 on Linux; nothing is downloaded.
"""

import importlib.metadata
import os
import subprocess
from collections.abc import Iterable, Mapping

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu import environment

from .start import ROOT

MACHINE = {"python_version": "3.12", "python_full_version": "3.12.3", "implementation_name": "cpython", "extra": ""}
MACHINE |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def versions_in(name: str) -> dict[str, str | None]:
    """The packages of a file of requirements, and their versions; None where it leaves them open."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.partition("==") for line in lines]
    return {canonicalize_name(package): version or None for package, _, version in pairs}


WHEELS = {canonicalize_name(Requirement(line).name) for line in [*environment.dependencies(), *environment.FURTHER]}
HELD = versions_in("tests/gpu/machine.txt")


OTHERS = [name for name in sorted(WHEELS) if importlib.metadata.version(name) != versions_in("constraints.txt")[name]]
pinned_versions = pytest.mark.skipif(
    bool(OTHERS), reason=f"reads what the pinned versions require; of {', '.join(OTHERS)} others are installed"
)


def missing(wheels: Iterable[str], held: Mapping[str, str | None]) -> dict[str, str]:
    """Each requirement that neither a wheel nor the machine satisfies, and what requires it."""
    pinned, unmet, visited = versions_in("constraints.txt"), {}, set()
    brought = {name: pinned[name] for name in wheels}
    to_do = [(line, "pyproject.toml") for line in [*environment.dependencies(), "torch>=2.11", "psutil"]]
    while to_do:
        line, by = to_do.pop()
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(MACHINE):
            continue
        places = [versions[name] for versions in (brought, held) if name in versions]
        if not any(version is None or requirement.specifier.contains(version) for version in places):
            unmet[line] = by
        if name in brought and name not in visited:
            visited.add(name)
            to_do += [(needed, name) for needed in importlib.metadata.requires(name) or ()]
    return unmet


@pinned_versions
def test_wheels_and_the_machine_hold_all_that_is_required():
    assert missing(WHEELS, HELD) == {}


@pinned_versions
@pytest.mark.parametrize("name", [canonicalize_name(name) for name in environment.FURTHER])
def test_each_further_wheel_is_required(name):
    lines = missing(WHEELS - {name}, HELD)
    assert {canonicalize_name(Requirement(line).name) for line in lines} == {name}


def test_the_documents_show_the_commands_that_make_runs():
    make = ["make", "--no-print-directory", "-n", "test-gpu", "PYTHON=python3"]
    bare = {"PATH": os.environ["PATH"]}  # without the ARGS of the make that runs the tests
    commands = subprocess.run(make, cwd=ROOT, env=bare, check=True, text=True, capture_output=True).stdout
    lines = "\n".join(" ".join(line.split()) for line in commands.splitlines())
    assert len(lines.splitlines()) == 2
    assert f"```bash\n{lines}\n```" in (ROOT / "docs" / "tools.md").read_text()

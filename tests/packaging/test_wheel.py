"""The wheel: it builds, holds what it should and nothing else, and works where nothing of this repository is near.
Installed without its dependencies, which are those of the environment of the tests; nothing is downloaded."""

import re
import shutil
import sysconfig
import venv
import zipfile
from functools import partial
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from grpo_ext.compat import TESTED

from .start import ROOT, call, write_start

pytestmark = pytest.mark.full
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_ext").rglob("*.py")}
TEMPLATES = {p.relative_to(ROOT).as_posix() for p in (ROOT / "grpo_ext").rglob("*") if p.suffix in (".html", ".md")}

TRAIN = """
import sys
import grpo_ext
from grpo_ext import Console, GRPOConfig, GRPOTrainer
from datasets import load_dataset

def length(completions, **_):
    return [float(len(text)) for text in completions]

model, data = sys.argv[1:]
sizes = {"global_batch_size": 4, "num_generations": 2, "per_device_train_batch_size": 3}
config = GRPOConfig("out", max_steps=1, max_completion_length=4, bf16=False, report_to="none", logging_steps=1, **sizes)
trainer = GRPOTrainer(model, length, config, load_dataset(data, split="train"))
Console().install(trainer).train()
print("trained with", grpo_ext.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, an environment it is installed in, and an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source, home, outside = (folder / name for name in ("source", "environment", "outside"))
    shutil.copytree(ROOT / "grpo_ext", source / "grpo_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "packaging", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    outside.mkdir()
    pip = ("-m", "pip", "--disable-pip-version-check")
    offline = ("-q", "--no-deps", "--no-index")
    call(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source, cwd=outside)
    (wheel,) = folder.glob("*.whl")
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    interpreter = home / "bin" / "python"
    call(*pip, "--python", interpreter, "install", *offline, wheel, cwd=outside)
    # from here on, or pip would find this package installed in the environment of the tests
    (packages / "dependencies.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    return SimpleNamespace(wheel=wheel, python=interpreter, packages=packages, outside=outside)


def test_wheel_holds_every_module_the_licence_and_nothing_else(installed):
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    package = {name for name in names if name.startswith("grpo_ext/")}
    assert package == {*MODULES, *TEMPLATES, "grpo_ext/py.typed"}
    beside = {name.split("/", 1)[1] for name in names - package}
    assert {name.split("/")[0] for name in names} == {"grpo_ext", "grpo_ext-0.1.0.dist-info"}
    assert {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= beside
    assert "License-Expression: Apache-2.0" in metadata
    for name, versions in TESTED.items():  # pip installs no version that was not tested
        [needed] = [text for text in re.findall("Requires-Dist: (.*)", metadata) if re.match(f"{name}[<>]", text)]
        assert SpecifierSet(needed.removeprefix(name)) == SpecifierSet(versions)


def test_commands_work_outside_the_repository(installed):
    command = partial(call, program=installed.python.with_name("grpo-ext"), cwd=installed.outside)
    helped = command("--help")
    assert all(name in helped for name in ("plan", "check", "report", "export"))
    planned = command("plan", "--global_batch_size", "16", "--num_generations", "4")
    assert "16 completions = 4 prompts x 4" in planned


def test_installed_package_trains(installed, tmp_path):
    (installed.outside / "train.py").write_text(TRAIN)
    printed = call("train.py", *write_start(tmp_path), cwd=installed.outside, program=installed.python)
    assert f"trained with {installed.packages}" in printed
    assert "step    1/1  reward" in printed

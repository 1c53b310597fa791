"""The wheel: it builds, holds what it should and nothing else, and works where nothing of this repository is near.
Installed without its dependencies, which are those of the environment of the tests; nothing is downloaded."""

import re
import shutil
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from functools import partial
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt
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
    for name in ("build", "twine", "hatchling"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    source, home, outside = (folder / name for name in ("source", "environment", "outside"))
    shutil.copytree(ROOT / "grpo_ext", source / "grpo_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "packaging", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    outside.mkdir()
    pip = ("-m", "pip", "--disable-pip-version-check")
    offline = ("-q", "--no-deps", "--no-index")
    call("-m", "build", "--no-isolation", "--outdir", folder, source, cwd=outside)  # the wheel, from the sdist
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    call("-m", "twine", "check", "--strict", wheel, archive, cwd=outside)
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    interpreter = home / "bin" / "python"
    call(*pip, "--python", interpreter, "install", *offline, wheel, cwd=outside)
    # from here on, or pip would find this package installed in the environment of the tests
    (packages / "dependencies.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    return SimpleNamespace(wheel=wheel, archive=archive, python=interpreter, packages=packages, outside=outside)


def contents(wheel):
    """The names of a wheel's files, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        return names, archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()


def addresses(markdown):
    """Where the links and pictures of a text lead."""
    tokens = [child for token in MarkdownIt().parse(markdown) for child in token.children or ()]
    found = [token.attrs[name] for token in tokens for name in ("href", "src") if name in token.attrs]
    return found + re.findall('src="([^"]*)"', markdown)


def test_the_page_of_a_release_has_absolute_links(installed):
    metadata = message_from_string(contents(installed.wheel)[1])
    text, [repository] = metadata.get_payload(), re.findall("Repository, (.*)", metadata["Project-URL"])
    found, written = addresses(text), addresses((ROOT / "README.md").read_text())
    assert len(found) == len(written) > 30
    for address, link in zip(found, written, strict=True):
        path = link.partition("#")[0]
        if link.startswith("http"):
            assert address == link
        else:
            assert address == f"{repository}/{'raw' if path.endswith('.svg') else 'blob'}/main/{link}"
            assert (ROOT / path).exists(), link
    assert f"git clone {repository}" in text


def test_the_source_archive_holds_the_package_and_its_readme(installed):
    with tarfile.open(installed.archive) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*MODULES, "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names


def test_the_repository_has_an_address():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    if ".invalid/" in address:
        pytest.xfail(f"{address} in pyproject.toml is a placeholder: set it before a release")
    assert re.fullmatch(r"https://[\w.-]+/[\w./-]+[\w-]", address)


def test_wheel_holds_every_module_the_licence_and_nothing_else(installed):
    names, metadata = contents(installed.wheel)
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

"""The environment of `make test-gpu`, for a machine with a GPU and without a network, as plain Python.

    python3 -m tests.gpu.environment                    make .venv-gpu of the packages here and of those in wheels/
    python3 -m tests.gpu.environment --download 3.12    with a network: fill wheels/ for the Python of that machine

Imports nothing but the standard library, and needs pip.
"""

import argparse
import re
import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER, WHEELS = ROOT / ".venv-gpu", ROOT / "wheels"
# what our dependencies require beyond themselves and the machine (machine.txt)
FURTHER = ["dill", "multiprocess", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def dependencies() -> list[str]:
    listed = re.findall(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    return [line for line in re.findall(r'"(.+)"', listed[0]) if not line.startswith("torch>")]


def download(version: str) -> None:
    """Fill wheels/ for a Python of this version."""
    options = ["-c", "constraints.txt", "-d", str(WHEELS), "--no-deps", "--only-binary=:all:"]
    wanted = ["--python-version", version, *dependencies(), *FURTHER]
    subprocess.run([*PIP, "download", *options, *wanted], cwd=ROOT, check=True)


def make() -> None:
    """Make the environment anew: the packages of the Python that runs this, and before them those in wheels/."""
    venv.create(FOLDER, clear=True, system_site_packages=True, with_pip=False)
    python = FOLDER / "bin" / "python"
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", show], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    # made from a virtual environment, a new one sees the packages of the system alone
    Path(packages, "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    options = ["--no-compile", "--no-index", "--find-links", str(WHEELS)]
    needed = [*dependencies(), "pytest", "hypothesis", "psutil"]
    if subprocess.run([*PIP, "--python", str(python), "install", *options, *needed]).returncode:
        sys.exit(
            f"{sys.executable} and {WHEELS.name}/ lack packages that pip names above: fill {WHEELS.name}/ on a machine "
            "with a network (make wheels-gpu), or run this with a Python that has them."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--download", metavar="VERSION", help="fill wheels/ for this Python")
    version = parser.parse_args().download
    if version is None:
        make()
    else:
        download(version)

"""No test imports another test: what several share lies in tests/support, so that each file can be read, run, split and
moved by itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(source: str, package: str) -> set[str]:
    """Names of every module that a source imports or may import, relative ones resolved in `package`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def of_tests(modules: set[str]) -> set[str]:
    return {name for name in modules if any(part.startswith("test_") for part in name.split("."))}


FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_no_test_imports_another_test():
    for path in FILES:
        package = ".".join(path.relative_to(ROOT).parent.parts)
        assert of_tests(imported(path.read_text(), package)) == set(), path


@pytest.mark.parametrize(
    "statement",
    [
        "from tests.trainer.test_layout import make",
        "import tests.trainer.test_layout as layout",
        "from .test_layout import make",
        "def f():\n    from ..trainer.test_layout import make",
    ],
)
def test_such_an_import_would_be_found(statement):
    found = of_tests(imported(statement, "tests.trainer"))
    assert "tests.trainer.test_layout" in found


def test_support_is_no_place_for_tests():
    assert [path for path in (ROOT / "tests" / "support").rglob("*.py") if path.name.startswith("test_")] == []

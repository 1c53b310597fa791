"""Layers: imports go one way, one file names collectives, only trainer.py and config.py subclass TRL."""

import ast
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_ext").rglob("*.py"))

# from the bottom to the top: each may import itself and those before it; "package" is grpo_ext/__init__.py
PURE = ("errors", "loading", "algorithms", "batching")  # torch and the standard library alone
INNER = (
    "runtime",
    "compat",
    "precision",
    "settings",
    "value_checks",
    "config",
    "view",
    "forward",
    "upstream",
    "rewards",
    "sampling",
    "rollouts",
    "step",
)
PACKAGES = (*PURE, *INNER, "run", "checks", "components", "trainer", "package", "demo", "tools")
COLLECTIVES = {
    *("gather", "gather_object", "gather_for_metrics", "reduce", "broadcast", "broadcast_object_list"),
    *("pad_across_processes", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all"),
    *("reduce_scatter", "reduce_scatter_tensor", "barrier", "wait_for_everyone"),
}
COMMUNICATORS = {"accelerator", "accelerate", "dist", "distributed", "state"}


def layer_of(path: str) -> str:
    """The layer of a file, by its place: "grpo_ext/algorithms/losses.py" is in "algorithms"."""
    parts = Path(path).with_suffix("").parts[1:]
    return "package" if parts == ("__init__",) else parts[0]


@functools.cache  # most rules ask for those of every file
def imported_modules(path: str, source: str) -> list[tuple[int, str]]:
    """Every module that a file imports, absolute, with the line; names of `from` imports are appended."""
    package = list(Path(path).parent.parts)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def layer_violations(path: str, source: str) -> list[str]:
    layer, found = layer_of(path), []
    for line, module in imported_modules(path, source):
        parts = module.split(".")
        if parts[0] in ("recipes", "tests"):
            found.append(f"{path}:{line} imports {module}")
        elif parts[0] == "grpo_ext":
            known = len(parts) > 1 and parts[1] in PACKAGES
            target = parts[1] if known else "package"
            if layer != "package" and PACKAGES.index(target) > PACKAGES.index(layer):  # it imports lazily
                found.append(f"{path}:{line} ({layer}) imports {module} ({target})")
    return found


def impurities(path: str, source: str) -> list[str]:
    """Imports of a pure package that are neither torch, nor the standard library, nor this package."""
    pure = {*sys.stdlib_module_names, "torch", "grpo_ext"}
    found = [(line, module) for line, module in imported_modules(path, source) if module.split(".")[0] not in pure]
    found += [(n, m) for n, m in imported_modules(path, source) if m.startswith("torch.distributed")]
    return [f"{path}:{line} imports {module}" for line, module in found]


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; calls and subscripts in between are looked through."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, (ast.Call, ast.Subscript)):
        return dotted(node.func if isinstance(node, ast.Call) else node.value)
    return []


def collectives(path: str, source: str) -> list[str]:
    """Where a file names a collective of Accelerate or torch.distributed."""
    found = []
    for line, module in imported_modules(path, source):
        parts = module.split(".")
        if (parts[0] == "accelerate" or parts[:2] == ["torch", "distributed"]) and parts[-1] in COLLECTIVES:
            found.append(f"{path}:{line} imports {module}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            base = dotted(node.value)
            if any(name.lstrip("_") in COMMUNICATORS for name in base):
                found.append(f"{path}:{node.lineno} uses {'.'.join([*base, node.attr])}")
    return found


def trl_subclasses(path: str, source: str) -> list[str]:
    """Classes of a file that have a base imported from TRL."""
    tree, from_trl = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            from_trl |= {a.asname or "trl" for a in node.names if a.name.split(".")[0] == "trl"}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "trl":
            from_trl |= {alias.asname or alias.name for alias in node.names}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [f"{path}:{c.lineno} class {c.name}" for c in classes if any(set(dotted(b)[:1]) & from_trl for b in c.bases)]


def inside_trl(path: str, source: str) -> list[str]:
    """Imports of modules inside TRL; `trl` and what it exports at its top are public."""
    return [f"{path}: {line}" for line in source.splitlines() if re.match(r"\s*(from|import) trl\.", line)]


def version_checks(path: str, source: str) -> list[str]:
    """Where a file compares versions."""
    names = {"Version", "parse_version", "is_torch_greater_or_equal", "is_transformers_version"}
    return [f"{path}:{line} imports {m}" for line, m in imported_modules(path, source) if m.split(".")[-1] in names]


def imports_of_tests(path: str, source: str) -> list[str]:
    """Tests that a file imports; what several share lies in tests/support, so that each can be split and moved."""
    modules = [module for _, module in imported_modules(path, source)]
    return [module for module in modules if any(part.startswith("test_") for part in module.split("."))]


# ---- The package ----------------------------------------------------------------------------------------------------


def files_that_break(rule: Callable[[str, str], list[str]], files: Sequence[str] = FILES) -> dict[str, list[str]]:
    """What a rule finds, by file."""
    found = {path: rule(path, (ROOT / path).read_text(encoding="utf-8")) for path in files}
    return {path: sentences for path, sentences in found.items() if sentences}


def test_imports_go_one_way():
    assert {layer_of(path) for path in FILES} == set(PACKAGES)
    assert files_that_break(layer_violations) == {}


def test_pure_packages_import_torch_and_the_standard_library_alone():
    assert files_that_break(impurities, [path for path in FILES if layer_of(path) in PURE]) == {}


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Files that import one another, in circles; imports for a type checker alone count too."""
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in sources}
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        named = [name for _, name in imported_modules(path, source)]
        targets = {name if name in modules else name.rpartition(".")[0] for name in named} & modules.keys()
        graph[path] = {modules[name] for name in targets} - {path}

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [*graph[start]]
        while left:
            if (path := left.pop()) not in seen:
                seen.add(path)
                left += graph[path]
        return seen

    around = {path: others for path in graph if path in (others := reached(path))}
    return [sorted(p for p in others if p in around and path in around[p]) for path, others in around.items()]


def test_no_files_import_one_another():
    sources = {path: (ROOT / path).read_text() for path in FILES if path != "grpo_ext/__init__.py"}
    assert circles(sources) == []
    path = "grpo_ext/rollouts/join.py"
    planted = sources[path] + "\nif TYPE_CHECKING:\n    from .source import Rollouts\n"
    assert any(path in circle for circle in circles({**sources, path: planted}))


@pytest.mark.parametrize(
    ("rule", "files"),
    [
        (inside_trl, {"compat.py"}),
        (version_checks, set()),
        (collectives, {"runtime/collectives.py", "runtime/sequence_group.py"}),
        (trl_subclasses, {"config.py", "trainer.py"}),
    ],
)
def test_no_other_file_does_what_these_do(rule, files):
    found = files_that_break(rule)
    assert found.keys() == {f"grpo_ext/{name}" for name in files}, found


def test_no_test_imports_another_test():
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("*.py")]
    assert files_that_break(imports_of_tests, files) == {}
    assert list((ROOT / "tests" / "support").rglob("test_*.py")) == []


# ---- Each rule can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (layer_violations, "from ..trainer import GRPOTrainer"),
        (layer_violations, "import grpo_ext"),
        (layer_violations, "from grpo_ext import GRPOTrainer"),
        (layer_violations, "from tests.support.tiny import tiny_model"),
        (inside_trl, "from trl.trainer.utils import pad"),
        (version_checks, "from packaging.version import Version"),
        (impurities, "import transformers"),
        (impurities, "import torch.distributed as d"),
        (collectives, "from torch.distributed import all_reduce"),
        (collectives, "class T:\n    def f(self, x):\n        return self.accelerator.gather(x)"),
        (collectives, "import torch.distributed as dist\ndist.all_reduce(x)"),
        (collectives, "Accelerator().accelerator.wait_for_everyone()"),
        (imports_of_tests, "def f():\n    from .test_layout import make"),
        (trl_subclasses, "import trl as t\nclass T(t.GRPOConfig): ..."),
        (trl_subclasses, "from trl.trainer.grpo_trainer import GRPOTrainer as Base\nclass T(Mixin, Base): ..."),
    ],
)
def test_violations_are_found(rule, source):
    assert len(rule("grpo_ext/step/x.py", source)) == 1


def test_valid_code_passes():
    source = "from trl import GRPOTrainer\nimport trl\nclass Loud(dict): ...\nx = trl.GRPOConfig()"
    assert inside_trl("grpo_ext/step/x.py", source) == trl_subclasses("grpo_ext/step/x.py", source) == []
    source = "from functools import reduce\nprobabilities.gather(-1, tokens)\nmetrics.reduce()\naccelerator.device"
    assert collectives("grpo_ext/step/x.py", source) == []

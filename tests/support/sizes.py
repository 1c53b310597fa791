"""The sizes that `make lint` holds: lines of a file, of a function, and of the package, the tests and the docs.

What has to grow shows it here, in review, where a bound is raised with a reason.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE, FUNCTION = 400, 50
LARGER = {"trainer.py": 450}  # the override points
WHOLE = {"grpo_ext": ("*.py", 21_680), "tests": ("*.py", 28_160), "docs": ("*.md", 2_360)}


def too_large_files(package: Path) -> Iterator[str]:
    """A sentence for each file or function over its bound."""
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(package).as_posix()
        lines, bound = len(text.splitlines()), LARGER.get(name, FILE)
        if lines > bound:
            yield f"{name} has {lines} lines (at most {bound}); divide it by what its parts are about."
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION:
                    yield f"{name}:{node.lineno}: {node.name} has {length} lines (at most {FUNCTION}); divide it."


def too_large_folders(root: Path, bounds: dict[str, tuple[str, int]]) -> Iterator[str]:
    """A sentence for each folder over its bound."""
    for folder, (pattern, bound) in bounds.items():
        lines = sum(len(path.read_text().splitlines()) for path in (root / folder).rglob(pattern))
        if lines > bound:
            yield f"{folder}/ has {lines:,} lines (at most {bound:,}); delete what nothing needs, or raise the bound."


def main() -> None:
    root = Path(__file__).parents[2]
    sentences = [f for folder in ("grpo_ext", "tests") for f in too_large_files(root / folder)]
    sentences += too_large_folders(root, WHOLE)
    print("\n".join(sentences), end="\n" if sentences else "")
    sys.exit(bool(sentences))


if __name__ == "__main__":
    main()

"""The sizes that `make lint` holds: lines of a file and of a function; code tokens, records and context managers of
grpo_ext; no data in strings or files.

What has to grow shows it here, in review, where a bound is raised with a reason. Code tokens count neither comments nor
the layout of the code, so denser lines buy nothing.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

FILE, FUNCTION = 400, 50
LARGER = {"trainer.py": 465}  # the override points, which pass on what newer versions of TRL add
DATA = ("py.typed", "tools/*.html", "upstream/*.md")  # files of the package that are not Python
STRING = 2_000  # characters of one string in the code; a table is a Python expression
BOUNDS = {"code tokens": 193_429, "records": 123, "context managers": 44}

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}
Counts = dict[str, int]


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


def code_tokens(text: str) -> int:
    """Tokens without comments, line ends and indentation; an f-string is one token, as before Python 3.12."""
    tokens = open_strings = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]  # f-strings have parts since 3.12, t-strings since 3.14
        tokens += not open_strings and token.type not in _LAYOUT
        open_strings += name.endswith("STRING_START")
        open_strings -= name.endswith("STRING_END")
    return tokens


def counts(package: Path) -> Counts:
    """Code tokens, records (dataclasses and NamedTuples) and context managers of a package."""
    totals = dict.fromkeys(BOUNDS, 0)
    for path in package.rglob("*.py"):
        text = path.read_text()
        totals["code tokens"] += code_tokens(text)
        for node in ast.walk(ast.parse(text)):
            totals["records"] += isinstance(node, ast.ClassDef) and _is_record(node)
            totals["context managers"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                "contextmanager" in ast.unparse(decorator) for decorator in node.decorator_list
            )
    return totals


def _is_record(node: ast.ClassDef) -> bool:
    decorated = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    return decorated or any(ast.unparse(base).split(".")[-1] == "NamedTuple" for base in node.bases)


def over_bounds(totals: Counts, bounds: Mapping[str, int]) -> Iterator[str]:
    """A sentence for each count over its bound."""
    for name, bound in bounds.items():
        if totals[name] > bound:
            yield f"grpo_ext has {totals[name]:,} {name} (at most {bound:,}); delete what nothing needs, or raise it."


def data_in_strings(package: Path) -> Iterator[str]:
    """A sentence for each long string that is not a docstring."""
    for path in sorted(package.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))  # parents come before what they hold
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        skipped = {id(n.body[0].value) for n in nodes if isinstance(n, documented) and ast.get_docstring(n)}
        skipped |= {id(value) for n in nodes if isinstance(n, ast.JoinedStr) for value in n.values}
        for node in nodes:
            length = 0 if id(node) in skipped else _characters(node)
            if length > STRING:
                place = f"{path.relative_to(package).as_posix()}:{node.lineno}"
                yield f"{place}: a string of {length:,} characters (at most {STRING:,}); write data as an expression."


def _characters(node: ast.AST) -> int:
    """Characters that a string, of bytes or formatted too, holds as literals."""
    if isinstance(node, ast.JoinedStr):
        return sum(map(_characters, node.values))
    return len(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) else 0


def data_in_files(package: Path, named: tuple[str, ...]) -> Iterator[str]:
    """A sentence for each file that is neither Python nor named as data of the package."""
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        ignored = path.is_dir() or "__pycache__" in path.parts or path.suffix == ".py"
        if not ignored and not any(fnmatch(name, pattern) for pattern in named):
            yield f"{name} is a file of data, not one of {', '.join(named)}; write data as an expression."


def main() -> None:
    root = Path(__file__).parents[2]
    package = root / "grpo_ext"
    sentences = [f for folder in ("grpo_ext", "tests") for f in too_large_files(root / folder)]
    totals = counts(package)
    sentences += over_bounds(totals, BOUNDS)
    sentences += data_in_strings(package)
    sentences += data_in_files(package, DATA)
    print(*sentences, sep="\n", end="\n" if sentences else "")
    print("grpo_ext: " + ", ".join(f"{total:,} {name} (at most {BOUNDS[name]:,})" for name, total in totals.items()))
    sys.exit(bool(sentences))


if __name__ == "__main__":
    main()

"""What the documents show is there: links, commands with their options, settings, code."""

import ast
import importlib.util
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from click import ClickException
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from grpo_ext import GRPOConfig
from grpo_ext.algorithms.advantages import ESTIMATORS
from grpo_ext.tools.cli import app
from grpo_ext.tools.options import kinds_of_options
from tests.bench.__main__ import app as bench

ROOT = Path(__file__).parents[2]
DOCS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
PAGES = ["README.md", "recipes/README.md", ".github/CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PROGRAMS = "grpo-ext|make|accelerate launch|torchrun|python|pip install|jupyter"
INLINE = re.compile(rf"`((?:{PROGRAMS})(?: [^`]+)?)`", re.DOTALL)
OPTIONS_OF_A_RUN = {name for kind in kinds_of_options() for name in kind.__dataclass_fields__}
VARIABLE = re.compile(r"\$\(\([^)]*\)\)|\$\([^)]*\)|\$\w+")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: str) -> list[str]:
    """Every command a page shows, in a block or in a line, as one line each."""
    text = text_of(page)
    blocks = [body.replace("\\\n", " ") for _, language, body in FENCE.findall(text) if language == "bash"]
    shown = [line.split(" #")[0].strip() for body in blocks for line in body.splitlines() if line.strip()]
    shown += [" ".join(command.split()) for command in INLINE.findall(re.sub(FENCE, "", text))]
    return list(dict.fromkeys(shown))


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert words[0] in targets, f"make {words[0]}"
    arguments = " ".join(words[1:]).removeprefix("ARGS=")
    if words[0] in ("check", "bench") and arguments:
        check_tool([words[0], *shlex.split(arguments)])


def check_tool(words: list[str]) -> None:
    """The real parser takes the command; nothing runs."""
    commands = {**typer.main.get_command(app).commands, "bench": typer.main.get_command(bench)}
    if words:
        name, *options = words
        assert name in commands, f"grpo-ext {name}"
        known = {"--help", *(flag for parameter in commands[name].params for flag in parameter.opts)}
        if name in ("check", "plan", "bench"):
            known |= {f"--{option}" for option in OPTIONS_OF_A_RUN}
        named = {option.split("=")[0].replace("_", "-") for option in options if option.startswith("--")}
        assert named <= {flag.replace("_", "-") for flag in known}, f"grpo-ext {name} {named}"


def check_recipe(words: list[str]) -> None:
    files = [word for word in words if word.startswith("recipes/")]
    assert all((ROOT / file.split(":")[0]).exists() for file in files), files
    if "recipes/grpo.py" not in words:
        return
    options = words[words.index("recipes/grpo.py") + 1 :]
    names = {option[2:] for option in options if option.startswith("--")}
    assert names - {"config", "help"} <= OPTIONS_OF_A_RUN, names


def check_launch(words: list[str]) -> None:
    if words[:1] == ["launch"] and len(words) > 1:
        words = words[1:] if any(word.endswith(".py") for word in words) else [*words[1:], "train.py"]
        try:
            launch_command_parser().parse_args(words)
        except SystemExit as refused:
            raise AssertionError(words) from refused


def check_pip(words: list[str]) -> None:
    """The extras that are named are those of pyproject.toml."""
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", text_of("pyproject.toml"), re.M | re.DOTALL)
    assert extras is not None
    known = set(re.findall(r"^(\w+) = ", extras[1], re.MULTILINE))
    assert words[0] == "install"
    assert words[1:], words
    for word in words[1:]:
        if word.startswith((".", "grpo-ext")):
            assert set(re.findall(r"[\w-]+", word.removeprefix("grpo-ext"))) <= known, word


def check_command(line: str) -> None:
    words = shlex.split(VARIABLE.sub("1", line))
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "make":
        check_make(rest or ["help"])
    elif program == "grpo-ext":
        check_tool(rest)
    elif rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]) is not None, line
    elif program in ("accelerate", "python", "srun"):
        words = shlex.split(rest[-1])[1:] if program == "srun" else rest
        if program != "python":
            check_launch(words)
        check_recipe(words)
    elif program == "git":
        assert rest == [
            "clone",
            tomllib.loads(text_of("pyproject.toml"))["project"]["urls"]["Repository"],
            "&&",
            "cd",
            "grpo_ext",
        ]
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    elif program == "jupyter":
        assert (ROOT / rest[-1]).is_file(), line
    elif program == "torchrun":
        get_args_parser().parse_args(rest)
    elif program == "pip":
        check_pip(rest)
    else:
        raise AssertionError(f"no check for {line!r}")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in LINK.findall(text_of(page)):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if "://" not in target:
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


def test_the_readme_has_at_most_150_lines():
    assert len(text_of("README.md").splitlines()) <= 150


@pytest.mark.parametrize("page", [page for page in DOCS if page != "docs/README.md"])
def test_the_index_links_to_every_page(page):
    assert Path(page).name in [target.partition("#")[0] for target in LINK.findall(text_of("docs/README.md"))]


SHOWN = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize("line", [pytest.param(line, id=f"{page}: {line[:60]}") for page, line in SHOWN])
def test_a_shown_command_is_one(line):
    check_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "grpo-ext plan --no_such_size 3",
        "grpo-ext nothing",
        "make check ARGS=--no-such-option",
        "make bench ARGS=--no-such-option",
        "accelerate launch recipes/grpo.py --no_such_setting 3",
        "accelerate launch --config_file recipes/accelerate/nothing.yaml recipes/grpo.py",
        "accelerate launch --no_such_option 2 train.py",
        "pip install '.[no_such_extra]'",
        "pip install 'grpo-ext[no_such_extra]'",
        "python -m tests.bench.nothing",
        "nothing at all",
    ],
)
def test_the_check_of_commands_can_fail(line):
    with pytest.raises((AssertionError, ClickException)):
        check_command(line)


@pytest.mark.parametrize("line", [line for _, line in SHOWN if line.startswith("grpo-ext plan")])
def test_a_shown_plan_runs(line, tmp_path, monkeypatch):
    (tmp_path / "my_run.yaml").write_text("global_batch_size: 64\n")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)[1:]
    if "--model_name_or_path" in words:  # its configuration is on the hub
        place = words.index("--model_name_or_path")
        words = words[:place] + words[place + 2 :]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "optimizer step" in result.output


BLOCKS = [(page, *block) for page in PAGES for block in FENCE.findall(text_of(page))]


@pytest.mark.parametrize("body", [pytest.param(body, id=page) for page, _, kind, body in BLOCKS if kind == "python"])
def test_shown_code_uses_names_and_settings_that_exist(body):
    for node in ast.walk(ast.parse(textwrap.dedent(body))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), {})
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GRPOConfig":
            assert {k.arg for k in node.keywords} <= set(GRPOConfig.__dataclass_fields__)


SETTING = re.compile(r"`(\w+)(?:=[^`]*)?`")


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page as rows of cells, headings first."""
    found = re.findall(r"(?:^\|.*\n)+", text_of(page), re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()] for table in found]


@pytest.mark.parametrize(("heading", "column"), [("setting", 0), ("here", 2)])
def test_the_columns_of_settings_name_fields_that_exist(heading, column):
    """The first column of every table that begins with `setting`, and those of the settings of other projects."""
    known, named = {*GRPOConfig.__dataclass_fields__, *ESTIMATORS}, []
    for head, _, *rows in (table for page in PAGES for table in tables(page)):
        if head[column : column + 1] == [heading]:
            named += [name for row in rows for name in SETTING.findall(row[column])]
    assert len(named) > 15
    assert set(named) <= known, set(named) - known

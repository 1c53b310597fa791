"""What is over its bound is named, and what has no code counts nothing."""

import pytest

from tests.support.sizes import (
    STRING,
    code_tokens,
    counts,
    data_in_files,
    data_in_strings,
    over_bounds,
    too_large_files,
)


def test_sizes_over_a_bound_are_named(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "small.py").write_text("x = 1\n" * 400)
    long = "def long():\n" + "    x = 1\n" * 50
    (tmp_path / "pkg" / "large.py").write_text("x = 1\n" * 400 + long)
    assert [sentence.split(" (at most")[0] for sentence in too_large_files(tmp_path / "pkg")] == [
        "large.py has 451 lines",
        "large.py:401: long has 51 lines",
    ]


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("", 0),
        ("# why\n\n\nx = 1  # a number\n", 3),
        ("if x:\n    y = 1\nelse:\n    y = 2\n", 11),
        ('"""One\n\ntwo\n"""\n', 1),
        ("f(\n    1,\n    2,\n)\n", 7),
        ("f(1, 2,)\n", 7),
    ],
)
def test_code_tokens_are_free_of_comments_and_layout(source, tokens):
    assert code_tokens(source) == tokens


@pytest.mark.parametrize("text", ["f'a'", "f'{a}'", "rf'{a!r:>{width}} {b + 1}'", "f'{a} {f\"{b}\"}'", "f'''{\na}'''"])
def test_an_f_string_is_one_token_on_every_python(text):
    assert code_tokens(f"x = {text}\n") == 3
    assert code_tokens(f"x = {text} 'b'\n") == 4  # two strings side by side are two
    assert code_tokens(f"x = [{text}, y]\n") == 7


def test_counts_over_a_bound_are_named(tmp_path):
    (tmp_path / "code.py").write_text(
        "@dataclass(frozen=True)\nclass A:\n    a: int\n\n\nclass B(typing.NamedTuple):\n    b: int\n\n\n"
        "class C:\n    c: int\n\n\n@contextlib.contextmanager\ndef a():\n    yield\n\n\ndef b():\n    pass\n"
    )
    totals = counts(tmp_path)
    assert totals == {"code tokens": 46, "records": 2, "context managers": 1}
    assert list(over_bounds(totals, totals)) == []
    (sentence,) = over_bounds(totals, totals | {"records": 1})
    assert sentence.startswith("grpo_ext has 2 records (at most 1)")


def test_data_in_strings_and_files_is_named(tmp_path):
    data = "x" * (STRING + 1)
    documented = f'"""{data}"""\n\n\ndef f():\n    """{data}"""\n'
    (tmp_path / "docs.py").write_text(documented)
    assert list(data_in_strings(tmp_path)) == []
    for name, text in [("plain", f"A = {data!r}"), ("bytes", f"A = {data.encode()!r}"), ("f", f"A = f'{{x}}{data}'")]:
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    (tmp_path / "parts.py").write_text(f"A = (\n    {data[:1500]!r}\n    {data[1500:]!r}\n)\n")  # one string
    (tmp_path / "table.py").write_text(f"A = [{data[:1500]!r}, {data[1500:]!r}]\n")
    names = [sentence.partition(".py:")[0] for sentence in data_in_strings(tmp_path)]
    assert names == ["bytes", "f", "parts", "plain"]
    (tmp_path / "tools").mkdir()
    for path in ("py.typed", "table.json", "tools/page.html"):
        (tmp_path / path).write_text("")
    (sentence,) = data_in_files(tmp_path, ("py.typed", "tools/*.html"))
    assert sentence.startswith("table.json is a file of data")

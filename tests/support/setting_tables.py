"""Tables of settings in the documents, from grpo_ext.settings.

python -m tests.support.setting_tables      writes them (`make docs`)
"""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo_ext.settings import ALWAYS, BITWISE, SIZE, STAGES, STATE, TABLE, Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "resume-and-faults.md"
HEAD = "| it decides | settings, and parts of a run |\n|---|---|\n"
COMPARED = {ALWAYS: "", BITWISE: " (in bitwise mode)", SIZE: "", STATE: " (cannot change: the optimizer holds it)"}


def names_of(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split()) + COMPARED[row.resume]


def compared() -> Iterator[str]:
    """A line for each stage of a step: what a resume compares, once each, under the first stage that it decides."""
    for stage in STAGES:
        rows = [row for row in TABLE if row.decides.split()[:1] == [stage] and row.resume in COMPARED]
        yield f"| {stage} | {'; '.join(map(names_of, rows))} |"


def between(page: str, name: str, text: str) -> str:
    """The page with a text between the markers of this name."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    page, found = re.subn(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", page, flags=re.S)
    assert found == 1, f"the page has no marker {name}"
    return page


def written() -> str:
    return between(PAGE.read_text(), "compared", HEAD + "\n".join(compared()))


if __name__ == "__main__":
    PAGE.write_text(written())

"""A terminal for tests: runs a command on a pseudo terminal, and works out what its screen would show."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen(written: str, columns: int) -> list[str]:
    """The lines that stand on the terminal at the end; no line may be wider than it."""
    lines, row, column = [""], 0, 0
    for number, letter, back, feed, text in _TOKEN.findall(written):
        if letter == "A":
            row = max(row - int(number or 1), 0)
        elif letter == "K" and number == "2":
            lines[row] = ""
        elif back:
            column = 0
        elif feed:
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif text:
            old = lines[row].ljust(column)
            lines[row] = old[:column] + text + old[column + len(text) :]
            column += len(text)
            assert column <= columns, f"a terminal of {columns} columns would wrap {lines[row]!r}"
    return [line.rstrip() for line in lines]

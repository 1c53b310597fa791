"""A terminal for tests: runs a command on a pseudo terminal, and works out what its screen would show."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def on_terminal(command: Sequence[str], columns: int, environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit status, everything that was written) of a command on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment))
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # what Linux says when the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    return process.wait(), written.decode()


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

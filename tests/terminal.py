"""A pseudo-terminal of a given size, and what a command writes to it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable

import pytest

STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(command: Callable[[], object], columns: int, lines: int = 50) -> list[str]:
    """Run something with a terminal as standard output; return the lines that it shows, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    seen: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, seen))
    reader.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            patch.setattr(sys, "stdout", stream)
            command()
    reader.join()
    os.close(ours)
    return shown(b"".join(seen))


def shown(data: bytes) -> list[str]:
    """Return the lines of what a terminal was sent, without colours."""
    return STYLES.sub("", data.decode()).replace("\r\n", "\n").splitlines()


def _read(descriptor: int, seen: list[bytes]) -> None:
    """Read until nobody has the terminal open any more."""
    while True:
        try:
            seen.append(os.read(descriptor, 1 << 16))
        except OSError:
            return

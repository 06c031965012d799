"""Rate limit for log lines: the same warning a thousand times a second is told a few times, and then counted.

And how systemd's journal wants lines, and the last line of a log, which tells why a process ended.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from shared.runtime.clock import monotonic

BURST, PER_S = 20.0, 0.1
"""Lines of one kind at once, and for ever."""
MOST_KINDS = 1024
TAIL_BYTES = 4096
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
DEBUG_PRIORITY = 7
"""Of syslog, which the journal reads before each line; see sd-daemon(3)."""


class JournalLines(logging.Formatter):
    """Lines for systemd's journal: it has the time by itself, and is told the level, of each line of a traceback."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record, each line of it behind its priority."""
        priority = next((one for level, one in PRIORITIES if record.levelno >= level), DEBUG_PRIORITY)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def writes_to_journal() -> bool:
    """Return whether standard error is the journal's; a file or pipe that a service gives its children is not."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # it is closed, or no file at all
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class LimitRepeats(logging.Filter):
    """Lets a warning pass as often as it may; kinds are told apart by where in the code they are said.

    What an operator asks for, rounds and phases, is below a warning and always passes.

    Attributes:
        clock: Seconds by which it counts.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self.clock = clock
        self._left: dict[tuple[str, int], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line is written; one that follows others that were not says how many."""
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, record.lineno), self.clock()
        left, since, hidden = self._left.get(kind, (BURST, now, 0))
        left = min(BURST, left + PER_S * (now - since))
        if left < 1:
            self._left[kind] = left, now, hidden + 1
            return False
        if len(self._left) < MOST_KINDS or kind in self._left:
            self._left[kind] = left - 1, now, 0
        if hidden:
            record.msg = f"{record.msg} (and {hidden} more like it, not told)"
        return True


def last_line(log: Path) -> str:
    """Return the last line of a log: of an exception, what it says."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return next(reversed(file.read().decode(errors="replace").split("\n")[:-1]), "it said nothing").strip()

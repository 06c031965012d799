"""Log formatting for systemd's journal, and a rate limit for repeated warnings."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from shared.runtime.clock import monotonic
from shared.runtime.token_bucket import TokenBucket

BURST, PER_S = 20.0, 0.1
"""Burst of lines of one kind, and the sustained rate."""
MOST_KINDS = 1024
TAIL_BYTES = 4096
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
DEBUG_PRIORITY = 7
"""Syslog priority that the journal reads before each line; see sd-daemon(3)."""


class JournalLines(logging.Formatter):
    """Format for systemd's journal: without time, each line of a traceback with its priority."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, each line of it after its priority."""
        priority = next((number for level, number in PRIORITIES if record.levelno >= level), DEBUG_PRIORITY)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def writes_to_journal() -> bool:
    """Check whether standard error is the journal; a file or pipe of a child process is not."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or not a file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class RepeatFilter(logging.Filter):
    """Drop repeated warnings beyond a rate; kinds are distinguished by their line of code.

    Lines below a warning, such as rounds and phases, always pass.

    Attributes:
        clock: Seconds for the rate limit.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self.clock = clock
        self._left: dict[tuple[str, int], tuple[TokenBucket, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide whether a line is logged; the first one after suppressed lines states their number."""
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, record.lineno), self.clock()
        bucket, hidden = self._left.get(kind) or (TokenBucket(BURST, PER_S, BURST, now), 0)
        if not bucket.take(1, now):
            self._left[kind] = bucket, hidden + 1
            return False
        if len(self._left) < MOST_KINDS or kind in self._left:
            self._left[kind] = bucket, 0
        if hidden:
            record.msg = f"{record.msg} (and {hidden} more like it, suppressed)"
        return True


def last_line(log: Path) -> str:
    """Return the last line of a log; of a traceback, the error message."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return next(reversed(file.read().decode(errors="replace").split("\n")[:-1]), "no output").strip()

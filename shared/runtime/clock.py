"""Clocks: monotonic and calendar time, NTP state, and virtual time for replays."""

from __future__ import annotations

import asyncio
import ctypes
import selectors
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds; only differences are meaningful."""

monotonic: Clock = time.monotonic

TIMESYNCD = Path("/run/systemd/timesync/synchronized")
TIMEX_WORDS = 64
"""Size of struct timex of adjtimex(2), in longs."""
TIME_ERROR = 5
"""Result of adjtimex(2) for an unsynchronised clock."""

ROUNDING_S = 1e-6
"""A shorter remaining wait could be below the clock's resolution, and would never end."""
MOST_TURNS = 2_000_000
"""Limit of loop iterations without a time step, before it counts as an endless loop; the tests of sites need 150."""


def remaining_s(until: float, now: float) -> float:
    """Return the seconds from now until a moment; 0 once it has passed, within float rounding.

    Always compare with the end of a wait, never add up from its start: 60 - (70.1 - 10.1) may leave a rest at 70.1 that
    added to 70.1 is 70.1. And an event loop's timers may fire slightly early.
    """
    remaining = until - now
    return remaining if remaining > ROUNDING_S else 0.0


def utc_stamp() -> str:
    """Return the calendar time for run names and log lines; durations and deadlines use `monotonic`."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())  # noqa: TID251 - the one place that reads the wall clock


def parse_utc_stamp(stamp: str) -> float | None:
    """Parse a stamp of `utc_stamp` to calendar seconds; None for any other text."""
    try:
        return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def utc_seconds() -> float:
    """Return calendar seconds since 1970, for values that outlive a restart; never for durations or deadlines."""
    return time.time()  # noqa: TID251 - see utc_stamp


def is_disciplined() -> bool | None:
    """Check whether a time service disciplines the kernel's clock; None where the kernel does not say."""
    timex = (ctypes.c_long * TIMEX_WORDS)()  # the first word, modes, is 0: a pure query
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def is_synchronised() -> bool:
    """Check that this machine's clock is right, by systemd-timesyncd's or the kernel's state."""
    return TIMESYNCD.exists() or is_disciplined() is True


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that advances virtual time instead of waiting."""

    now = 0.0
    turns = 0
    before: Callable[[], bool] | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout == 0:  # callbacks are ready: skip the system call
            self.turns += 1
            if self.turns < MOST_TURNS:
                return []
        turns, self.turns = self.turns, 0
        if turns >= MOST_TURNS:
            raise RuntimeError(f"virtual time stands still at {self.now!r} s: a task reschedules itself without end")
        ready: list[Any] = super().select(0)
        if not ready and self.before and self.before():
            return ready
        if not ready and timeout is None:
            raise RuntimeError("virtual time stands still: every task waits and no timer is set")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time: `asyncio.sleep(3600)` returns at once and `time()` has moved by an hour."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def before_time_moves(self, call: Callable[[], bool]) -> None:
        """Register a function to call before time moves; time stays if it returns True, because it did something.

        It waits for work outside of virtual time, such as another process, which ends at a fixed virtual moment,
        however long it really takes.
        """
        self._jumping.before = call

    def time(self) -> float:
        """Return virtual seconds since the loop was created."""
        return self._jumping.now

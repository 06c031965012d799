"""Time as an argument: real outside, virtual in replay."""

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
"""Monotonic seconds; only differences mean anything."""

monotonic: Clock = time.monotonic

TIMESYNCD = Path("/run/systemd/timesync/synchronized")
TIMEX_WORDS = 64
"""Room for struct timex of adjtimex(2)."""
TIME_ERROR = 5
"""What adjtimex(2) returns of a clock that nobody keeps right."""

ROUNDING_S = 1e-6
"""What is left of a wait could be less than any clock moves by, and would be waited for without end."""
MOST_TURNS = 2_000_000
"""Of a virtual loop at one moment, before that counts as a wait without end; what the tests of sites play takes 150."""


def left_s(until: float, now: float) -> float:
    """Return the seconds from now until a moment; 0 once it is there, but for the rounding of floats.

    Time to wait is never counted up from a beginning: of 60 - (70.1 - 10.1) something may be left at 70.1 that added to
    70.1 is 70.1. And a loop's timers may go off a little early.
    """
    left = until - now
    return left if left > ROUNDING_S else 0.0


def utc_stamp() -> str:
    """Return the calendar time for names of runs and log lines; no duration or deadline is derived from it."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())  # noqa: TID251 - the one place that reads the wall clock


def utc_of_stamp(stamp: str) -> float | None:
    """Return the calendar seconds of a stamp as `utc_stamp` writes them; None for any other text."""
    try:
        return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def utc_seconds() -> float:
    """Return calendar seconds since 1970, for what outlives a restart; no deadline or measured duration uses it."""
    return time.time()  # noqa: TID251 - with the above


def is_kept_right() -> bool | None:
    """Return whether a time server keeps this machine's clock right; None where the kernel does not say."""
    timex = (ctypes.c_long * TIMEX_WORDS)()  # its first word, 0, says that nothing is to be changed
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def is_synchronised() -> bool:
    """Tell whether this machine's clock is right for certain, by systemd-timesyncd's word or the kernel's."""
    return TIMESYNCD.exists() or is_kept_right() is True


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: where a real selector would sleep, the loop's time moves instead."""

    now = 0.0
    turns = 0
    before: Callable[[], bool] | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout == 0:  # there is something left to do at this moment: nobody need ask the system first
            self.turns += 1
            if self.turns < MOST_TURNS:
                return []
        turns, self.turns = self.turns, 0
        if turns >= MOST_TURNS:
            raise RuntimeError(f"virtual time stands still at {self.now!r} s: something waits anew without end")
        ready: list[Any] = super().select(0)
        if not ready and self.before and self.before():
            return ready
        if not ready and timeout is None:
            raise RuntimeError("virtual time stands still: every task waits and no timer is set")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which `asyncio.sleep(3600)` returns at once and `time()` has moved by an hour."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def before_time_moves(self, call: Callable[[], bool]) -> None:
        """Have something called whenever nothing is left to do at this moment; time stays if it says it did something.

        What runs outside of virtual time, such as another process, is waited for there: it ends at the moment that was
        set for it, however long it takes.
        """
        self._jumping.before = call

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._jumping.now

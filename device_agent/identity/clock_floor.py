"""Earliest plausible time of a board, whose clock may start in 1970.

Certificate dates are checked by this clock if the kernel reports it as synchronised and it is not behind a time known
to be past: the release of this program and the last known site time. Otherwise dates are not checked, while chain and
name still are, and calendar decisions use the site's time, which arrives over a verified connection. Deadlines are
monotonic and use neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from device_agent.identity.credentials import FOLDER
from shared.errors import Unwritable
from shared.runtime.clock import Clock, is_synchronised, monotonic, utc_seconds
from shared.runtime.durable import replace_file

log = logging.getLogger(__name__)

WRITTEN_UTC_S = 1_793_491_200.0
"""2026-11-01; the true time is later wherever this program runs."""
SITE_TIME_FILE = "site_time"
MAX_AHEAD_S = 7 * 86_400.0
"""Harmless lead of a gateway's clock: its authorities are valid from that long before their creation."""
TOLERANCE_S = 3600.0
"""Clocks that differ by no more are both right as far as certificate dates matter."""


@dataclass
class BoardClock:
    """The board's clock, with the bounds known from elsewhere.

    Attributes:
        folder: Where the site's time is stored; None for nowhere.
        utc_s: Reads the clock in UTC seconds.
        synchronised: Returns whether the clock is synchronised.
        elapsed: Monotonic clock, in seconds.
    """

    folder: Path | None = None
    utc_s: Callable[[], float] = utc_seconds
    synchronised: Callable[[], bool] = is_synchronised
    elapsed: Clock = monotonic
    _site_time: tuple[float, float] | None = None

    @classmethod
    def of(cls, state_dir: Path) -> BoardClock:
        """Return the clock of a board whose agent has this folder."""
        return cls(state_dir / FOLDER)

    def floor_utc_s(self) -> float:
        """Return a time that is certainly past, unless the gateway's clock was ahead by more than a few days."""
        return max(WRITTEN_UTC_S, self._read_stored_time() - MAX_AHEAD_S)

    def may_judge(self) -> bool:
        """Return True if certificate dates can be checked by this clock."""
        return self.utc_s() >= self.floor_utc_s() and self.synchronised()

    def set_site_time(self, utc_s: float, *, keep: bool = True) -> None:
        """Set the site's time from a verified connection; the next one corrects a wrong time.

        Args:
            keep: Also store it as a lower bound of the time.
        """
        self._site_time = utc_s, self.elapsed()
        if self.folder is None or not keep or not self.folder.is_dir():
            return
        try:
            replace_file(self.folder / SITE_TIME_FILE, f"{utc_s:.0f}\n".encode())
        except (Unwritable, OSError) as error:
            log.warning("the site's time is not stored: %s", error)

    def site_utc_s(self) -> float | None:
        """Return the site's time; None if this process has not received it."""
        return None if self._site_time is None else self._site_time[0] + self.elapsed() - self._site_time[1]

    def find_wrong_clock(self) -> Literal["board", "gateway", ""]:
        """Return whose clock is wrong by the site's time; empty if they agree or the site's time is unknown."""
        site = self.site_utc_s()
        if site is None or abs(self.utc_s() - site) <= TOLERANCE_S:
            return ""
        return "gateway" if site < WRITTEN_UTC_S or self.may_judge() else "board"

    def explain(self) -> str:
        """Describe which clock is wrong; empty if `find_wrong_clock` reports none."""
        wrong, site = self.find_wrong_clock(), self.site_utc_s()
        if not wrong or site is None:
            return ""
        readings = f"this board's clock reads {utc_text(self.utc_s())}, the gateway's {utc_text(site)}"
        if site < WRITTEN_UTC_S:
            return f"the gateway's clock is wrong: {readings}, but it must be {utc_text(WRITTEN_UTC_S)} or later"
        if wrong == "gateway":
            return f"the gateway's clock or this board's time source is wrong: {readings}; this board's is synchronised"
        return f"this board's clock is wrong: {readings}"

    def _read_stored_time(self) -> float:
        if self.folder is None:
            return 0.0
        try:
            return float((self.folder / SITE_TIME_FILE).read_text(encoding="ascii")[:20])
        except (OSError, ValueError):
            return 0.0


def utc_text(utc_s: float) -> str:
    """Format UTC seconds of any size."""
    from datetime import datetime, timedelta, timezone  # noqa: PLC0415 - for messages alone

    try:
        return f"{datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=utc_s):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):
        return f"{utc_s:g} s"

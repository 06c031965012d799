"""What this board may believe of its own clock. Many boards have no battery behind it and wake up in 1970.

Dates of certificates are judged by this clock where the kernel says that it is synchronised and it is not behind what
this board knows to be past: the time this program was written, and the site's time as it was told last. Otherwise they
are not judged at all, while chain and name are, and what has to be decided by the calendar is decided by the site's
time, which comes over a connection that has been verified. Deadlines are monotonic and know nothing of either.
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
"""2026-11-01: it is later than that wherever this program runs."""
SEEN = "site_time"
AHEAD_S = 7 * 86_400.0
"""So far a gateway's clock may be ahead and do no harm: as far back its authorities are valid from their making."""
AGREES_S = 3600.0
"""Clocks that are no further apart are both right, for the purpose of dates."""


@dataclass
class BoardClock:
    """This board's clock, and what is known beside it.

    Attributes:
        folder: Where the site's time is kept; None to keep it nowhere.
        utc_s: What the clock reads, calendar seconds.
        synchronised: Tells whether something keeps it right.
        elapsed: Monotonic seconds.
    """

    folder: Path | None = None
    utc_s: Callable[[], float] = utc_seconds
    synchronised: Callable[[], bool] = is_synchronised
    elapsed: Clock = monotonic
    _told: tuple[float, float] | None = None

    @classmethod
    def of(cls, state_dir: Path) -> BoardClock:
        """Return the clock of a board whose agent has this folder."""
        return cls(state_dir / FOLDER)

    def floor_utc_s(self) -> float:
        """Return a moment that is past for certain, unless the gateway's clock was ahead by more than a few days."""
        return max(WRITTEN_UTC_S, self._seen() - AHEAD_S)

    def may_judge(self) -> bool:
        """Tell whether dates of certificates can be judged by this clock."""
        return self.utc_s() >= self.floor_utc_s() and self.synchronised()

    def take_site_time(self, utc_s: float, *, keep: bool = True) -> None:
        """Take the site's time from a connection that was verified; a wrong one is mended by the next.

        Args:
            utc_s: Calendar seconds.
            keep: Whether it is a floor from now on.
        """
        self._told = utc_s, self.elapsed()
        if self.folder is None or not keep or not self.folder.is_dir():
            return
        try:
            replace_file(self.folder / SEEN, f"{utc_s:.0f}\n".encode())
        except (Unwritable, OSError) as error:
            log.warning("the site's time is not kept: %s", error)

    def site_utc_s(self) -> float | None:
        """Return the site's time, as far as this process was told; None where it was not."""
        return None if self._told is None else self._told[0] + self.elapsed() - self._told[1]

    def find_wrong_clock(self) -> Literal["board", "gateway", ""]:
        """Return whose clock is wrong, by the site's time; empty if they agree or the site's time is not known."""
        site = self.site_utc_s()
        if site is None or abs(self.utc_s() - site) <= AGREES_S:
            return ""
        return "gateway" if site < WRITTEN_UTC_S or self.may_judge() else "board"

    def explain(self) -> str:
        """Describe which clock is wrong; empty where `find_wrong_clock` blames none."""
        wrong, site = self.find_wrong_clock(), self.site_utc_s()
        if not wrong or site is None:
            return ""
        readings = f"this board's clock reads {utc_text(self.utc_s())}, the gateway's {utc_text(site)}"
        if site < WRITTEN_UTC_S:
            return f"the gateway's clock is wrong: {readings}, and it is {utc_text(WRITTEN_UTC_S)} or later"
        if wrong == "gateway":
            return (
                f"the gateway's clock is wrong, or what keeps this board's clock: {readings}, and this one is kept right"
            )
        return f"this board's clock is wrong: {readings}"

    def _seen(self) -> float:
        if self.folder is None:
            return 0.0
        try:
            return float((self.folder / SEEN).read_text(encoding="ascii")[:20])
        except (OSError, ValueError):
            return 0.0


def utc_text(utc_s: float) -> str:
    """Return calendar seconds for people, whatever they are."""
    from datetime import datetime, timedelta, timezone  # noqa: PLC0415 - for messages alone

    try:
        return f"{datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=utc_s):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError):
        return f"{utc_s:g} s"

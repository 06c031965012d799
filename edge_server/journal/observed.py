"""Records of what a server sees besides its rounds: its own beginning, who comes and goes, what devices measure."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.protocol.measurements import Provenance


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the journal that no round wrote. Seconds are of the server's monotonic clock."""


class ServerBegan(Observed, frozen=True, kw_only=True):
    """A server process began with the run, or went on with it; the clocks of two processes have nothing in common.

    Second `t` of this process's clock is second `run_s + (t - at)` of the run; see `edge_server.journal.run_clock`.

    Attributes:
        at: On the process's clock.
        run_s: The same moment, in seconds of the run.
        utc_s: The same moment in calendar seconds, where there is a calendar.
        versions: Of what computes.
    """

    at: float
    run_s: float = 0.0
    utc_s: float | None = None
    versions: dict[str, str] = {}


class Joined(Observed, frozen=True, kw_only=True):
    """A device is there: it connected, did so anew (`reconnected`), or is another process than before (`restarted`)."""

    device: str
    at: float
    cause: Literal["connected", "reconnected", "restarted"] = "connected"
    version: str = ""


class Left(Observed, frozen=True, kw_only=True):
    """A device is gone by its own or its broker's word, or was when this server process began (`unheard`)."""

    device: str
    at: float
    cause: Literal["gone", "unheard"] = "gone"


class Sensed(Observed, frozen=True, kw_only=True):
    """What matters of a report; see `edge_server.fleet.observe` for which reports are told.

    Attributes:
        device: Who measured.
        at: When the server heard it.
        readings: Figures by name, whose end is the unit.
        ages: Seconds before `at` at which a figure was measured, where that was more than a second.
        provenance: Source and quality of those figures of which that is news.
        board: Id of the firmware profile, where that is news.
        facts: Those that are news.
    """

    device: str
    at: float
    readings: dict[str, float]
    ages: dict[str, float] = {}
    provenance: dict[str, Provenance] = {}
    board: str = ""
    facts: dict[str, str] = {}


class Noted(Observed, frozen=True, kw_only=True):
    """Something that whoever reads the run's figures must know, such as a gap in a trace that was filled by a rule."""

    what: str

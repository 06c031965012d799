"""One row a device: what the broker says of it, joined with what the site's history has kept."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edge_server.fleet.state import Fleet
from edge_server.journal.kept import Kept
from shared.protocol.measurements import Absent, Reading, Spent
from shared.protocol.messages import Report, Status


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a site.

    Attributes:
        online: None where no broker was asked, or it holds no word of the device.
        heard_utc_s: Calendar seconds at which a server, or this process, first heard its last report; None where
            neither did: the broker, which keeps that report, does not say since when.
        age_s: Seconds since then.
        at: The report's own time, in seconds of the device's monotonic clock.
    """

    device: str
    online: bool | None
    heard_utc_s: float | None = None
    age_s: float | None = None
    at: float | None = None
    board: str = ""
    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}
    spent: Spent | None = None

    def lack(self, name: str) -> Absent | None:
        """Return why a figure is not there: its own absence or its probe's; None where nothing was said of it."""
        return self.absent.get(name) or self.absent.get(name.partition(".")[0])


def rows(
    fleet: Fleet | None, kept: Mapping[str, Kept], heard_now: Mapping[str, float], now_utc_s: float
) -> list[Device]:
    """Return the devices in order of name.

    Args:
        fleet: What the broker says; None where none was asked.
        kept: The last report of each device in the site's history.
        heard_now: Calendar seconds of those reports that came while this process listened.
        now_utc_s: Calendar seconds.
    """
    statuses, reports = (fleet.statuses, fleet.reports) if fleet else ({}, {})
    found = []
    for name in sorted(statuses.keys() | reports.keys() | kept.keys()):
        known, live = kept.get(name), reports.get(name)
        heard_utc_s = heard_now.get(name)
        if known and (live is None or _is_same(live, known.report)):
            heard_utc_s = known.heard_utc_s
        report = live or (known.report if known else None)
        found.append(_device(name, statuses.get(name), report, heard_utc_s, now_utc_s))
    return found


def _is_same(live: Report, kept: Report) -> bool:
    return (live.instance, live.at) == (kept.instance, kept.at)


def _device(
    name: str, status: Status | None, report: Report | None, heard_utc_s: float | None, now_utc_s: float
) -> Device:
    online = status.online if status else None
    if report is None:
        return Device(device=name, online=online)
    return Device(
        device=name,
        online=online,
        heard_utc_s=heard_utc_s,
        age_s=max(0.0, now_utc_s - heard_utc_s) if heard_utc_s is not None else None,
        at=report.at,
        board=report.board,
        readings=report.readings,
        absent=report.absent,
        facts=report.facts,
        spent=report.spent,
    )

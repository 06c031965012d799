"""Device rows: broker state joined with the site's report history."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edge_server.fleet.state import Fleet
from edge_server.journal.report_history import StoredReport
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.measurements import Absent, Reading, TaskCost
from shared.protocol.messages import Report, Status


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """State of one device of a site.

    Attributes:
        online: None if no broker was asked, or it has no status of the device.
        heard_utc_s: Calendar seconds at which a server, or this process, received the last report; None if neither did:
            the broker retains the report without its time.
        age_s: Seconds since `heard_utc_s`; None if that is unknown.
        at: The report's own time, in seconds of the device's monotonic clock.
        models: Status of the models that it serves.
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
    spent: TaskCost | None = None
    models: tuple[ModelStatus, ...] = ()

    def lack(self, name: str) -> Absent | None:
        """Return why a reading is absent: by itself or with its whole probe; None if nothing was reported."""
        return self.absent.get(name) or self.absent.get(name.partition(".")[0])


def device_rows(
    fleet: Fleet | None, stored: Mapping[str, StoredReport], heard_now: Mapping[str, float], now_utc_s: float
) -> list[Device]:
    """Return the devices, sorted by name.

    Args:
        fleet: State retained by the broker; None if none was asked.
        heard_now: Calendar seconds of reports that arrived while this process listened.
        now_utc_s: Current time, calendar seconds.
    """
    statuses, reports = (fleet.statuses, fleet.reports) if fleet else ({}, {})
    devices = []
    for name in sorted(statuses.keys() | reports.keys() | stored.keys()):
        last, live = stored.get(name), reports.get(name)
        heard_utc_s = heard_now.get(name)
        if last and (live is None or (live.instance, live.at) == (last.report.instance, last.report.at)):
            heard_utc_s = last.heard_utc_s
        report = live or (last.report if last else None)
        devices.append(_build_device(name, statuses.get(name), report, heard_utc_s, now_utc_s))
    return devices


def _build_device(
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

"""Device state of a site: presence, sessions and last reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared.protocol.messages import Report, Status
from shared.transport.presence import READY

REMEMBERED = 16
"""Agent processes remembered per device; each restart is a new one."""
FRESH_REPORTS = 2
"""Reports that prove an offline device alive; the first may be a retained one."""


@dataclass
class Fleet:
    """Last known state of a site's devices. Handling a message takes constant time.

    Attributes:
        sessions: Last session number of each agent instance of a device, ordered by birth; 0 if only its death was
            received.
        reports: Last report of each device.
        life_signs: Messages per device that prove it alive, without possibly retained ones.
    """

    statuses: dict[str, Status] = field(default_factory=dict)
    sessions: dict[str, dict[str, int]] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    life_signs: Counter[str] = field(default_factory=Counter)
    _fresh: dict[str, int] = field(default_factory=dict)
    _online: tuple[str, ...] | None = None

    @property
    def online(self) -> tuple[str, ...]:
        """Online devices, sorted by name."""
        if self._online is None:
            self._online = tuple(sorted(device for device, status in self.statuses.items() if status.online))
        return self._online

    def observe(self, message: Status | Report) -> bool:
        """Handle a status or report; return false if it is outdated or repeated.

        A birth counts whatever its number, since a board with new storage restarts its session numbers; only a
        repetition by the same process does not. A report is retained: it may be delivered again, and may come from a
        process that ended.
        """
        if isinstance(message, Report):
            if self._is_stale(message):
                return False
            self.life_signs[message.device] += message.device in self.reports
            self.reports[message.device] = message
            self._fresh[message.device] = self._fresh.get(message.device, 0) + 1
            return True
        if self._is_late(message):
            return False
        sessions = self.sessions.get(message.device, {})
        if message.online:
            sessions.pop(message.instance, None)  # move it to the end
            sessions[message.instance] = message.session
        elif message.instance not in sessions:
            sessions = {message.instance: 0, **sessions}
        self.sessions[message.device] = dict(list(sessions.items())[-REMEMBERED:])
        before = self.statuses.get(message.device)
        if before and message.online and (not before.online or before.session != message.session):
            self.life_signs[message.device] += 1
        self._set(message)
        return True

    def mark_online(self, device: str) -> Status | None:
        """Mark an offline device as online, since it sends messages; return its status, None if it was not offline.

        Its death was published by another process, or its birth was lost.
        """
        last = self.statuses.get(device)
        if last is None or last.online:
            return None
        sessions = self.sessions[device]
        instance = next((instance for instance in reversed(sessions) if sessions[instance]), "")
        session, state = sessions.get(instance, 0), last.state or READY
        status = msgspec.structs.replace(last, instance=instance, session=session, online=True, state=state, version="")
        self._set(status)
        return status

    def has_fresh_reports(self, device: str) -> bool:
        """Return true if an offline device has sent more reports than the broker can have retained."""
        return self._fresh.get(device, 0) >= FRESH_REPORTS

    def is_duplicate_id(self, message: Status) -> bool:
        """Return true if a birth shows two processes under one id: a superseded process began a new session."""
        if not message.online or self._is_late(message):
            return False
        last, sessions = self.statuses.get(message.device), self.sessions.get(message.device, {})
        if last is None or last.instance == message.instance:
            return False
        return message.instance in sessions and message.session > sessions[message.instance]

    def _set(self, status: Status) -> None:
        last = self.statuses.get(status.device)
        if last and not status.online:
            status = msgspec.structs.replace(status, classes=last.classes, inputs=last.inputs)  # deaths omit them
        if last is None or last.online != status.online:
            self._fresh.pop(status.device, None)
            self._online = None
        self.statuses[status.device] = status

    def _is_stale(self, report: Report) -> bool:
        """Return true if a report is outdated, or from a superseded process."""
        last, status = self.reports.get(report.device), self.statuses.get(report.device)
        if not report.instance:  # unknown process; boards restart their clocks
            return last is not None and last.instance == "" and last.at == report.at
        if last and last.instance == report.instance and report.at <= last.at:
            return True
        if status is None or status.instance in ("", report.instance):
            return False
        sessions = self.sessions[report.device]
        is_last = report.instance == next(reversed(sessions)) and sessions[report.instance] > 0
        return status.online or (report.instance in sessions and not is_last)

    def _is_late(self, message: Status) -> bool:
        """Return true if a newer session is known.

        Births of one process are ordered by their numbers. Of two processes, the one born later is newer; if only a
        death of a process was received, its number must exceed that of the known one. For an offline device the birth
        of its last session counts again: it reports that the device is online.
        """
        last = self.statuses.get(message.device)
        if last is None or not last.instance:
            return False
        sessions = self.sessions[message.device]
        if message.instance == last.instance:
            return message.session < sessions.get(message.instance, 0)
        if message.online:
            return message.session < sessions.get(message.instance, -1) + last.online
        return message.instance in sessions or message.session <= last.session


def select_devices(fleet: Fleet, takes: Callable[[str], bool]) -> Fleet:
    """Return the state of those devices for which `takes` returns true."""
    return Fleet(
        {device: status for device, status in fleet.statuses.items() if takes(device)},
        {device: sessions for device, sessions in fleet.sessions.items() if takes(device)},
        {device: report for device, report in fleet.reports.items() if takes(device)},
    )

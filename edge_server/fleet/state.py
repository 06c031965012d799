"""What is known of the devices: who is there, and what each measured last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared.protocol.messages import Report, Status
from shared.transport.presence import READY

REMEMBERED = 16
"""How many processes of a device are told apart; each restart is a new one."""
FRESH_REPORTS = 2
"""Of a device that is held for gone: the first may be the one that the broker has retained of it."""


@dataclass
class Fleet:
    """The devices of a site as they last told of themselves; each message costs the same, however many there are.

    Attributes:
        statuses: The last word of each device.
        sessions: The last session that each process of a device was born with, by its instance, 0 where only its death
            was heard; the process that was born last is last.
        reports: The last report of each device.
        words: Of each device, how often it has shown that it lives: nothing that a broker may have retained.
    """

    statuses: dict[str, Status] = field(default_factory=dict)
    sessions: dict[str, dict[str, int]] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    words: Counter[str] = field(default_factory=Counter)
    _fresh: dict[str, int] = field(default_factory=dict)
    _online: tuple[str, ...] | None = None

    @property
    def online(self) -> tuple[str, ...]:
        """Devices that are there now, in order of name."""
        if self._online is None:
            self._online = tuple(sorted(device for device, status in self.statuses.items() if status.online))
        return self._online

    def observe(self, message: Status | Report) -> bool:
        """Take a message; tell whether it was news: of an older session or a superseded process it is none.

        A birth counts whatever its number, since a board whose storage was replaced counts its sessions from the start
        again; only what that very process has said before does not. A report is retained: it may come again, and come
        from a process that is gone.
        """
        if isinstance(message, Report):
            if self._is_stale(message):
                return False
            self.words[message.device] += message.device in self.reports
            self.reports[message.device] = message
            self._fresh[message.device] = self._fresh.get(message.device, 0) + 1
            return True
        if self._is_late(message):
            return False
        heard = self.sessions.get(message.device, {})
        if message.online:
            heard.pop(message.instance, None)  # so that it stands last
            heard[message.instance] = message.session
        elif message.instance not in heard:
            heard = {message.instance: 0, **heard}
        self.sessions[message.device] = dict(list(heard.items())[-REMEMBERED:])
        before = self.statuses.get(message.device)
        if before and message.online and (not before.online or before.session != message.session):
            self.words[message.device] += 1
        self._set(message)
        return True

    def revive(self, device: str) -> Status | None:
        """Take a device that was held for gone for alive, since it speaks; return its status, None where it was not.

        Its death was told by another than itself, or its birth was lost on the way.
        """
        known = self.statuses.get(device)
        if known is None or known.online:
            return None
        heard = self.sessions[device]
        born = next((instance for instance in reversed(heard) if heard[instance]), "")
        status = msgspec.structs.replace(
            known, instance=born, session=heard.get(born, 0), online=True, state=known.state or READY, version=""
        )
        self._set(status)
        return status

    def reports_prove_life(self, device: str) -> bool:
        """Tell whether a device that is held for gone has reported since, beyond what the broker may have retained."""
        return self._fresh.get(device, 0) >= FRESH_REPORTS

    def is_used_twice(self, message: Status) -> bool:
        """Tell whether a birth shows that two processes live under one id: a superseded one begins a new session."""
        if not message.online or self._is_late(message):
            return False
        known, heard = self.statuses.get(message.device), self.sessions.get(message.device, {})
        if known is None or known.instance == message.instance:
            return False
        return message.instance in heard and message.session > heard[message.instance]

    def _set(self, status: Status) -> None:
        known = self.statuses.get(status.device)
        if known and not status.online:
            status = msgspec.structs.replace(status, classes=known.classes, inputs=known.inputs)  # a death repeats none
        if known is None or known.online != status.online:
            self._fresh.pop(status.device, None)
            self._online = None
        self.statuses[status.device] = status

    def _is_stale(self, report: Report) -> bool:
        """Tell whether a report is no news of its process, or of a process that another has superseded."""
        known, status = self.reports.get(report.device), self.statuses.get(report.device)
        if not report.instance:  # it does not say which process measured it, and boards begin to count anew
            return known is not None and known.instance == "" and known.at == report.at
        if known and known.instance == report.instance and report.at <= known.at:
            return True
        if status is None or status.instance in ("", report.instance):
            return False
        heard = self.sessions[report.device]
        is_last = report.instance == next(reversed(heard)) and heard[report.instance] > 0
        return status.online or (report.instance in heard and not is_last)

    def _is_late(self, message: Status) -> bool:
        """Tell whether a newer session has spoken since.

        Of one process the numbers of its births decide. Of two, the one whose birth was heard later is newer; where a
        death is all that was heard of a process, its number must be larger than that of the known one. Of a device
        that is held for gone, the birth of its last session counts again: it says that it is not.
        """
        known = self.statuses.get(message.device)
        if known is None or not known.instance:
            return False
        heard = self.sessions[message.device]
        if message.instance == known.instance:
            return message.session < heard.get(message.instance, 0)
        if message.online:
            return message.session < heard.get(message.instance, -1) + known.online
        return message.instance in heard or message.session <= known.session


def select_devices(fleet: Fleet, takes: Callable[[str], bool]) -> Fleet:
    """Return what is known of those devices that `takes` says yes to."""
    return Fleet(
        {device: one for device, one in fleet.statuses.items() if takes(device)},
        {device: one for device, one in fleet.sessions.items() if takes(device)},
        {device: one for device, one in fleet.reports.items() if takes(device)},
    )

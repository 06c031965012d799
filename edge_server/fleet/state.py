"""What is known of the devices: who is there, and what each measured last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from shared.protocol.messages import Report, Status

REMEMBERED = 16
"""How many processes of a device are told apart; each restart is a new one."""


@dataclass(frozen=True)
class Fleet:
    """The devices of a site as they last told of themselves.

    Attributes:
        statuses: The last word of each device.
        sessions: The last session of each process of a device, by its instance; the process that spoke last is last.
        reports: The last report of each device.
    """

    statuses: Mapping[str, Status] = field(default_factory=dict)
    sessions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)

    @property
    def online(self) -> tuple[str, ...]:
        """Devices that are there now, in order of name."""
        return tuple(sorted(device for device, status in self.statuses.items() if status.online))


def observe(fleet: Fleet, message: Status | Report) -> Fleet:
    """Return the fleet after a message; what an older session or a superseded process says changes nothing.

    A birth counts whatever its number, since a board whose storage was replaced counts its sessions from the start
    again; only what that very process has said before does not. A report is retained: it may come again, and come
    from a process that is gone.
    """
    if isinstance(message, Report):
        if _is_stale(fleet, message):
            return fleet
        return replace(fleet, reports={**fleet.reports, message.device: message})
    if _is_late(fleet, message):
        return fleet
    heard = dict(fleet.sessions.get(message.device, {}))
    heard.pop(message.instance, None)  # so that it stands last
    heard[message.instance] = message.session
    kept = dict(list(heard.items())[-REMEMBERED:])
    return replace(
        fleet,
        statuses={**fleet.statuses, message.device: message},
        sessions={**fleet.sessions, message.device: kept},
    )


def select_devices(fleet: Fleet, takes: Callable[[str], bool]) -> Fleet:
    """Return what is known of those devices that `takes` says yes to."""
    return Fleet(
        {device: one for device, one in fleet.statuses.items() if takes(device)},
        {device: one for device, one in fleet.sessions.items() if takes(device)},
        {device: one for device, one in fleet.reports.items() if takes(device)},
    )


def _is_stale(fleet: Fleet, report: Report) -> bool:
    """Tell whether a report is no news of its process, or of a process that another has superseded."""
    known, status = fleet.reports.get(report.device), fleet.statuses.get(report.device)
    if not report.instance:  # it does not say which process measured it, and boards begin to count anew
        return known is not None and known.instance == "" and known.at == report.at
    if known and known.instance == report.instance and report.at <= known.at:
        return True
    if status is None or status.instance == report.instance:
        return False
    return status.online or report.instance in fleet.sessions[report.device]


def is_used_twice(fleet: Fleet, message: Status | Report) -> bool:
    """Tell whether a message shows that two processes live under one id: a superseded one is born once more."""
    if isinstance(message, Report) or not message.online or _is_late(fleet, message):
        return False
    known = fleet.statuses.get(message.device)
    return known is not None and known.instance != message.instance in fleet.sessions[message.device]


def _is_late(fleet: Fleet, message: Status) -> bool:
    """Tell whether a newer session has spoken since.

    Of one process the numbers decide. Of two, the one whose birth was heard later is newer; where a death is all that
    was heard of a process, its number must be larger than that of the known one.
    """
    known = fleet.statuses.get(message.device)
    if known is None:
        return False
    heard = fleet.sessions[message.device]
    if message.instance == known.instance:
        return message.session < known.session
    if message.online:
        return message.session <= heard.get(message.instance, -1)
    return message.instance in heard or message.session <= known.session

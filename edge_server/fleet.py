"""What is known of the devices: who is there, and what each measured last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shared.messages import Report, Status


@dataclass(frozen=True)
class Fleet:
    """The devices of a site as they last told of themselves."""

    statuses: Mapping[str, Status] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)

    @property
    def online(self) -> tuple[str, ...]:
        """Devices that are there now, in order of name."""
        return tuple(sorted(device for device, status in self.statuses.items() if status.online))


def observe(fleet: Fleet, message: Status | Report) -> Fleet:
    """Return the fleet after a message; the death of an older session does not end a newer one.

    A birth always counts: a board whose storage was replaced counts its sessions from the start again.
    """
    if isinstance(message, Report):
        return replace(fleet, reports={**fleet.reports, message.device: message})
    known = fleet.statuses.get(message.device)
    if known and not message.online and message.session < known.session:
        return fleet
    return replace(fleet, statuses={**fleet.statuses, message.device: message})

"""Which frame of a common payload goes out next, and to whom. Knows no bytes, no sockets and takes its time as input.

Every member asks for frames on its own; a frame goes out once to all as soon as each member has asked for it. A member
that keeps the others waiting is told to leave, and is served alone from then on, at its own pace. So the sender's
bytes do not grow with the fleet, and the fleet does not wait for its slowest link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ALL = ""
"""The audience that is every member at once."""


@dataclass
class _Member:
    """One device: what it waits for, and how far it has asked."""

    waiting: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    reached: int = -1

    def ready(self, index: int) -> bool:
        """Tell whether sending `index` to all now would not come too early for this member."""
        return index in self.waiting or index in self.served or self.reached > index


class Fanout:
    """The state of one payload on its way to several devices.

    Args:
        group: Devices expected on the shared topic; others are served alone.
        patience_s: Seconds that one member may keep the others waiting.
    """

    def __init__(self, group: Iterable[str], *, patience_s: float) -> None:
        self._group = {device: _Member() for device in group}
        self._alone: dict[str, _Member] = {}
        self._patience_s = patience_s
        self._asked_at: dict[int, float] = {}
        self._cycle_s = 0.0
        self._last_sent_at: float | None = None

    def want(self, device: str, indices: Iterable[int], now: float) -> None:
        """Note what a device asks for."""
        member = self._group.get(device) or self._alone.setdefault(device, _Member())
        for index in indices:
            member.waiting.add(index)
            member.served.discard(index)
            member.reached = max(member.reached, index)
            if device in self._group:
                self._asked_at.setdefault(index, now)

    def drop(self, device: str) -> None:
        """Forget a device that went away or has everything."""
        self._group.pop(device, None)
        self._alone.pop(device, None)
        self._forget_unwanted()

    def due(self, now: float) -> list[tuple[int, str]]:
        """Return (frame, audience) pairs to send now, in order; audience `ALL` or one device."""
        sends = [(index, device) for device, member in self._alone.items() for index in sorted(member.waiting)]
        for _, device in sends:
            self._alone[device].waiting.clear()
        for index in sorted(self._asked_at):
            if not all(member.ready(index) for member in self._group.values()):
                break
            sends.append((index, self._audience(index)))
            for member in self._group.values():
                if index in member.waiting:
                    member.waiting.remove(index)
                    member.served.add(index)
            del self._asked_at[index]
            if self._last_sent_at is not None:
                self._cycle_s = max(now - self._last_sent_at, self._cycle_s / 2)
            self._last_sent_at = now
        return sends

    def _audience(self, index: int) -> str:
        waiting = [device for device, member in self._group.items() if index in member.waiting]
        return waiting[0] if len(waiting) == 1 and len(self._group) > 1 else ALL

    def patience(self, now: float) -> float | None:
        """Return the seconds until somebody has waited too long; None while nobody waits."""
        if not self._asked_at:
            return None
        limit = max(self._patience_s, self._cycle_s / 2)
        return max(0.0, min(self._asked_at.values()) + limit - now)

    def laggards(self, now: float) -> list[str]:
        """Move the members that keep others waiting too long out of the group; return those to be told to leave.

        What they had asked for is forgotten: they ask anew when they have left.
        """
        if self.patience(now) != 0.0:
            return []
        index = min(self._asked_at)
        slow = [device for device, member in self._group.items() if not member.ready(index)]
        for device in slow:
            del self._group[device]
            self._alone[device] = _Member()
        self._forget_unwanted()
        return slow

    def _forget_unwanted(self) -> None:
        """Let nobody wait for, and nothing go out for, a frame that only leavers had asked for."""
        wanted = set().union(*(member.waiting for member in self._group.values()))
        self._asked_at = {index: since for index, since in self._asked_at.items() if index in wanted}

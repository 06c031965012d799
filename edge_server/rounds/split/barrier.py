"""Barrier of a split round: decides when a step is due.

Every device does the same steps, 1 to `steps`. A step is served when every awaited device has delivered, or a deadline
after the first delivery: a device that is missing then is absent and delays no later step. It is awaited again as soon
as it sends a message: it receives the open step's number, otherwise it would stay one step behind. A device that misses
that step too is not awaited until it has delivered. A device that restarts its session gets the same answers again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import TypeAlias

from edge_server.rounds.split.device_session import DeviceSession, Event
from shared.runtime.clock import remaining_s


class Reply(Enum):
    """Reply to an offer of features, other than the number of another step."""

    TAKE = "ask for its frames"
    AGAIN = "that step's gradient once more"
    NOTHING = "its answer comes with the step's"


Answer: TypeAlias = Reply | int
"""A number is the step to send: above the device's own, the steps between ran without it; below, it restarts there."""


@dataclass
class Barrier:
    """The steps of several devices.

    Attributes:
        deadline_s: Seconds after a step's first features at which it is served without absent devices.
        devices: Names of the participants.
        step: The open step; above `steps` when all are over.
        sessions: Session of each device. Only the barrier changes their states, to keep its sets of devices current: a
            scan of all sessions at each delivery would be quadratic in the fleet.
    """

    steps: int
    deadline_s: float
    devices: InitVar[Iterable[str]]
    step: int = 1
    sessions: dict[str, DeviceSession] = field(init=False)
    _since: float = 0.0
    _waited_for: set[str] = field(default_factory=set)
    _begun: set[str] = field(default_factory=set)  # features of the open step arrived, or were refused

    def __post_init__(self, devices: Iterable[str]) -> None:
        self.sessions = {device: DeviceSession(device) for device in devices}
        self._waited_for.update(self.sessions)

    @property
    def is_over(self) -> bool:
        """True after the last step."""
        return self.step > self.steps

    @property
    def missed(self) -> dict[str, int]:
        """Number of steps that ran without a device, by name in order."""
        return {name: session.missed for name, session in sorted(self.sessions.items()) if session.missed}

    @property
    def awaited_devices(self) -> set[str]:
        """Devices that the open step waits for."""
        return set(self._waited_for)

    def is_member(self, device: str) -> bool:
        """Return true if a device takes part and has not failed."""
        return device in self.sessions and self.sessions[device].is_alive

    def is_done(self, device: str) -> bool:
        """Return true if a device has finished all steps; only then can its update belong to this session."""
        return self.is_member(device) and self.sessions[device].step > self.steps

    def offer(self, device: str, step: int, features: bytes) -> Answer:
        """Return the reply to an offer. Offers may be repeated, late, or from an earlier session.

        Args:
            features: Digest of the offered features.
        """
        session = self.sessions[device]
        if step > session.step:
            return session.step  # from a session of an earlier process
        is_answered = session.answers.answers(step, features)
        if not (session.is_overdue or (is_answered and step == session.answers.last)):
            self._follow(session, "return")  # also while it catches up after a restart
        if is_answered:
            return Reply.AGAIN
        if step < self.step:
            return session.answers.next_served(step) or self._move_to_open_step(session)
        if session.state == "refused" or (session.state == "delivered" and session.delivered == features):
            return Reply.NOTHING
        self._follow(session, "offer")  # also after a restart since its delivery
        return Reply.TAKE

    def deliver(self, device: str, features: bytes, now: float) -> None:
        """Mark a device's features of the open step as usable.

        Args:
            now: Time of the barrier's clock, in seconds.
        """
        self._start_deadline(now)
        session = self.sessions[device]
        self._follow(session, "deliver")
        session.delivered = features

    def refuse(self, device: str, now: float) -> None:
        """Mark a device's features of the open step as unusable, delivered or not: the step runs without them."""
        self._start_deadline(now)
        self._follow(self.sessions[device], "refuse")

    def postpone(self, now: float) -> None:
        """Restart the deadline: no device could have delivered."""
        self._since = now

    def drop(self, device: str) -> None:
        """Remove a failed device for good."""
        if device in self.sessions:
            self.sessions[device].fail()
            self._update_sets(self.sessions[device])

    def remaining_s(self, now: float) -> float:
        """Return the seconds until the open step is due; 0 if it is, infinite before the first delivery."""
        if not self._begun:
            return math.inf
        return remaining_s(self._since + self.deadline_s, now) if self._waited_for else 0.0

    def serve(self) -> tuple[list[str], list[str]]:
        """Advance to the next step.

        Returns:
            The devices that take part in the step, possibly none, and those whose features of it were not used: these
            must be sent the next step's number.
        """
        alive = list(self._iterate_alive())
        served = sorted(session.device for session in alive if session.state == "delivered")
        in_vain = sorted(session.device for session in alive if session.state in {"offered", "refused"})
        for session in alive:
            session.close(self.step)
            self._update_sets(session)
        self.step += 1
        return served, in_vain

    def _move_to_open_step(self, session: DeviceSession) -> int:
        session.step = self.step
        return self.step

    def _iterate_alive(self) -> Iterator[DeviceSession]:
        return (session for session in self.sessions.values() if session.is_alive)

    def _follow(self, session: DeviceSession, event: Event) -> None:
        session.follow(event)
        self._update_sets(session)

    def _update_sets(self, session: DeviceSession) -> None:
        """Update the sets of awaited and begun devices after a state change."""
        (self._waited_for.add if session.is_waited_for else self._waited_for.discard)(session.device)
        (self._begun.add if session.state in {"delivered", "refused"} else self._begun.discard)(session.device)

    def _start_deadline(self, now: float) -> None:
        if not self._begun:
            self._since = now

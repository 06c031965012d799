"""Decide when a step of a split round is due, who is waited for, and what to answer to an offer. No bytes and no IO.

Every device does the same steps, 1 to `steps`. A step is served when each device that is in has delivered, or a while
after the first did: who is missing then is absent, and holds up no later step. It is in again as soon as it speaks: it
is told the open step and waited for there, or it would be a step behind the others for ever. Who lets that pass too is
not waited for any more until it has delivered. Who begins the session anew is answered as before, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import TypeAlias

from edge_server.rounds.split.device_session import DeviceSession, Event
from shared.runtime.clock import left_s


class Reply(Enum):
    """What to do about an offer of features, where it is not to be told another step."""

    TAKE = "ask for its frames"
    AGAIN = "that step's gradient once more"
    NOTHING = "its answer comes with the step's"


Answer: TypeAlias = Reply | int
"""A number is the step to tell: ahead of the device's own, all between went on without it; behind it, begin anew."""


@dataclass
class Barrier:
    """The steps of several devices.

    Attributes:
        steps: How many there are.
        deadline_s: Seconds after a step's first features at which it goes on with who has delivered.
        devices: Who takes part, by name.
        step: The one that is open; beyond `steps` when all are over.
        sessions: Where each device is, by its name. Only the barrier lets them follow events: it counts on from there,
            since a look at all of them for each device's features would grow with the square of the fleet.
    """

    steps: int
    deadline_s: float
    devices: InitVar[Iterable[str]]
    step: int = 1
    sessions: dict[str, DeviceSession] = field(init=False)
    _since: float = 0.0
    _waited_for: set[str] = field(default_factory=set)
    _begun: set[str] = field(default_factory=set)  # of the open step: features are here, or were refused

    def __post_init__(self, devices: Iterable[str]) -> None:
        """Expect every device at the first step."""
        self.sessions = {device: DeviceSession(device) for device in devices}
        self._waited_for.update(self.sessions)

    @property
    def is_over(self) -> bool:
        """Whether every step was served."""
        return self.step > self.steps

    @property
    def missed(self) -> dict[str, int]:
        """Steps that went on without a device, by its name in order."""
        return {name: one.missed for name, one in sorted(self.sessions.items()) if one.missed}

    @property
    def awaited(self) -> set[str]:
        """Who is waited for."""
        return set(self._waited_for)

    def is_member(self, device: str) -> bool:
        """Tell whether a device is of this session, and has not failed."""
        return device in self.sessions and self.sessions[device].is_alive

    def is_done(self, device: str) -> bool:
        """Tell whether nothing of the session is left to a device: only then can its update be one of this session."""
        return self.is_member(device) and self.sessions[device].step > self.steps

    def offer(self, device: str, step: int, features: bytes) -> Answer:
        """Return what to answer to an offer. Offers may come twice, late, and of a session before this one.

        Args:
            step: Which it is at.
            features: Digest of what it offers.
        """
        session = self.sessions[device]
        if step > session.step:
            return session.step  # of a session that this process has not served
        is_answered = session.answers.answers(step, features)
        if not (session.is_overdue or (is_answered and step == session.answers.last)):
            self._follow(session, "return")  # also on its way to the open step, which it begins anew
        if is_answered:
            return Reply.AGAIN
        if step < self.step:
            return session.answers.following(step) or self._let_go_on(session)
        if session.state == "refused" or (session.state == "delivered" and session.delivered == features):
            return Reply.NOTHING
        self._follow(session, "offer")  # also where it has begun anew since it delivered
        return Reply.TAKE

    def deliver(self, device: str, features: bytes, now: float) -> None:
        """Note that a device's features of the open step are here and can be used.

        Args:
            now: On the barrier's clock.
        """
        self._start_deadline(now)
        session = self.sessions[device]
        self._follow(session, "deliver")
        session.delivered = features

    def refuse(self, device: str, now: float) -> None:
        """Note that a device's features of the open step cannot be used, also if they are here: it goes on without."""
        self._start_deadline(now)
        self._follow(self.sessions[device], "refuse")

    def postpone(self, now: float) -> None:
        """Count the deadline from now on: nobody could have delivered."""
        self._since = now

    def drop(self, device: str) -> None:
        """Part for good with a device that has failed."""
        if device in self.sessions:
            self.sessions[device].fail()
            self._count(self.sessions[device])

    def left_s(self, now: float) -> float:
        """Return the seconds until the open step is due; 0 if it is, infinite while nothing says so."""
        if not self._begun:
            return math.inf
        return left_s(self._since + self.deadline_s, now) if self._waited_for else 0.0

    def serve(self) -> tuple[list[str], list[str]]:
        """Go on to the next step.

        Returns:
            Who takes part in the one that was open, perhaps nobody, and who had offered features of it in vain: these
            are to be told the next.
        """
        alive = list(self._alive())
        served = sorted(session.device for session in alive if session.state == "delivered")
        in_vain = sorted(session.device for session in alive if session.state in {"offered", "refused"})
        for session in alive:
            session.close(self.step)
            self._count(session)
        self.step += 1
        return served, in_vain

    def _let_go_on(self, session: DeviceSession) -> int:
        session.step = self.step
        return self.step

    def _alive(self) -> Iterator[DeviceSession]:
        return (session for session in self.sessions.values() if session.is_alive)

    def _follow(self, session: DeviceSession, event: Event) -> None:
        session.follow(event)
        self._count(session)

    def _count(self, session: DeviceSession) -> None:
        """Note where a session has gone."""
        (self._waited_for.add if session.is_waited_for else self._waited_for.discard)(session.device)
        (self._begun.add if session.state in {"delivered", "refused"} else self._begun.discard)(session.device)

    def _start_deadline(self, now: float) -> None:
        if not self._begun:
            self._since = now

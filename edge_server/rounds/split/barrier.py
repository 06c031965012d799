"""The barrier of a split round: who is in, who is absent, when a step is due, what to answer. Knows no bytes and no IO.

Every device does the same steps, 1 to `steps`. A step is served when each device that is in has delivered, or a while
after the first did: who lacks then is absent, and holds up no later step. It is in again as soon as it speaks: it is
told the open step and waited for there, or it would be a step behind the others for ever. Who lets that pass too is
not waited for any more until it has delivered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

PATIENCE = 2
"""Deadlines in a row that one device may cost the others."""
ROUNDING_S = 1e-6
"""What is left of a sum of floats could be less than any clock moves by, and would be waited for without end."""


class Word(Enum):
    """What to do about an offer of features, where it is not to be told another step."""

    TAKE = "ask for its frames"
    AGAIN = "its gradient once more"
    NOTHING = "its answer comes with the step's"


Answer: TypeAlias = Word | int
"""A number is the step to tell: ahead of the device's own, that one went on without it; behind it, begin anew."""


@dataclass
class _Place:
    """Where one device is.

    Attributes:
        step: The next step that it can offer, as far as is known here.
        answered: The last step of which it was given a gradient; 0 for none.
        features: Digest of what it had offered of that step.
        late: Deadlines in a row that it let pass.
    """

    step: int = 1
    answered: int = 0
    features: bytes = b""
    late: int = 0


@dataclass
class Barrier:
    """One session of several devices.

    Attributes:
        steps: How many there are.
        deadline_s: Seconds after a step's first features at which it goes on with who has delivered.
        step: The one that is open; beyond `steps` when all are over.
        delivered: Digests of the features of it that are here, by device.
        absent: Who is not waited for.
        missed: Steps that went on without a device.
    """

    steps: int
    deadline_s: float
    devices: Iterable[str]
    step: int = 1
    delivered: dict[str, bytes] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    missed: dict[str, int] = field(default_factory=dict)
    _offered: set[str] = field(default_factory=set)
    _refused: set[str] = field(default_factory=set)
    _since: float = 0.0
    _places: dict[str, _Place] = field(init=False)

    def __post_init__(self) -> None:
        """Expect every device at the first step."""
        self._places = {device: _Place() for device in self.devices}

    @property
    def over(self) -> bool:
        """Whether every step was served."""
        return self.step > self.steps

    def knows(self, device: str) -> bool:
        """Tell whether a device is of this session, and has not failed."""
        return device in self._places

    def done(self, device: str) -> bool:
        """Tell whether nothing of the session is left to a device: only then can its update be one of this session."""
        return device in self._places and self._places[device].step > self.steps

    def offer(self, device: str, step: int, features: bytes) -> Answer:
        """Return what to answer to an offer. Offers may come twice, late, and of a session before this one.

        Args:
            device: Whose.
            step: Which it is at.
            features: Digest of what it offers.
        """
        place = self._places[device]
        if step > place.step:
            return place.step  # of a session that this process has not served
        if step == place.answered and features == place.features:
            return Word.AGAIN
        if place.late < PATIENCE:
            self.absent.discard(device)
        if step < self.step:
            place.step = self.step
            return self.step
        if device in self._refused or self.delivered.get(device) == features:
            return Word.NOTHING
        self.delivered.pop(device, None)  # it has begun anew since
        self._offered.add(device)
        return Word.TAKE

    def deliver(self, device: str, features: bytes, now: float) -> None:
        """Note that a device's features of the open step are here and can be used."""
        self._begin(now)
        self.delivered[device] = features

    def refuse(self, device: str, now: float) -> None:
        """Note that a device's features of the open step cannot be used: it goes on without them."""
        self.delivered.pop(device, None)
        self._begin(now)
        self._refused.add(device)

    def postpone(self, now: float) -> None:
        """Count the deadline from now on: nobody could have delivered."""
        self._since = now

    def _begin(self, now: float) -> None:
        if not self.delivered and not self._refused:
            self._since = now

    def drop(self, device: str) -> None:
        """Part for good with a device that has failed."""
        self._places.pop(device, None)
        self.delivered.pop(device, None)
        for names in (self.absent, self._offered, self._refused):
            names.discard(device)

    @property
    def lacking(self) -> set[str]:
        """Who is waited for."""
        return self._places.keys() - self.absent - self.delivered.keys() - self._refused

    def left_s(self, now: float) -> float:
        """Return the seconds until the open step is due; 0 if it is, infinite while nothing says so."""
        if not self.delivered and not self._refused:
            return math.inf
        left_s = self._since + self.deadline_s - now
        return left_s if self.lacking and left_s > ROUNDING_S else 0.0

    def serve(self) -> tuple[list[str], list[str]]:
        """Go on to the next step.

        Returns:
            Who takes part in the one that was open, perhaps nobody, and who had offered features of it in vain: these
            are to be told the next.
        """
        served, in_vain = sorted(self.delivered), sorted(self._offered - self.delivered.keys())
        for device in self.lacking:
            self._places[device].late += 1
            self.absent.add(device)
        for device, place in self._places.items():
            if device in self.delivered:
                place.answered, place.features, place.step = self.step, self.delivered[device], self.step + 1
                place.late = 0
                self.absent.discard(device)
            else:
                self.missed[device] = self.missed.get(device, 0) + 1
        self.step += 1
        for device in in_vain:
            self._places[device].step = self.step
        self.delivered, self._offered, self._refused = {}, set(), set()
        return served, in_vain

"""Power sources that do as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import NoData
from shared.protocol.measurements import Provenance, Reading
from shared.runtime.clock import Clock, monotonic

PROVENANCE = Provenance(source="given", quality="measured", uncertainty=0.02)


@dataclass
class Given:
    """Watts as a function of time; counts its reads, fails or hangs when told to."""

    watts: Callable[[float], float] = lambda _: 4.0
    clock: Clock = monotonic
    kind: Literal["instant", "mean"] = "instant"
    period_s: float = 0.01
    cost_s: float = 0.0
    provenance: Provenance = PROVENANCE
    fails: bool = False
    reads: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.free.set()

    def read(self) -> Reading:
        self.reads += 1
        self.free.wait(20)
        if self.fails:
            raise NoData("it does not answer", lack="busy")
        at = self.clock()
        return Reading(value=self.watts(at), unit="watts", source="given", quality="measured", at=at)


@dataclass
class Hand:
    """A clock that somebody moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

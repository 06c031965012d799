"""Bound on feature size relative to the other devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from edge_server.rounds.aggregate import lower_median
from edge_server.rounds.split.barrier import Barrier
from edge_server.rounds.split.device_session import DeviceSession
from shared.runtime.executor import Worker, run_uninterrupted

MOST_SIZE = 5.0
"""Bound on a device's feature size, in multiples of the median: one step's features differ by less between devices, and
features 25 times as large from one device in four halved the accuracy. `round.most_norm` may be lower.
"""
COMPANY = 3
"""Least number of devices whose median no single one chooses."""


@dataclass
class SizeBound:
    """Finds oversized features in an open step.

    With fewer than three devices the median is one device's choice: then features must also exceed `most` times the
    usual size, so that a device with tiny features cannot get the others rejected.

    Attributes:
        measure_usual: Computes the size that the network produces on the server's examples.
        most: Bound on feature size, in multiples of the median; 0 for none.
    """

    barrier: Barrier
    worker: Worker
    measure_usual: Callable[[], float]
    most: float
    _usual: float | None = None

    async def find_oversized(self) -> list[tuple[DeviceSession, str]]:
        """Return the delivered sessions whose features are too large, with the reason."""
        median, large = self._compare_with_median()
        if large and self._usual is None and not self._has_robust_median():
            self._usual = await run_uninterrupted(self.worker(self.measure_usual))
            median, large = self._compare_with_median()  # offers may have arrived meanwhile
        least = 0.0 if self._has_robust_median() else self.most * (self._usual or 0.0)
        usual = f", and the usual {self._usual:.3g}" if least and self._usual else ""
        why = f"of {median:.3g}{usual} (at most {MOST_SIZE:g} and round.most_norm)"
        return [
            (session, f"features of size {session.size:.3g} are more than {self.most:g} times the step's median {why}")
            for session in large
            if session.size > least
        ]

    def _list_delivered(self) -> list[DeviceSession]:
        return [session for session in self.barrier.sessions.values() if session.state == "delivered"]

    def _has_robust_median(self) -> bool:
        return len(self._list_delivered()) >= COMPANY

    def _compare_with_median(self) -> tuple[float, list[DeviceSession]]:
        """Return the median feature size and the sessions that far exceed it."""
        delivered = self._list_delivered()
        median = lower_median([session.size for session in delivered])
        bound = self.most * median or math.inf
        return median, [session for session in delivered if session.size > bound]

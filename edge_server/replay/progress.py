"""Progress lines of a replay on standard error."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from edge_server.journal.records import AnyRecord, RoundClosed
from shared.runtime.clock import Clock, monotonic

EVERY_S = 5.0


@dataclass
class Progress:
    """Print a line every few seconds.

    Attributes:
        rounds: Total number of rounds.
        clock: Real time in seconds.
    """

    rounds: int
    out: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Clock = monotonic
    _started_at: float | None = None
    _printed_at: float = 0.0
    _updates: int = 0

    def tell(self, record: AnyRecord, virtual_s: float) -> None:
        """Count a record that was written at that virtual second, and print a line if one is due."""
        now = self.clock()
        if self._started_at is None:
            self._started_at = self._printed_at = now
        if not isinstance(record, RoundClosed):
            return
        self._updates += len(record.arrived)
        if now - self._printed_at >= EVERY_S:
            self._printed_at, rate = now, self._updates / (now - self._started_at)
            self.out.write(
                f"round {record.round}/{self.rounds}  {virtual_s:.0f} s of virtual time  {rate:.1f} device-rounds/s\n"
            )
            self.out.flush()

"""What the server's halves were asked for: how many requests, how fast, how many bytes, and why some were refused."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.protocol.inference.collaborative import TopTiming

RECENT = 512
"""Requests of which the seconds are kept."""
MEDIAN, TAIL = 0.5, 0.95


@dataclass
class TopFigures:
    """Since the process began.

    Attributes:
        requests: That were answered with outputs.
        bytes_in: Of their features, as payloads.
        bytes_out: Of their outputs, likewise.
        recent: Where the last ones' seconds went.
    """

    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    recent: deque[TopTiming] = field(default_factory=lambda: deque(maxlen=RECENT))
    _told: int = 0

    def served(self, timing: TopTiming, bytes_in: int, bytes_out: int) -> None:
        """Count a request.

        Args:
            timing: Where its seconds went.
        """
        self.requests += 1
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self.recent.append(timing)

    def line(self) -> str:
        """Return a line for the log; empty where nothing happened since the last one."""
        total = self.requests + self.refused.total()
        if total == self._told:
            return ""
        self._told = total
        waited = [timing.waited_s for timing in self.recent]
        compute = [timing.compute_s for timing in self.recent]
        seconds = [
            f"{name}_p50_s={quantile(values, MEDIAN):.4f} {name}_p95_s={quantile(values, TAIL):.4f}"
            for name, values in (("waited", waited), ("compute", compute))
            if values
        ]
        reasons = [f"refused_{reason}={count}" for reason, count in sorted(self.refused.items())]
        counts = f"requests={self.requests} bytes_in={self.bytes_in} bytes_out={self.bytes_out}"
        return " ".join([counts, *seconds, *reasons])


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which a share of values lies, one of them; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

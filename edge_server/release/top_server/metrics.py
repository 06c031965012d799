"""Metrics of the split inference service: requests, latency, bytes and refusals."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.protocol.inference.collaborative import TopTiming

RECENT = 512
"""Requests whose timing is kept for quantiles."""
MEDIAN, TAIL = 0.5, 0.95


@dataclass
class TopServerMetrics:
    """Counters since the process started.

    Attributes:
        requests: Requests answered with outputs.
        refused: Refused requests by reason.
        bytes_in: Encoded feature bytes of answered requests.
        bytes_out: Encoded output bytes of answered requests.
        recent: Timing of the last answered requests.
    """

    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    recent: deque[TopTiming] = field(default_factory=lambda: deque(maxlen=RECENT))
    _logged: int = 0

    def count_request(self, timing: TopTiming, bytes_in: int, bytes_out: int) -> None:
        """Count an answered request."""
        self.requests += 1
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self.recent.append(timing)

    def line(self) -> str:
        """Format the metrics as a log line; empty if nothing changed since the last line."""
        total = self.requests + self.refused.total()
        if total == self._logged:
            return ""
        self._logged = total
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
    """Return the empirical quantile at `share`, always one of the values; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

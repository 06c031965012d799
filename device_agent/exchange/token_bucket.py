"""Token bucket that paces frames to an upload rate.

A frame starts so that its last bit leaves when it would have left a link of that rate; the link's own transmission time
is subtracted where it is known. Tokens accumulate while the sender is busy, so the link's time does not reduce the
rate. After a pause only the last moment's tokens remain, and a new rate starts with none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BURST_S, MAX_CREDIT_S = 0.1, 5.0
"""Seconds of the rate that may be sent at once: after a pause, and on a link that could not keep up."""
MIN_BITS_PER_S = 1000.0
"""Lower rates are raised to this one, so that a frame ends within a reasonable time."""


@dataclass
class TokenBucket:
    """Rate limiter for frames; the caller passes the time.

    Attributes:
        bits_per_s: None for no limit.
        link_bits_per_s: Capacity of the link itself; infinite if unknown.
        tuned: Number of rate changes so far.
    """

    bits_per_s: float | None = None
    link_bits_per_s: float = math.inf
    tuned: int = 0
    _free_at: float = -math.inf
    _busy_until: float = -math.inf

    def tune(self, bits_per_s: float | None, share: float = 0.0) -> None:
        """Start again at another rate (None: no limit), which is `share` of the link's capacity (0: unknown)."""
        self.tuned += 1
        usable = bits_per_s is not None and math.isfinite(bits_per_s) and bits_per_s > 0
        self.bits_per_s = max(bits_per_s, MIN_BITS_PER_S) if bits_per_s is not None and usable else None
        self.link_bits_per_s = self.bits_per_s / share if self.bits_per_s and 0 < share <= 1 else math.inf
        self._free_at = self._busy_until = -math.inf

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before the next frame, of `size` bytes, may be sent."""
        if not self.bits_per_s:
            return 0.0
        if self._busy_until == -math.inf:
            self._free_at = self._busy_until = now
        silence_s = max(0.0, now - self._busy_until - BURST_S)
        start = max(self._free_at + silence_s, now - MAX_CREDIT_S)
        self._free_at = start + 8 * size / self.bits_per_s
        return max(0.0, self._free_at - 8 * size / self.link_bits_per_s - now)

    def note_sent(self, now: float) -> None:
        """Record the end of a frame."""
        self._busy_until = now

"""A token bucket: when the next frame may go, so that a sender keeps to a rate that it was given.

A frame goes so that its last bit leaves when it would have left a link of that rate: earlier by what the link itself
takes for it, where that is known. Tokens gather while the sender is busy, so that the link, which takes its time too,
costs none of the rate; of a silence, only those of its last moment are kept, and another rate begins with none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BURST_S, MOST_CREDIT_S = 0.1, 5.0
"""Seconds of the rate that may go at once: after a silence, and on a link that could not keep up."""


@dataclass
class Bucket:
    """Paces what passes. Takes its time as input.

    Attributes:
        bits_per_s: The rate; None for no limit.
        link_bits_per_s: What the link itself carries; infinite where nobody knows.
    """

    bits_per_s: float | None = None
    link_bits_per_s: float = math.inf
    _free_at: float = -math.inf
    _busy_until: float = -math.inf

    def tune(self, bits_per_s: float | None, share: float = 0.0) -> None:
        """Begin anew at another rate, which is that share of the link's, 0 for nobody knows; no rate is no limit."""
        usable = bits_per_s is not None and math.isfinite(bits_per_s) and bits_per_s > 0
        self.bits_per_s = bits_per_s if usable else None
        self.link_bits_per_s = bits_per_s / share if bits_per_s and usable and 0 < share <= 1 else math.inf
        self._free_at = self._busy_until = -math.inf

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before a frame of `size` bytes, which is next, may go."""
        if not self.bits_per_s:
            return 0.0
        if self._busy_until == -math.inf:
            self._free_at = self._busy_until = now
        silence_s = max(0.0, now - self._busy_until - BURST_S)
        start = max(self._free_at + silence_s, now - MOST_CREDIT_S)
        self._free_at = start + 8 * size / self.bits_per_s
        return max(0.0, self._free_at - 8 * size / self.link_bits_per_s - now)

    def gone(self, now: float) -> None:
        """Note that a frame has gone."""
        self._busy_until = now

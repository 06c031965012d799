"""Rate limit on journal records per device: a slowly refilled token bucket."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from shared.runtime.token_bucket import TokenBucket

log = logging.getLogger(__name__)

BURST, WORDS_PER_S = 600.0, 0.5
"""Burst of records per device, and records per second: at most 10 MB a day."""


@dataclass
class RecordLimiter:
    """Token bucket of each device; a device that exceeds its own is logged once.

    Attributes:
        burst: Records that a device may cause at once.
        per_s: Records per second after that.
        what: Name of the destination, for the log.
    """

    burst: float = BURST
    per_s: float = WORDS_PER_S
    what: str = "a run's journal"
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _limited: set[str] = field(default_factory=set)

    def take(self, device: str, at: float) -> bool:
        """Return true, and charge it, if a device may cause a record now."""
        bucket = self._buckets.setdefault(device, TokenBucket(self.burst, self.per_s, self.burst, at))
        is_allowed = bucket.take(1, at)
        if not is_allowed and device not in self._limited:
            self._limited.add(device)
            log.warning("device %s exceeds the record limit of %s; some records are dropped", device, self.what)
        return is_allowed

"""Token-bucket rate limits of the enrolment service, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket

BURST, PER_S = 20.0, 0.5
"""Lets so many boards behind one router join at once; guessing 128 bits is hopeless at any such rate."""
RENEWALS, RENEWALS_PER_S = 20.0, 1 / 60
"""Per device: each renewal stores a certificate and rewrites the account."""
MOST_SOURCES = 4096


class RateLimit:
    """Token bucket for each source; a source that is dropped for lack of room starts with a full burst again.

    Args:
        clock: Monotonic clock in seconds.
        per_s: Attempts per second beyond the burst.

    Attributes:
        attempts: Attempts left for each source; the latest source is last.
    """

    def __init__(self, clock: Clock, burst: float = BURST, per_s: float = PER_S) -> None:
        self._clock, self._burst, self._per_s = clock, burst, per_s
        self.attempts: OrderedDict[str, TokenBucket] = OrderedDict()

    def wait_s(self, source: str) -> float:
        """Count an attempt; return 0 if it may be answered, otherwise the seconds until the next may.

        Args:
            source: IP address, of which an IPv6 /64 counts as one, or device name.
        """
        group, now = source_group(source), self._clock()
        bucket = self.attempts.setdefault(group, TokenBucket(self._burst, self._per_s, self._burst, now))
        self.attempts.move_to_end(group)
        if len(self.attempts) > MOST_SOURCES:
            self.attempts.popitem(last=False)
        return 0.0 if bucket.take(1.0, now) else (1.0 - bucket.tokens) / self._per_s

    def give_back(self, source: str) -> None:
        """Undo a counted attempt."""
        if bucket := self.attempts.get(source_group(source)):
            bucket.give(1.0)


def source_group(source: str) -> str:
    """Return the source that an address counts as: an IPv4 address, an IPv6 /64, or a device's name."""
    try:
        address = ip_address(source.partition("%")[0])
    except ValueError:
        return source
    if not isinstance(address, IPv6Address):
        return source
    return str(address.ipv4_mapped) if address.ipv4_mapped else address.packed[:8].hex()

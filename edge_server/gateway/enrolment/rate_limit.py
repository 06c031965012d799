"""Token-bucket rate limits of the enrolment service, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from shared.runtime.clock import Clock

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
        attempts: Attempts left for each source and the time of that count; the latest source is last.
    """

    def __init__(self, clock: Clock, burst: float = BURST, per_s: float = PER_S) -> None:
        self._clock, self._burst, self._per_s = clock, burst, per_s
        self.attempts: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, source: str) -> float:
        """Count an attempt; return 0 if it may be answered, otherwise the seconds until the next may.

        Args:
            source: IP address, of which an IPv6 /64 counts as one, or device name.
        """
        group, now = source_group(source), self._clock()
        attempts, at = self.attempts.pop(group, (self._burst, now))
        attempts = min(self._burst, attempts + (now - at) * self._per_s)
        may = attempts >= 1.0
        self.attempts[group] = (attempts - 1.0 if may else attempts, now)
        if len(self.attempts) > MOST_SOURCES:
            self.attempts.popitem(last=False)
        return 0.0 if may else (1.0 - attempts) / self._per_s

    def give_back(self, source: str) -> None:
        """Undo a counted attempt."""
        group = source_group(source)
        if entry := self.attempts.get(group):
            self.attempts[group] = (min(self._burst, entry[0] + 1.0), entry[1])


def source_group(source: str) -> str:
    """Return the source that an address counts as: an IPv4 address, an IPv6 /64, or a device's name."""
    try:
        address = ip_address(source.partition("%")[0])
    except ValueError:
        return source
    if not isinstance(address, IPv6Address):
        return source
    return str(address.ipv4_mapped) if address.ipv4_mapped else address.packed[:8].hex()

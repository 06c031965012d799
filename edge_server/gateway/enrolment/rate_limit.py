"""Token buckets of the enrolment service, by address or by device, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from shared.runtime.clock import Clock

BURST, PER_S = 20.0, 0.5
"""So many boards behind one router may join at once; a guesser of 128 bits gets nowhere at any such rate."""
RENEWALS, RENEWALS_PER_S = 20.0, 1 / 60
"""Of one device: each is a certificate on record, and rewrites the account."""
MOST_SOURCES = 4096


class RateLimit:
    """Attempts of each source; one that is forgotten for want of room has its full burst again.

    Args:
        clock: Monotonic seconds.
        per_s: Attempts a second after that.

    Attributes:
        left: Attempts that each source has, and when that was so; the one that asked last is last.
    """

    def __init__(self, clock: Clock, burst: float = BURST, per_s: float = PER_S) -> None:
        self._clock, self._burst, self._per_s = clock, burst, per_s
        self.left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, source: str) -> float:
        """Count an attempt; return 0 if it may be answered, else the seconds until the next may.

        Args:
            source: The address, of IPv6 the network of one site is one source; or a device.
        """
        group, now = group_of(source), self._clock()
        left, at = self.left.pop(group, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_s)
        may = left >= 1.0
        self.left[group] = (left - 1.0 if may else left, now)
        if len(self.left) > MOST_SOURCES:
            self.left.popitem(last=False)
        return 0.0 if may else (1.0 - left) / self._per_s

    def give_back(self, source: str) -> None:
        """Forget an attempt that was granted."""
        group = group_of(source)
        if found := self.left.get(group):
            self.left[group] = (min(self._burst, found[0] + 1.0), found[1])


def group_of(source: str) -> str:
    """Return who is one source: an address of IPv4, the network of one site (/64) of IPv6, or a device by its name."""
    try:
        address = ip_address(source.partition("%")[0])
    except ValueError:
        return source
    if not isinstance(address, IPv6Address):
        return source
    return str(address.ipv4_mapped) if address.ipv4_mapped else address.packed[:8].hex()

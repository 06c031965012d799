"""How often one address may ask the enrolment service: a token bucket an address, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address

from shared.runtime.clock import Clock

BURST, PER_S = 20.0, 0.5
"""So many boards behind one router may join at once; a guesser of 128 bits gets nowhere at any such rate."""
MOST_SOURCES = 4096


class RateLimit:
    """Attempts of each address; one that is forgotten for want of room has its full burst again.

    Args:
        clock: Monotonic seconds.

    Attributes:
        left: Attempts that each source has, and when that was so; the one that asked last is last.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, source: str) -> float:
        """Count an attempt; return 0 if it may be answered, else the seconds until the next may.

        Args:
            source: The address; of IPv6 the network of one site is one source.
        """
        group, now = _group(source), self._clock()
        left, at = self.left.pop(group, (BURST, now))
        left = min(BURST, left + (now - at) * PER_S)
        may = left >= 1.0
        self.left[group] = (left - 1.0 if may else left, now)
        if len(self.left) > MOST_SOURCES:
            self.left.popitem(last=False)
        return 0.0 if may else (1.0 - left) / PER_S

    def give_back(self, source: str) -> None:
        """Forget an attempt that was granted."""
        group = _group(source)
        if found := self.left.get(group):
            self.left[group] = (min(BURST, found[0] + 1.0), found[1])


def _group(source: str) -> str:
    try:
        address = ip_address(source.partition("%")[0])
    except ValueError:
        return source
    if not isinstance(address, IPv6Address):
        return source
    return str(address.ipv4_mapped) if address.ipv4_mapped else address.packed[:8].hex()

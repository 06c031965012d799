"""Fair connection limiter: evicts from the address that holds the most slots.

When all slots are occupied, a newcomer evicts the oldest connection of a source that has at least two more slots than
it; if no source has, the oldest connection that has had its turn. So no source, greedy or slow, blocks others for
longer than a turn, and none loses a slot early to one that has as many. A source whose last connection ended without an
answer (`StalledSources`) is evicted at once by one whose did not, so that many addresses that stall repeatedly block
nobody for long.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge_server.gateway.enrolment.rate_limit import MOST_SOURCES, source_group
from shared.runtime.clock import Clock, monotonic

STALLED_MEMORY_S = 60.0
"""A stalled source is treated like any other after this time."""
GREEDY_SURPLUS = 2
"""A source with so many slots more than the newcomer loses one before its turn is over."""


@dataclass
class StalledSources:
    """Sources whose last connection ended without an answer, remembered for a minute in bounded memory.

    Attributes:
        clock: Monotonic clock in seconds.
        since_s: Time of the last such connection of each source, the latest last.
    """

    clock: Clock = monotonic
    since_s: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def add(self, source: str) -> None:
        """Add a source whose connection ended without an answer."""
        self.since_s.pop(source_group(source), None)
        self.since_s[source_group(source)] = self.clock()
        if len(self.since_s) > MOST_SOURCES:
            self.since_s.popitem(last=False)

    def forget(self, source: str) -> None:
        """Remove a source that was answered."""
        self.since_s.pop(source_group(source), None)

    def __contains__(self, group: str) -> bool:
        return self.clock() - self.since_s.get(group, -math.inf) < STALLED_MEMORY_S


@dataclass(eq=False)
class Slot:
    """An occupied slot.

    Attributes:
        source: Holder: an IPv4 address or an IPv6 network.
        since_s: Start, monotonic clock in seconds.
        evict: Ends the holder's connection.
        is_protected: The work in progress does not depend on the holder, so evicting it would gain nothing.
    """

    source: str
    address: str
    since_s: float
    evict: Callable[[], None]
    is_protected: bool = False


@dataclass
class FairSlots:
    """A limited number of slots and their holders.

    Attributes:
        most: Number of slots in all.
        most_each: Limit for one source.
        turn_s: Seconds for which a source without more slots than others keeps one.
        clock: Monotonic clock in seconds.
        stalled: Sources that stalled recently.
    """

    most: int
    most_each: int
    turn_s: float
    clock: Clock = monotonic
    slots: list[Slot] = field(default_factory=list)
    stalled: StalledSources = field(default_factory=StalledSources)

    @property
    def by_source(self) -> Counter[str]:
        """Number of slots of each source that has any."""
        return Counter(slot.source for slot in self.slots)

    def acquire(self, source: str, evict: Callable[[], None]) -> Slot | None:
        """Return a slot, evicting another holder if needed; None if none may be evicted.

        Args:
            evict: Called if this slot is taken away later, when it no longer counts.
        """
        counts, address, source = self.by_source, source, source_group(source)
        if counts[source] >= self.most_each:
            return None
        if len(self.slots) >= self.most:
            evicted = self._find_displaced(source, counts)
            if evicted is None:
                return None
            self.release(evicted)
            evicted.evict()
        slot = Slot(source, address, self.clock(), evict)
        self.slots.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back; does nothing for one that was taken away."""
        if slot in self.slots:
            self.slots.remove(slot)

    def _find_displaced(self, source: str, counts: Counter[str]) -> Slot | None:
        """Return the slot to take away for a source."""
        count, idle = counts[source], [slot for slot in self.slots if not slot.is_protected]
        if source not in self.stalled and (slow := [slot for slot in idle if slot.source in self.stalled]):
            return slow[0]
        if greedy := [slot for slot in idle if counts[slot.source] >= count + GREEDY_SURPLUS]:
            return min(greedy, key=lambda slot: -counts[slot.source])  # of several the first, which is the oldest
        begun = self.clock() - self.turn_s
        return next((slot for slot in idle if slot.since_s <= begun and counts[slot.source] > count), None)


@contextmanager
def protect_slot(slot: Slot) -> Iterator[None]:
    """Keep a slot from being taken away during the block."""
    slot.is_protected = True
    try:
        yield
    finally:
        slot.is_protected = False

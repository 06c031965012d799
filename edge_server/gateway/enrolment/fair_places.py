"""Places that are few, shared among addresses: who comes when all are taken gets that of whoever has the most.

A board that asks for one thing is let in beside whoever asks for all: the source that has at least two more loses its
oldest; and where all have as few, the oldest of all that had its turn. So nobody, greedy or slow, keeps others out for
longer than a turn, and nobody loses a place before that to who has as many. A source that held a place and came to no
end, however soon it hung up (`Dawdlers`), loses its next one at once to one that did not: many addresses that do so
again and again keep nobody out once each has done so.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge_server.gateway.enrolment.rate_limit import MOST_SOURCES, group_of
from shared.runtime.clock import Clock, monotonic

FORGOTTEN_S = 60.0
"""After which a source that came to no end is as any other."""
GREEDY = 2
"""So many places more has a source that loses one before its turn is over."""


@dataclass
class Dawdlers:
    """Sources whose last connection ended without an answer, for a minute and in bounded memory.

    Attributes:
        clock: Monotonic clock in seconds.
        since_s: Second of the last such connection of each source, the latest last.
    """

    clock: Clock = monotonic
    since_s: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def add(self, source: str) -> None:
        """Add a source whose connection ended without an answer."""
        self.since_s.pop(group_of(source), None)
        self.since_s[group_of(source)] = self.clock()
        if len(self.since_s) > MOST_SOURCES:
            self.since_s.popitem(last=False)

    def forget(self, source: str) -> None:
        """Remove a source that was answered."""
        self.since_s.pop(group_of(source), None)

    def __contains__(self, group: str) -> bool:
        return self.clock() - self.since_s.get(group, -math.inf) < FORGOTTEN_S


@dataclass(eq=False)
class TakenPlace:
    """A place that is taken.

    Attributes:
        source: By whom: an address, of IPv6 a network.
        since_s: Monotonic seconds.
        leave: Has whoever has it go.
        is_busy: Whether it is not for its holder to end what is done there, so that nobody gains by taking it.
    """

    source: str
    address: str
    since_s: float
    leave: Callable[[], None]
    is_busy: bool = False


@dataclass
class FairPlaces:
    """Places, and who has them.

    Attributes:
        most: How many there are.
        most_each: Of these for one address.
        turn_s: Seconds for which a place is kept whoever comes, by who has no more than others.
        clock: Monotonic seconds.
        dawdlers: Who came to no end lately.
    """

    most: int
    most_each: int
    turn_s: float
    clock: Clock = monotonic
    taken: list[TakenPlace] = field(default_factory=list)
    dawdlers: Dawdlers = field(default_factory=Dawdlers)

    @property
    def by_source(self) -> Counter[str]:
        """Places that each address has; of who has none nothing."""
        return Counter(one.source for one in self.taken)

    def take(self, source: str, leave: Callable[[], None]) -> TakenPlace | None:
        """Return a place, perhaps one that somebody had to leave; None where there is none.

        Args:
            source: The address that asks.
            leave: Is called if it has to leave; what it held counts no more from then on.
        """
        counts, address, source = self.by_source, source, group_of(source)
        if counts[source] >= self.most_each:
            return None
        if len(self.taken) >= self.most:
            gone = self._find_displaced(source, counts)
            if gone is None:
                return None
            self.free(gone)
            gone.leave()
        place = TakenPlace(source, address, self.clock(), leave)
        self.taken.append(place)
        return place

    def free(self, place: TakenPlace) -> None:
        """Give a place back; one that was taken from its holder is not counted twice."""
        if place in self.taken:
            self.taken.remove(place)

    def _find_displaced(self, source: str, counts: Counter[str]) -> TakenPlace | None:
        """Return the place that somebody gets."""
        own, idle = counts[source], [one for one in self.taken if not one.is_busy]
        if source not in self.dawdlers and (slow := [one for one in idle if one.source in self.dawdlers]):
            return slow[0]
        if greedy := [one for one in idle if counts[one.source] >= own + GREEDY]:
            return min(greedy, key=lambda one: -counts[one.source])  # of several the first, which is the oldest
        begun = self.clock() - self.turn_s
        return next((one for one in idle if one.since_s <= begun and counts[one.source] > own), None)


@contextmanager
def busy(place: TakenPlace) -> Iterator[None]:
    """Let nobody have a place while the block lasts."""
    place.is_busy = True
    try:
        yield
    finally:
        place.is_busy = False

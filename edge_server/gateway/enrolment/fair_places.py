"""Places that are few, shared among addresses: who comes when all are taken gets that of whoever has the most.

A board that asks for one thing is let in beside whoever asks for all: the source that has at least two more loses its
oldest; and where all have as few, the oldest of all that had its turn. So nobody, greedy or slow, keeps others out for
longer than a turn, and nobody loses a place before that to who has as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.runtime.clock import Clock, monotonic

GREEDY = 2
"""So many places more has a source that loses one before its turn is over."""


@dataclass(eq=False)
class TakenPlace:
    """A place that is taken.

    Attributes:
        source: By which address.
        since_s: Monotonic seconds.
        leave: Has whoever has it go.
        is_busy: Whether it is not for its holder to end what is done there, so that nobody gains by taking it.
    """

    source: str
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
        taken: The oldest first.
    """

    most: int
    most_each: int
    turn_s: float
    clock: Clock = monotonic
    taken: list[TakenPlace] = field(default_factory=list)

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
        counts = self.by_source
        if counts[source] >= self.most_each:
            return None
        if len(self.taken) >= self.most:
            gone = self._find_displaced(counts[source], counts)
            if gone is None:
                return None
            self.free(gone)
            gone.leave()
        place = TakenPlace(source, self.clock(), leave)
        self.taken.append(place)
        return place

    def free(self, place: TakenPlace) -> None:
        """Give a place back; one that was taken from its holder is not counted twice."""
        if place in self.taken:
            self.taken.remove(place)

    def _find_displaced(self, own: int, counts: Counter[str]) -> TakenPlace | None:
        """Return the place that somebody gets who has so many."""
        idle = [one for one in self.taken if not one.is_busy]
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

"""What became of every update, round and model of a run that was disturbed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from edge_server.journal.records import AnyRecord, RoundOpened, UpdateAccepted, closed_rounds, valid
from edge_server.trial.chaos.log_reader import LogLine
from shared.tensors.tree import State


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or several together.

    Attributes:
        run: Its name.
        updates: Updates that were asked for.
        accepted: Updates that count.
        counted_twice: Updates that count more than once; must be 0.
        duplicates: Offers refused because that update had been settled before.
        retrained: Trainings begun again because their trainer died.
        trained_twice: Trainings begun again although it did not; must be 0.
        rounds_lost: Rounds of the plan that gave no model; must be 0.
        difference: Largest absolute difference of a parameter of the final model; must be 0.
    """

    run: str
    updates: int
    accepted: int
    counted_twice: int
    duplicates: int
    retrained: int
    trained_twice: int
    rounds_lost: int
    difference: float

    @property
    def holds(self) -> bool:
        """Tell whether nothing was lost and nothing was done or counted twice."""
        lost = self.updates - self.accepted, self.counted_twice, self.trained_twice, self.rounds_lost
        return not any(lost) and self.difference == 0.0


def account(
    run: str, records: Sequence[AnyRecord], said: Sequence[LogLine], *, rounds: int, final: State, expected: State
) -> Account:
    """Return what became of a run.

    Args:
        run: Its name.
        records: Its journal.
        said: What all processes said, in order for each.
        rounds: How many it was to have; the devices' evaluation of the final model counts as none.
        final: The state it ended with.
        expected: The state an undisturbed run ends with.
    """
    kept = [one for one in valid(records) if not isinstance(one, RoundOpened | UpdateAccepted) or one.round <= rounds]
    counted = Counter((one.round, one.device) for one in kept if isinstance(one, UpdateAccepted))
    retrained, twice = trainings(said, run)
    return Account(
        run=run,
        updates=sum(len(one.assignments) for one in kept if isinstance(one, RoundOpened)),
        accepted=len(counted),
        counted_twice=sum(times - 1 for times in counted.values()),
        duplicates=sum(one.facts.get("run") == run for one in said if one.phase in ("duplicate", "late")),
        retrained=retrained,
        trained_twice=twice,
        rounds_lost=rounds - sum(one.outcome == "aggregated" for one in closed_rounds(records)),
        difference=difference(final, expected),
    )


def trainings(said: Iterable[LogLine], run: str) -> tuple[int, int]:
    """Return how often a training of a run was begun again because its trainer died, and how often for less.

    A trainer died of a training where the next one of its device begins (`importing`) before that was committed or
    failed.
    """
    under_way: dict[str, tuple[str, str]] = {}
    died: dict[tuple[str, str], bool] = {}
    retrained = twice = 0
    for one in said:
        if one.by == "trainer" and one.phase == "training" and one.facts["run"] == run:
            key = under_way[one.name] = one.name, one.facts["round"]
            retrained += died.get(key) is True
            twice += died.get(key) is False
            died[key] = False
        elif one.by == "trainer" and one.phase in ("committed", "failed"):
            under_way.pop(one.name, None)
        elif one.by == "trainer" and one.phase == "importing" and one.name in under_way:
            died[under_way.pop(one.name)] = True
    return retrained, twice


def difference(one: State, other: State) -> float:
    """Return the largest absolute difference of two states' leaves; infinite where they cannot be compared."""
    if {key: leaf.shape for key, leaf in one.tree.items()} != {key: leaf.shape for key, leaf in other.tree.items()}:
        return math.inf
    apart = [float((leaf.double() - other.tree[key].double()).abs().max()) for key, leaf in one.tree.items()]
    return max((math.inf if math.isnan(each) else each for each in apart), default=math.inf)

"""Which accuracy is a run's own: of the aggregated model or, where devices use models of their own, of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RunOpened, closed_rounds, valid
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from shared.registry import build


class Accuracies(TypedDict):
    """Of one round, by name in `RoundDigest`."""

    accuracy: float | None
    global_accuracy: float | None
    fleet_accuracy: float | None


def is_personal(records: Iterable[AnyRecord]) -> bool:
    """Tell whether the devices of a run use models of their own."""
    for record in records:
        if isinstance(record, Evaluated) and record.personal:
            return True
        if isinstance(record, RunOpened):
            try:
                return build(ALGORITHMS, record.plan.algorithm, "algorithm").serves is not None
            except ConfigError:  # of another version
                continue
    return False


def evaluated(records: Iterable[AnyRecord]) -> dict[int, Evaluated]:
    """Return what all devices measured, by the round after which they did; old journals do not say."""
    return {one.round: one for one in valid(records) if isinstance(one, Evaluated) and one.round is not None}


def last(records: Iterable[AnyRecord]) -> Evaluated:
    """Return what all devices measured last; nothing where they did not."""
    found = [one for one in valid(records) if isinstance(one, Evaluated)]
    return found[-1] if found else Evaluated(accuracy=None, by_device={})


def of_rounds(records: Sequence[AnyRecord]) -> Callable[[RoundClosed], Accuracies]:
    """Return what tells a round's accuracies; where the server tests nothing, the devices' data stand for its own."""
    tried, personal = evaluated(records), is_personal(records)
    by_fleet = personal or all(one.accuracy is None for one in closed_rounds(records))

    def of_round(end: RoundClosed) -> Accuracies:
        fleet = tried[end.round].accuracy if end.round in tried else None
        return {
            "accuracy": fleet if by_fleet else end.accuracy,
            "global_accuracy": end.accuracy if personal else None,
            "fleet_accuracy": fleet,
        }

    return of_round

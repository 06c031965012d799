"""A run's valid records by kind, read from its journal when needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from edge_server.journal.compared import devices_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.costs import RoundCosts, costs_by_round
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Gossiped,
    RoundClosed,
    RoundOpened,
    RunOpened,
    ServerBegan,
    UpdateAccepted,
    first,
    select,
    valid_records,
)
from edge_server.journal.run_clock import RunClock
from shared.errors import ConfigError
from shared.protocol.measurements import Cost

R = TypeVar("R")
# Round to microseconds: a clock's zero is arbitrary, so further digits carry no information.
DIGITS = 6


class Timed(NamedTuple, Generic[R]):
    """A record with its second of the run; None if that is unknown."""

    record: R
    at_s: float | None


class RunRecord:
    """Valid records of a run by kind; a kind is read when it is first asked for."""

    def __init__(self, records: Sequence[AnyRecord]) -> None:
        """Index a journal.

        Raises:
            ConfigError: The journal has no `RunOpened` record.
        """
        opening = first(records, RunOpened)
        if opening is None:
            raise ConfigError("the run's journal holds no beginning: nothing was recorded, or its first record is lost")
        self.records, self.opening = records, opening

    def with_seconds(self, *kinds: type[R]) -> Iterator[Timed[R]]:
        """Yield the valid records of some types with their seconds of the run."""
        clock = RunClock()
        records: Iterator[Any] = valid_records(self.records, ServerBegan, *kinds)
        for record in records:
            second = clock.take(record)
            if isinstance(record, kinds):
                yield Timed(record, None if second is None else round(second, DIGITS))

    @cached_property
    def rounds(self) -> dict[int, Timed[RoundOpened]]:
        """Openings of rounds by number."""
        return {timed.record.round: timed for timed in self.with_seconds(RoundOpened)}

    @cached_property
    def round_ends(self) -> dict[int, Timed[RoundClosed]]:
        """Ends of rounds by number, in order."""
        return {timed.record.round: timed for timed in self.with_seconds(RoundClosed)}

    @cached_property
    def updates(self) -> dict[tuple[int, str], Timed[UpdateAccepted]]:
        """Updates by round and device."""
        return {(timed.record.round, timed.record.device): timed for timed in self.with_seconds(UpdateAccepted)}

    @cached_property
    def final_costs(self) -> dict[tuple[int, str], Cost]:
        """Costs of tasks by round and device, reported after their upload."""
        costs = valid_records(self.records, CostSettled)
        return {(settled.round, settled.device): settled.cost for settled in costs}

    def last_of(self, kind: type[R]) -> R | None:
        """Return the last record of a type; None if there is none."""
        return next(iter([*select(self.records, kind)][-1:]), None)

    @property
    def metric(self) -> ComparedMetric:
        """Metric by which its models are compared."""
        return self.opening.compared or ACCURACY

    @cached_property
    def gossips(self) -> dict[int, Gossiped]:
        """Gossips by round; of one repeated after a restart, the last."""
        return {gossip.round: gossip for gossip in select(self.records, Gossiped)}

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The fleet's evaluations, in order."""
        return list(valid_records(self.records, Evaluated))

    @property
    def last_evaluation(self) -> Evaluated:
        """The fleet's last evaluation; an empty one if there is none."""
        return self.evaluations[-1] if self.evaluations else Evaluated(accuracy=None, by_device={})

    @property
    def ends(self) -> Iterator[RoundClosed]:
        """Ends of valid rounds, in order."""
        return valid_records(self.records, RoundClosed)

    def fleet_value(self, number: int) -> float | None:
        """Return the compared metric of the fleet's last evaluation after a round."""
        after = (evaluation for evaluation in reversed(self.evaluations) if evaluation.round == number)
        return next((devices_value(evaluation, self.metric) for evaluation in after), None)

    @cached_property
    def costs(self) -> RoundCosts:
        """Plausible costs of tasks by round and device, the final ones where they are known."""
        return costs_by_round(self.records)

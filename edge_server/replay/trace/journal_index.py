"""Index of a run's valid journal records by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Joined,
    Left,
    Measured,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Sensed,
    ServerBegan,
    UpdateAccepted,
    first,
    valid_records,
)
from edge_server.journal.run_clock import timed_records
from edge_server.replay.trace.header import End, Process, Rewind
from shared.errors import ConfigError
from shared.protocol.measurements import Cost

# Round to microseconds: a clock's zero is arbitrary, so further digits carry no information.
DIGITS = 6


@dataclass
class IndexedJournal:
    """Valid records of a run by kind, with their seconds of the run."""

    run_opened: RunOpened
    rounds: dict[int, tuple[RoundOpened, float | None]] = field(default_factory=dict)
    closed: dict[int, tuple[RoundClosed, float | None]] = field(default_factory=dict)
    accepted: dict[tuple[int, str], tuple[UpdateAccepted, float | None]] = field(default_factory=dict)
    settled_costs: dict[tuple[int, str], Cost] = field(default_factory=dict)
    measured: Measured | None = None
    evaluated: list[Evaluated] = field(default_factory=list)
    sensed: list[tuple[Sensed, float]] = field(default_factory=list)
    presence: list[tuple[Joined | Left, float]] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    rewound: list[Rewind] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: End | None = None

    def take(self, record: AnyRecord, second: float | None) -> None:  # noqa: C901 - one case per record type
        """Add one record."""
        match record:
            case RoundOpened():
                self.rounds[record.round] = record, second
            case RoundClosed():
                self.closed[record.round] = record, second
            case UpdateAccepted():
                self.accepted[record.round, record.device] = record, second
            case CostSettled():
                self.settled_costs[record.round, record.device] = record.cost
            case Sensed() if second is not None:
                self.sensed.append((record, second))
            case Joined() | Left() if second is not None:
                self.presence.append((record, second))
            case Measured():
                self.measured = record
            case Evaluated():
                self.evaluated.append(record)
            case _:
                self._add_other(record)

    def _add_other(self, record: AnyRecord) -> None:
        match record:
            case ServerBegan():
                utc_s = None if record.utc_s is None else round(record.utc_s, DIGITS)
                self.processes.append(Process(run_s=round(record.run_s, DIGITS), utc_s=utc_s, versions=record.versions))
            case Rewound() if not record.missed:
                self.rewound.append(Rewind(round=record.round, cause=record.cause))
            case Noted():
                self.notes.append(record.what)
            case RunClosed():
                self.ended = End(outcome=record.outcome, cause=record.cause)
            case _:
                pass

    def working_spans(self) -> dict[str, list[tuple[float, float, int]]]:
        """Return (start, end, round) of every device's work: from the round's opening to its update or close."""
        spans: dict[str, list[tuple[float, float, int]]] = {}
        for number, (round_opened, opened_s) in sorted(self.rounds.items()):
            closed_s = self.closed[number][1] if number in self.closed else None
            for device in round_opened.assignments:
                arrived_s = self.accepted.get((number, device), (None, None))[1]
                end_s = min((moment for moment in (arrived_s, closed_s) if moment is not None), default=float("inf"))
                if opened_s is not None:
                    spans.setdefault(device, []).append((opened_s, end_s, number))
        return spans


def index_journal(records: Sequence[AnyRecord]) -> IndexedJournal:
    """Index the valid records of a journal.

    Raises:
        ConfigError: The journal lacks the start of the run.
    """
    run_opened = first(records, RunOpened)
    if run_opened is None:
        raise ConfigError("the journal lacks the start of a run; export it after the run has started")
    journal = IndexedJournal(run_opened)
    for record, second in timed_records(valid_records(records)):
        journal.take(record, None if second is None else round(second, DIGITS))
    return journal

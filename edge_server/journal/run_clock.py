"""Run clock: seconds of a run, continued over server restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from edge_server.journal.records import AnyRecord, RoundOpened, ServerBegan

FAR_S = 30 * 86_400.0
"""A larger jump of the calendar between two processes means it was set: boards and gateways may boot in 1970."""


def server_began(
    records: Iterable[AnyRecord], *, at: float, utc_s: float | None = None, versions: dict[str, str] | None = None
) -> ServerBegan:
    """Return the record of a server process that begins now.

    The first process begins at second 0 of its run. A later one begins as long after its predecessor as the calendar
    says, but never before the last recorded moment; if the calendar is implausible or missing, exactly at that moment.

    Args:
        at: Now, on the process's clock.
        utc_s: Now, in calendar seconds.
    """
    earlier, last_s = None, 0.0
    for record, second in timed_records(records):
        last_s = max(last_s, second or 0.0)
        if isinstance(record, ServerBegan):
            earlier = record
    run_s = max(last_s, (_by_calendar(earlier, utc_s) if earlier else None) or 0.0)
    return ServerBegan(at=at, run_s=run_s, utc_s=utc_s, versions=versions or {})


def _by_calendar(earlier: ServerBegan, utc_s: float | None) -> float | None:
    """Return the second of the run at a calendar moment; None if implausible or missing."""
    if earlier.utc_s is None or utc_s is None or not 0 <= utc_s - earlier.utc_s <= FAR_S:
        return None
    return earlier.run_s + utc_s - earlier.utc_s


class Elapsed(NamedTuple):
    """Elapsed seconds, and whether they are exact; if not, they are a lower bound.

    At most `away_s` of them had no server: from the last recorded moment to the beginning of the next process.
    """

    seconds: float
    is_known: bool
    away_s: float = 0.0


def elapsed_since(records: Iterable[AnyRecord], opening: RoundOpened, now: float) -> Elapsed:
    """Return the time since a round was opened, over all server processes.

    Args:
        records: The run's journal; its last process is the current one.
        now: On the clock of that process.
    """
    processes, opened_s, is_known = list[ServerBegan](), None, True
    last_s = away_s = 0.0
    for record, second in timed_records(records):
        if isinstance(record, ServerBegan):
            away_s += record.run_s - last_s if opened_s is not None else 0.0
            told_s = _by_calendar(processes[-1], record.utc_s) if processes else None
            is_known &= opened_s is None or told_s == record.run_s
            processes.append(record)
        elif isinstance(record, RoundOpened) and record.round == opening.round:
            opened_s, is_known, away_s = second, True, 0.0
        last_s = max(last_s, second or 0.0)
    if opened_s is None or not processes:
        return Elapsed(0.0, is_known=False)
    return Elapsed(processes[-1].run_s + now - processes[-1].at - opened_s, is_known, away_s)


@dataclass
class RunClock:
    """Converts the times of consecutive records to seconds of the run.

    Nothing is known before the first `ServerBegan`, which only old journals lack.

    Attributes:
        last_s: Latest second so far.
        is_known: Whether the downtime before the newest process is known.
    """

    last_s: float | None = None
    is_known: bool = True
    _process: ServerBegan | None = None

    def take(self, record: AnyRecord) -> float | None:
        """Return the second of the run of the next record; None if it has no time."""
        if isinstance(record, ServerBegan):
            told_s = _by_calendar(self._process, record.utc_s) if self._process else record.run_s
            self._process, self.is_known = record, told_s == record.run_s
        at: float | None = getattr(record, "at", None)
        if self._process is None or at is None:
            return None
        second = self._process.run_s + (at - self._process.at)
        self.last_s = second if self.last_s is None else max(self.last_s, second)
        return second


def timed_records(records: Iterable[AnyRecord]) -> Iterator[tuple[AnyRecord, float | None]]:
    """Yield every record with its second of the run; None if it has no time."""
    clock = RunClock()
    for record in records:
        yield record, clock.take(record)

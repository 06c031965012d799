"""Rows for the readings, facts and presence that a server observed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from edge_server.journal.records import Joined, Left, Sensed
from edge_server.replay.trace.schema import Fact, Presence, Sample, unit_of
from shared.protocol.measurements import Provenance

# Name of the fact that holds a board's profile id.
BOARD = "board"


def sample_rows(sensed: Iterable[tuple[Sensed, float]]) -> Iterator[Sample]:
    """Yield a row for every reading, with its latest reported source and quality."""
    last_sources: dict[tuple[str, str], Provenance] = {}
    for record, second in _skip_duplicates(sensed):
        for name, value in sorted(record.readings.items()):
            if name in record.provenance:
                last_sources[record.device, name] = record.provenance[name]
            provenance = last_sources.get((record.device, name), Provenance(source="", quality="measured"))
            yield Sample(
                at_s=second,
                device=record.device,
                name=name,
                value=value,
                unit=unit_of(name),
                age_s=record.ages.get(name),
                quality=provenance.quality,
                source=provenance.source,
            )


def fact_rows(sensed: Iterable[tuple[Sensed, float]]) -> Iterator[Fact]:
    """Yield a row for every reported fact."""
    for record, second in _skip_duplicates(sensed):
        texts = {**record.facts, **({BOARD: record.board} if record.board else {})}
        for name, value in sorted(texts.items()):
            yield Fact(at_s=second, device=record.device, name=name, value=value)


def _skip_duplicates(sensed: Iterable[tuple[Sensed, float]]) -> Iterator[tuple[Sensed, float]]:
    """Skip records of the same device and microsecond as the one before."""
    last: dict[str, float] = {}
    for record, second in sensed:
        if last.get(record.device) != second:
            last[record.device] = second
            yield record, second


def presence_rows(
    events: Iterable[tuple[Joined | Left, float]], spans: Mapping[str, Sequence[tuple[float, float, int]]]
) -> Iterator[Presence]:
    """Yield a row for every change of presence.

    Args:
        events: Records and their seconds of the run.
        spans: Working spans by device; leaving within one interrupts that round's task.
    """
    before: set[Presence] = set()
    for record, second in events:
        is_birth = isinstance(record, Joined)
        at_work = [number for begin, end, number in spans.get(record.device, ()) if begin <= second < end]
        row = Presence(
            at_s=second,
            device=record.device,
            event="joined" if is_birth else "left",
            cause=record.cause,
            interrupts=at_work[-1] if at_work and not (is_birth and record.cause == "connected") else None,
            version=record.version if isinstance(record, Joined) else "",
        )
        if row not in before:
            yield row
        before = {row_ for row_ in before if row_.at_s == second} | {row}

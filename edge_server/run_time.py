"""Seconds of a run, joined over the server processes that had it: a run goes on over restarts, a clock does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edge_server.store.base import AnyRecord
from edge_server.store.observed import ServerBegan

FAR_S = 30 * 86_400.0
"""A calendar that moved by more between two processes was set meanwhile: boards and gateways may boot in 1970."""


def began(
    records: Iterable[AnyRecord], *, at: float, utc_s: float | None = None, versions: dict[str, str] | None = None
) -> ServerBegan:
    """Return the record of a process that begins now.

    A first process begins at second 0 of its run. A later one begins as long after the one before it as the calendar
    says, but never before the last moment that is recorded; where the calendar cannot be true (or there is none),
    right at that moment.

    Args:
        records: The run's journal so far.
        at: Now, on the process's clock.
        utc_s: Now, in calendar seconds.
        versions: Of what computes.
    """
    earlier, last_s = None, 0.0
    for record, second in timed(records):
        last_s = max(last_s, second or 0.0)
        if isinstance(record, ServerBegan):
            earlier = record
    run_s = last_s
    if earlier and earlier.utc_s is not None and utc_s is not None and 0 <= utc_s - earlier.utc_s <= FAR_S:
        run_s = max(last_s, earlier.run_s + utc_s - earlier.utc_s)
    return ServerBegan(at=at, run_s=run_s, utc_s=utc_s, versions=versions or {})


def timed(records: Iterable[AnyRecord]) -> Iterator[tuple[AnyRecord, float | None]]:
    """Yield every record with the second of the run at which it happened; None where it does not say when.

    Before the first process has said what its clock shows, which only an old journal does, nothing is known.
    """
    process: ServerBegan | None = None
    for record in records:
        if isinstance(record, ServerBegan):
            process = record
        at: float | None = getattr(record, "at", None)
        yield record, None if process is None or at is None else process.run_s + (at - process.at)

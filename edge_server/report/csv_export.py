"""A digest as one long table: a figure a line, with all that is known of it."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from edge_server.report.digest import (
    NONE,
    Amount,
    DeviceDigest,
    Digest,
    Joules,
    Moved,
    RoundDigest,
    Seconds,
    TaskDigest,
    fleet_figures,
)
from edge_server.report.targets import comparison

UNITS = {"seconds": "s", "joules": "J", "bytes": "B"}
RARE = ("exchange", "statistics")
"""Parts that only a split session has."""
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


class Line(NamedTuple):
    """A figure of a run (no round, no device), of a round, of a device, or of a device's task in a round.

    Attributes:
        figure: Its name, with a dot before the part of a split, such as `joules.compute`.
        value: In `unit`; empty where nobody knows it.
        whole: `yes`; `no` where the value is a lower bound, or not known.
        quality: `measured`, `corrected` or `modelled`; empty where nobody said.
        clock: Of seconds: `wall` or `virtual`.
    """

    run: str
    round: int | str
    device: str
    figure: str
    value: float | int | str
    unit: str = ""
    whole: str = "yes"
    quality: str = ""
    clock: str = ""


def csv_of(runs: Sequence[Digest], targets: Sequence[float] = (), more: Iterable[Line] = ()) -> str:
    """Return the runs' figures and what they took to each accuracy as CSV, a figure a line below a header.

    Args:
        more: Lines of what several runs came to together.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Line._fields)
    writer.writerows([_safe(cell) for cell in line] for run in runs for line in lines(run))
    writer.writerows([_safe(cell) for cell in line] for line in _targets(runs, targets))
    writer.writerows([_safe(cell) for cell in line] for line in more)
    return text.getvalue()


def _safe(cell: float | str) -> float | str:
    """Return a cell that no spreadsheet computes: texts come from devices."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(DANGEROUS) else cell


def lines(run: Digest) -> Iterator[Line]:
    """Yield all figures of a run."""
    for name, text in (("algorithm", run.plan.algorithm.name), ("outcome", run.outcome), ("cause", run.cause)):
        yield Line(run.run, "", "", name, text)
    yield _figure(run, "", "", "device_accuracy", run.device_accuracy)
    for one in run.rounds:
        yield from _round(run, one)
    for device in run.devices:
        yield from _device(run, device)
    for task in run.tasks:
        yield from _task(run, task)


def _targets(runs: Sequence[Digest], targets: Sequence[float]) -> Iterator[Line]:
    for run, one in zip(itertools.cycle(runs), comparison(runs, targets), strict=False):
        name = f"to_{one.target:g}"
        yield _figure(run, "", "", f"rounds.{name}", one.round)
        for kind in ("seconds", "joules", "bytes"):
            yield _amount(run, "", "", f"{kind}.{name}", getattr(one, kind))


def _round(run: Digest, one: RoundDigest) -> Iterator[Line]:
    yield Line(run.run, one.round, "", "outcome", one.outcome)
    for name in ("online", "selected", "arrived", "late", "failed"):
        yield _figure(run, one.round, "", name, getattr(one, name))
    for name in ("accuracy", "test_loss", "loss", "device_accuracy", *fleet_figures([run])):
        yield _figure(run, one.round, "", name, getattr(one, name))
    for label, share in enumerate(one.class_accuracy):
        yield _figure(run, one.round, "", f"class_accuracy.{label}", share)
    for name, value in one.terms.items():
        yield _figure(run, one.round, "", f"terms.{name}", value)
    yield _amount(run, one.round, "", "seconds", Amount(value=one.seconds))
    for name in ("joules", "bytes_up", "bytes_down"):
        yield _amount(run, one.round, "", name, getattr(one, name))
    yield from _exchange(run, one.round, "", one)
    for name in ("seconds", "joules", "bytes"):
        yield _amount(run, one.round, "", f"{name}.until", getattr(one.until, name))


def _device(run: Digest, one: DeviceDigest) -> Iterator[Line]:
    for name in ("board", "version"):
        yield Line(run.run, "", one.device, name, getattr(one, name), whole=_yes(bool(getattr(one, name))))
    for name in ("went_away", "selected", "arrived", "late", "failed", "accuracy"):
        yield _figure(run, "", one.device, name, getattr(one, name))
    for name, value in one.most.items():
        yield Line(run.run, "", one.device, f"most.{name}", value)
    yield _amount(run, "", one.device, "seconds.rounds", Amount(value=one.rounds_s))
    yield from _splits(run, "", one)


def _task(run: Digest, one: TaskDigest) -> Iterator[Line]:
    yield Line(run.run, one.round, one.device, "arrival", one.arrival)
    if one.cause:
        yield Line(run.run, one.round, one.device, "cause", one.cause)
    yield _figure(run, one.round, one.device, "examples", one.examples)
    yield _figure(run, one.round, one.device, "loss", one.loss)
    for name, value in one.told.items():
        yield Line(run.run, one.round, one.device, f"told.{name}", value)
    yield from _splits(run, one.round, one)


def _splits(run: Digest, number: int | str, one: TaskDigest | DeviceDigest) -> Iterator[Line]:
    splits: tuple[tuple[str, Seconds | Joules], ...] = (("seconds", one.seconds), ("joules", one.joules))
    for name, split in splits:
        for part in split.__struct_fields__:
            if getattr(split, part) != NONE or part not in RARE or (part == "exchange" and run.split):
                yield _amount(run, number, one.device, f"{name}.{part}", getattr(split, part))
    for name in ("bytes_up", "bytes_down"):
        yield _amount(run, number, one.device, name, getattr(one, name))
    yield from _exchange(run, number, one.device, one)


def _exchange(run: Digest, number: int | str, device: str, one: Moved) -> Iterator[Line]:
    """Yield what split sessions moved apart from the model."""
    for name in sorted({*run.traffic} - {"bytes_up", "bytes_down"}):
        yield _amount(run, number, device, name, getattr(one, name))


def _figure(run: Digest, number: int | str, device: str, name: str, value: float | None) -> Line:
    return Line(run.run, number, device, name, "" if value is None else value, whole=_yes(value is not None))


def _amount(run: Digest, number: int | str, device: str, name: str, one: Amount) -> Line:
    kind = "bytes" if name.endswith("_bytes") else name.partition(".")[0].partition("_")[0]
    value: float | str = "" if one.value is None else round(one.value) if kind == "bytes" else one.value
    clock = ("wall" if run.live else "virtual") if kind == "seconds" else ""
    known = _yes(one.whole and one.value is not None)
    return Line(run.run, number, device, name, value, UNITS[kind], known, one.quality or "", clock)


def _yes(condition: object) -> str:
    return "yes" if condition else "no"

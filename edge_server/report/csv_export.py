"""CSV export of a digest: one value per line, with unit, quality and clock."""

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
    RoundDigest,
    Scope,
    Seconds,
    TaskDigest,
    Traffic,
    known_fleet_scopes,
)
from edge_server.report.targets import costs_to_targets

UNITS = {"seconds": "s", "joules": "J", "bytes": "B"}
RARE = ("exchange", "statistics")
"""Parts that only a split session has."""
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell as a formula."""


class Line(NamedTuple):
    """A value of a run (no round, no device), of a round, of a device, or of a device's task in a round.

    Attributes:
        figure: Its name; parts of a split follow a dot, such as `joules.compute`.
        value: In `unit`; empty if unknown.
        whole: `yes`; `no` if the value is a lower bound or unknown.
        quality: `measured`, `corrected` or `modelled`; empty if not reported.
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


def render_csv(runs: Sequence[Digest], targets: Sequence[float] = (), more: Iterable[Line] = ()) -> str:
    """Return the runs' values and their costs to each target as CSV with a header.

    Args:
        more: Lines about several runs together.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Line._fields)
    writer.writerows([_safe(cell) for cell in line] for run in runs for line in csv_lines(run))
    writer.writerows([_safe(cell) for cell in line] for line in _targets(runs, targets))
    writer.writerows([_safe(cell) for cell in line] for line in more)
    return text.getvalue()


def _safe(cell: float | str) -> float | str:
    """Return a cell that no spreadsheet evaluates; texts come from devices."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(DANGEROUS) else cell


def csv_lines(run: Digest) -> Iterator[Line]:
    """Yield all values of a run."""
    for name, text in (("algorithm", run.plan.algorithm.name), ("outcome", run.outcome), ("cause", run.cause)):
        yield Line(run.run, "", "", name, text)
    yield _figure(run, "", "", f"device_{run.metric.name}", run.on_devices)
    for round_ in run.rounds:
        yield from _round(run, round_)
    for device in run.devices:
        yield from _device(run, device)
    for task in run.tasks:
        yield from _task(run, task)


def _targets(runs: Sequence[Digest], targets: Sequence[float]) -> Iterator[Line]:
    for run, cost in zip(itertools.cycle(runs), costs_to_targets(runs, targets), strict=False):
        name = f"to_{cost.target:g}"
        yield _figure(run, "", "", f"rounds.{name}", cost.round)
        for kind in ("seconds", "joules", "bytes"):
            yield _amount(run, "", "", f"{kind}.{name}", getattr(cost, kind))


def _round(run: Digest, round_: RoundDigest) -> Iterator[Line]:
    yield Line(run.run, round_.round, "", "outcome", round_.outcome)
    for name in ("online", "selected", "arrived", "late", "failed"):
        yield _figure(run, round_.round, "", name, getattr(round_, name))
    yield from _metrics(run, round_)
    for label, share in enumerate(round_.class_accuracy):
        yield _figure(run, round_.round, "", f"class_accuracy.{label}", share)
    for name, value in round_.terms.items():
        yield _figure(run, round_.round, "", f"terms.{name}", value)
    yield _amount(run, round_.round, "", "seconds", Amount(value=round_.seconds))
    for name in ("joules", "bytes_up", "bytes_down"):
        yield _amount(run, round_.round, "", name, getattr(round_, name))
    yield from _exchange(run, round_.round, "", round_)
    for name in ("seconds", "joules", "bytes"):
        yield _amount(run, round_.round, "", f"{name}.until", getattr(round_.until, name))


def _metrics(run: Digest, round_: RoundDigest) -> Iterator[Line]:
    metric = run.metric.name
    scopes: list[Scope] = ["device", *known_fleet_scopes([run])]
    figures = {metric: round_.metric_value()} | (round_.metrics or {})
    figures |= {"test_loss": round_.test_loss, "loss": round_.loss}
    figures |= {f"{scope}_{metric}": round_.metric_value(scope) for scope in scopes}
    for name, value in figures.items():
        yield _figure(run, round_.round, "", name, value)


def _device(run: Digest, device: DeviceDigest) -> Iterator[Line]:
    for name in ("board", "version"):
        yield Line(run.run, "", device.device, name, getattr(device, name), whole=_yes(bool(getattr(device, name))))
    for name in ("went_away", "selected", "arrived", "late", "failed"):
        yield _figure(run, "", device.device, name, getattr(device, name))
    yield _figure(run, "", device.device, run.metric.name, device.metric_value)
    for name, value in device.most.items():
        yield Line(run.run, "", device.device, f"most.{name}", value)
    yield _amount(run, "", device.device, "seconds.rounds", Amount(value=device.rounds_s))
    yield from _splits(run, "", device)


def _task(run: Digest, task: TaskDigest) -> Iterator[Line]:
    yield Line(run.run, task.round, task.device, "arrival", task.arrival)
    if task.cause:
        yield Line(run.run, task.round, task.device, "cause", task.cause)
    yield _figure(run, task.round, task.device, "examples", task.examples)
    yield _figure(run, task.round, task.device, "loss", task.loss)
    for name, value in task.told.items():
        yield Line(run.run, task.round, task.device, f"told.{name}", value)
    yield from _splits(run, task.round, task)


def _splits(run: Digest, number: int | str, entry: TaskDigest | DeviceDigest) -> Iterator[Line]:
    splits: tuple[tuple[str, Seconds | Joules], ...] = (("seconds", entry.seconds), ("joules", entry.joules))
    for name, split in splits:
        for part in split.__struct_fields__:
            if getattr(split, part) != NONE or part not in RARE or (part == "exchange" and run.split):
                yield _amount(run, number, entry.device, f"{name}.{part}", getattr(split, part))
    for name in ("bytes_up", "bytes_down"):
        yield _amount(run, number, entry.device, name, getattr(entry, name))
    yield from _exchange(run, number, entry.device, entry)


def _exchange(run: Digest, number: int | str, device: str, traffic: Traffic) -> Iterator[Line]:
    for name in sorted({*run.traffic} - {"bytes_up", "bytes_down"}):
        yield _amount(run, number, device, name, getattr(traffic, name))


def _figure(run: Digest, number: int | str, device: str, name: str, value: float | None) -> Line:
    return Line(run.run, number, device, name, "" if value is None else value, whole=_yes(value is not None))


def _amount(run: Digest, number: int | str, device: str, name: str, amount: Amount) -> Line:
    kind = "bytes" if name.endswith("_bytes") else name.partition(".")[0].partition("_")[0]
    value: float | str = "" if amount.value is None else round(amount.value) if kind == "bytes" else amount.value
    clock = ("wall" if run.live else "virtual") if kind == "seconds" else ""
    complete = _yes(amount.whole and amount.value is not None)
    return Line(run.run, number, device, name, value, UNITS[kind], complete, amount.quality or "", clock)


def _yes(condition: object) -> str:
    return "yes" if condition else "no"

"""CSV export of a digest: one value per line, with unit, quality and clock."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from edge_server.record.amounts import NONE, Amount
from edge_server.report.digest import (
    DeviceDigest,
    Digest,
    RoundDigest,
    Scope,
    TaskDigest,
    Traffic,
    known_fleet_scopes,
)
from edge_server.report.sites.digest import MixingDigest, SiteDigest, SitesDigest
from edge_server.report.targets import costs_to_targets

UNITS = {"seconds": "s", "joules": "J", "bytes": "B"}
RARE = ("exchange", "statistics")
"""Parts that only a split session has."""
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell as a formula."""

Value: TypeAlias = Amount | float | str | None
"""Value of a line; None if it is unknown."""
Figures: TypeAlias = Iterator[tuple[str, Value]]


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


class _Writable:
    """A file that returns the text of each line instead of keeping it."""

    def write(self, text: str) -> str:
        return text


def csv_text(runs: Sequence[Digest], targets: Sequence[float] = (), sites: Iterable[SitesDigest] = ()) -> Iterator[str]:
    """Yield a CSV file's lines: the header, the runs' values, their costs to each target, the values of sites."""
    writer = csv.writer(_Writable(), lineterminator="\n")
    site_lines = itertools.chain.from_iterable(map(csv_site_lines, sites))
    lines = itertools.chain(*map(csv_lines, runs), _target_lines(runs, targets), site_lines)
    for line in itertools.chain([Line._fields], lines):
        yield writer.writerow(map(_escape_formula, line))


def _escape_formula(cell: float | str) -> float | str:
    """Return a cell that no spreadsheet evaluates; texts come from devices."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(DANGEROUS) else cell


def csv_lines(run: Digest) -> Iterator[Line]:
    """Yield all values of a run."""
    figures = {"algorithm": run.plan.algorithm.name, "outcome": run.outcome, "cause": run.cause}
    yield from _lines(run, "", "", iter((figures | {f"device_{run.metric.name}": run.metric_value("device")}).items()))
    for round_ in run.rounds:
        yield from _lines(run, round_.round, "", _round_figures(run, round_))
    for device in run.devices:
        yield from _lines(run, "", device.device, _device_figures(run, device))
    for task in run.tasks:
        yield from _lines(run, task.round, task.device, _task_figures(run, task))


def _lines(run: Digest, number: int | str, device: str, figures: Figures) -> Iterator[Line]:
    return (make_line(run.run, number, device, name, value, live=run.live) for name, value in figures)


def make_line(run: str, number: int | str, device: str, name: str, value: Value, *, live: bool) -> Line:
    """Return the line of a value; the kind of an amount is in its name."""
    if not isinstance(value, Amount):
        return Line(run, number, device, name, *(("", "", "no") if value is None else (value,)))
    kind = "bytes" if name.endswith(("_bytes", ".bytes")) else name.partition(".")[0].partition("_")[0]
    number_text: float | str = "" if value.value is None else round(value.value) if kind == "bytes" else value.value
    complete = "yes" if value.whole and value.value is not None else "no"
    clock = ("wall" if live else "virtual") if kind == "seconds" else ""
    return Line(run, number, device, name, number_text, UNITS[kind], complete, value.quality or "", clock)


def _target_lines(runs: Sequence[Digest], targets: Sequence[float]) -> Iterator[Line]:
    for run, cost in zip(itertools.cycle(runs), costs_to_targets(runs, targets), strict=False):
        figures = {"rounds": cost.round, "seconds": cost.seconds, "joules": cost.joules, "bytes": cost.bytes}
        yield from _lines(run, "", "", ((f"{kind}.to_{cost.target:g}", value) for kind, value in figures.items()))


def _round_figures(run: Digest, round_: RoundDigest) -> Figures:
    for name in ("outcome", "online", "selected", "arrived", "late", "failed"):
        yield name, getattr(round_, name)
    metric = run.metric.name
    scopes: list[Scope] = ["device", *known_fleet_scopes([run])]
    metrics = {metric: round_.metric_value()} | (round_.metrics or {})
    metrics |= {"test_loss": round_.test_loss, "loss": round_.loss}
    yield from (metrics | {f"{scope}_{metric}": round_.metric_value(scope) for scope in scopes}).items()
    yield from ((f"class_accuracy.{label}", share) for label, share in enumerate(round_.class_accuracy))
    yield from ((f"terms.{name}", value) for name, value in round_.terms.items())
    yield "seconds", Amount(value=round_.seconds)
    yield "joules", round_.joules
    yield from _traffic_figures(run, round_)
    yield from ((f"{name}.until", getattr(round_.until, name)) for name in UNITS)


def _device_figures(run: Digest, device: DeviceDigest) -> Figures:
    yield "board", device.board or None
    yield "version", device.version or None
    for name in ("went_away", "selected", "arrived", "late", "failed"):
        yield name, getattr(device, name)
    yield run.metric.name, device.metric_value()
    yield from ((f"most.{name}", value) for name, value in device.most.items())
    yield "seconds.rounds", Amount(value=device.rounds_s)
    yield from _cost_figures(run, device)


def _task_figures(run: Digest, task: TaskDigest) -> Figures:
    yield "arrival", task.arrival
    if task.cause:
        yield "cause", task.cause
    yield "examples", task.examples
    yield "loss", task.loss
    yield from ((f"told.{name}", value) for name, value in task.told.items())
    yield from _cost_figures(run, task)


def _cost_figures(run: Digest, entry: TaskDigest | DeviceDigest) -> Figures:
    for kind, split in (("seconds", entry.seconds), ("joules", entry.joules)):
        for part in split.__struct_fields__:
            amount = getattr(split, part)
            if amount != NONE or part not in RARE or (part == "exchange" and run.split):
                yield f"{kind}.{part}", amount
    yield from _traffic_figures(run, entry)


def _traffic_figures(run: Digest, traffic: Traffic) -> Figures:
    model = ("bytes_up", "bytes_down")
    return ((name, getattr(traffic, name)) for name in (*model, *sorted({*run.traffic} - {*model})))


def csv_site_lines(digest: SitesDigest) -> Iterator[Line]:
    """Yield all values of the sites of a plan."""
    runs = {site.site: site.run for site in digest.sites}

    def lines(run: str, number: int | str, figures: Figures) -> Iterator[Line]:
        return (make_line(run, number, "", name, value, live=digest.live) for name, value in figures)

    yield from lines(digest.name, "", iter([("zeta", digest.zeta)]))
    for site in digest.sites:
        yield from lines(site.run, "", _site_figures(site))
    for mixing in digest.mixings:
        yield from lines(digest.name, mixing.round, _mixing_figures(digest, mixing))
        for name, seconds in mixing.seconds.items():
            yield from lines(runs[name], mixing.round, iter([("seconds.gossip", Amount(value=seconds))]))
        yield from lines(digest.name, mixing.round, (("edge.off", edge) for edge in mixing.off))
    for edge in digest.edges:
        figures: dict[str, Value] = {"on": edge.on, "off": edge.off, "bytes": Amount(value=edge.bytes)}
        prefix = f"edge.{edge.one}-{edge.other}"
        yield from lines(digest.name, "", ((f"{prefix}.{name}", value) for name, value in figures.items()))
    for stretch in digest.coordinated:
        text = f"{stretch.coordinator}, term {stretch.term}, rounds {stretch.first} to {stretch.last}"
        yield from lines(digest.name, "", iter([("coordinated", f"{text}, for {' '.join(stretch.sites)}")]))
    for name, spread in ((name, spread) for name, spreads in digest.given.items() for spread in spreads):
        parts = ("least", "median", "most")
        values = ((f"given.{name}.{part}", getattr(spread, part)) for part in parts)
        yield from lines(runs[spread.site], spread.round, values)


def _site_figures(site: SiteDigest) -> Figures:
    yield "site", site.site
    yield "joules.spent", site.joules
    if site.share_joules is not None:
        yield "joules.allowed", Amount(value=site.share_joules + site.moved_joules)
    yield "seconds.gossip", Amount(value=site.gossip_s)
    yield "seconds.transfer", Amount(value=site.transfer_s)
    yield "bytes.gossip_up", Amount(value=site.bytes_up)
    yield "bytes.gossip_down", Amount(value=site.bytes_down)
    yield "decided_for_others", site.decided


def _mixing_figures(digest: SitesDigest, mixing: MixingDigest) -> Figures:
    yield f"{digest.metric.name}.mean", mixing.mean
    yield "disagreement.before", mixing.before
    yield "disagreement.after", mixing.after
    yield "disagreement.mean_moved", mixing.moved
    yield "seconds.whole", Amount(value=mixing.whole_s)
    yield "joules.whole", mixing.whole_joules
    for kind, allowed in (("seconds", mixing.allowed_s), ("joules", mixing.allowed_joules)):
        if allowed is not None:
            yield f"{kind}.allowed", Amount(value=allowed)

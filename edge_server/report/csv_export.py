"""CSV export of a digest: one value per line, with unit, quality and clock."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
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
    lines = partial(_make_lines, run.run, run.clock)
    figures = {"algorithm": run.plan.algorithm.name, "outcome": run.outcome, "cause": run.cause}
    yield from lines((figures | {f"device_{run.metric.name}": run.metric_value("device")}).items())
    for round_ in run.rounds:
        yield from lines(_round_figures(run, round_), round_.round)
    traffic, split = run.traffic, run.split
    for device in run.devices:
        yield from lines(_device_figures(run, device), device=device.device)
    for task in run.tasks:
        yield from lines(_task_figures(task, traffic, split=split), task.round, task.device)


def _make_lines(
    run: str, clock: str, figures: Iterable[tuple[str, Value]], number: int | str = "", device: str = ""
) -> Iterator[Line]:
    """Yield a line of each value; the kind of an amount is in its name."""
    for name, value in figures:
        if isinstance(value, Amount):
            kind = "bytes" if name.endswith(("_bytes", ".bytes")) else name.partition(".")[0].partition("_")[0]
            complete = "yes" if value.whole and value.value is not None else "no"
            cell: float | str = "" if value.value is None else round(value.value) if kind == "bytes" else value.value
            quality, seconds_clock = value.quality or "", clock if kind == "seconds" else ""
            yield Line(run, number, device, name, cell, UNITS[kind], complete, quality, seconds_clock)
        elif value is None:
            yield Line(run, number, device, name, "", "", "no")
        else:
            yield Line(run, number, device, name, value)


def _target_lines(runs: Sequence[Digest], targets: Sequence[float]) -> Iterator[Line]:
    for run, cost in zip(itertools.cycle(runs), costs_to_targets(runs, targets), strict=False):
        figures = {"rounds": cost.round, "seconds": cost.seconds, "joules": cost.joules, "bytes": cost.bytes}
        yield from _make_lines(
            run.run, run.clock, ((f"{kind}.to_{cost.target:g}", value) for kind, value in figures.items())
        )


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
    yield from _traffic_figures(round_, run.traffic)
    yield from ((f"{name}.until", getattr(round_.until, name)) for name in UNITS)


def _device_figures(run: Digest, device: DeviceDigest) -> Figures:
    yield "board", device.board or None
    yield "version", device.version or None
    for name in ("went_away", "selected", "arrived", "late", "failed"):
        yield name, getattr(device, name)
    yield run.metric.name, device.metric_value()
    yield from ((f"most.{name}", value) for name, value in device.most.items())
    yield "seconds.rounds", Amount(value=device.rounds_s)
    yield from _cost_figures(device, run.traffic, split=run.split)


def _task_figures(task: TaskDigest, traffic: Iterable[str], *, split: bool) -> Figures:
    yield "arrival", task.arrival
    if task.cause:
        yield "cause", task.cause
    yield "examples", task.examples
    yield "loss", task.loss
    yield from ((f"told.{name}", value) for name, value in task.told.items())
    yield from _cost_figures(task, traffic, split=split)


def _cost_figures(entry: TaskDigest | DeviceDigest, traffic: Iterable[str], *, split: bool) -> Figures:
    for kind, parts in (("seconds", entry.seconds), ("joules", entry.joules)):
        for part in parts.__struct_fields__:
            amount = getattr(parts, part)
            if amount != NONE or part not in RARE or (part == "exchange" and split):
                yield f"{kind}.{part}", amount
    yield from _traffic_figures(entry, traffic)


def _traffic_figures(entry: Traffic, traffic: Iterable[str]) -> Figures:
    model = ("bytes_up", "bytes_down")
    return ((name, getattr(entry, name)) for name in (*model, *sorted({*traffic} - {*model})))


def csv_site_lines(digest: SitesDigest) -> Iterator[Line]:
    """Yield all values of the sites of a plan."""
    clock, runs = "wall" if digest.live else "virtual", {site.site: site.run for site in digest.sites}
    lines = partial(_make_lines, digest.name, clock)
    yield from lines([("zeta", digest.zeta)])
    for site in digest.sites:
        yield from _make_lines(site.run, clock, _site_figures(site))
    for mixing in digest.mixings:
        yield from lines(_mixing_figures(digest, mixing), mixing.round)
        for name, seconds in mixing.seconds.items():
            yield from _make_lines(runs[name], clock, [("seconds.gossip", Amount(value=seconds))], mixing.round)
        yield from lines((("edge.off", edge) for edge in mixing.off), mixing.round)
    for edge in digest.edges:
        figures: dict[str, Value] = {"on": edge.on, "off": edge.off, "bytes": Amount(value=edge.bytes)}
        yield from lines((f"edge.{edge.one}-{edge.other}.{name}", value) for name, value in figures.items())
    for stretch in digest.coordinated:
        text = f"{stretch.coordinator}, term {stretch.term}, rounds {stretch.first} to {stretch.last}"
        yield from lines([("coordinated", f"{text}, for {' '.join(stretch.sites)}")])
    for name, spreads in digest.given.items():
        for spread in spreads:
            values = ((f"given.{name}.{part}", getattr(spread, part)) for part in ("least", "median", "most"))
            yield from _make_lines(runs[spread.site], clock, values, spread.round)


def _site_figures(site: SiteDigest) -> Figures:
    yield "site", site.site
    yield "joules.spent", site.joules
    if site.share_joules is not None:
        yield "joules.allowed", Amount(value=site.share_joules + site.moved_joules)
    for name in ("gossip", "transfer"):
        yield f"seconds.{name}", Amount(value=getattr(site, f"{name}_s"))
    for way in ("up", "down"):
        yield f"bytes.gossip_{way}", Amount(value=getattr(site, f"bytes_{way}"))
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

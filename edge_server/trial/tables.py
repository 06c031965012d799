"""Runs and rounds as tables, for people."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from edge_server.fleet.tables import MARKS
from edge_server.journal.costs import by_round, statistics_by_round
from edge_server.journal.outcome import name_some
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    LeftOut,
    Noted,
    Rewound,
    RoundClosed,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
    valid,
)
from edge_server.journal.run_clock import RESTARTED
from edge_server.journal.runs import RunSummary, name_rounds
from shared.protocol.measurements import JOULES, SKIPPED, Cost, joule_parts
from shared.protocol.units import BYTES, choose_unit
from shared.runtime.text_table import TextColumn, TextTable, fits

MAX_DEVICE_COLUMNS = 8
MOST_NAMED, MOST_MISSED, MOST_FAILED = 20, 5, 2
PARTS = ("compute", "exchange", "upload")
CPU = "cpu"
"""Where tasks are computed that do not say so."""
CAPTION = (
    "slowest: seconds to {slowest}; joules: ~ corrected, ≈ modelled, ≥ not all are known\n"
    "{columns}: {unit} of frames down/up"
)
SUMMARY_COLUMNS = ("min", "median", "max")
SUMMARY_CAPTION = "min, median, max of {count} devices (`--devices` of `edge-server show` shows each)"
CUT_COLUMNS = "model; cut, gradients and features"
MEASURED = "; statistics, measuring those of BatchNorm"
HUNDRED = 100
"""From here on a figure has no decimal, or three seconds in a row would have no room beside it."""

Traffic: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""Bytes of frames of every round, down and up, by what they are of."""


def rounds_table(records: Sequence[AnyRecord], *, each_device: bool = False, width: int | None = None) -> TextTable:
    """Return one row a round, with the bytes of frames by device.

    Beyond `MAX_DEVICE_COLUMNS` devices there are their minimum, median and maximum, and the slowest device by name. The
    bytes of a split run are of all devices, the model's apart from what its sessions exchanged.

    Args:
        records: A run's journal.
        each_device: Whether each device has a column, however many there are.
        width: Columns of the terminal: a method's own figures, such as its loss terms, are shown where there is room.
    """
    closed, costs = closed_rounds(records), by_round(records)
    split = any(record.steps is not None for record in closed)
    devices = sorted({device for record in closed for device in (*record.bytes_up, *record.bytes_down)})
    many = len(devices) > MAX_DEVICE_COLUMNS and not each_device
    traffic, about = _traffic(records, closed, devices, split=split, many=many)
    unit, scale = unit_of(_most(traffic, len(closed)))
    slowest_parts = "/".join(part for part in PARTS if split or part != "exchange")
    caption = CAPTION.format(slowest=slowest_parts, columns=about, unit=unit)
    tried = {one.round: one.accuracy for one in valid(records) if isinstance(one, Evaluated) and one.personal}
    extra = ("personal",) * bool(tried)
    silent, name = _silent_by_round(records), name_rounds(records)
    failing = ("failed",) * any(one.failed or one.round in silent for one in closed)
    by_name = ("slowest\ndevice",) * many
    headings = ("round", "updates", *failing, *extra, "accuracy", "loss", "seconds", "slowest", *by_name, "joules")
    rows = []
    for place, record in enumerate(closed):
        moved = [
            f"{_short(down / scale)}/{_short(up / scale)}" for down, up in (ways[place] for ways in traffic.values())
        ]
        updates = str(len(record.arrived)) if record.outcome == "aggregated" else f"{len(record.arrived)} (missed)"
        cost = costs.get(record.round, {})
        personal = (figure(tried.get(record.round)) for _ in extra)
        learnt = (figure(record.accuracy), figure(record.loss), f"{record.seconds:.2f}")
        failed = (_some([*record.failed, *silent.get(record.round, ())]) for _ in failing)
        who = (slowest_device(cost, split=split) for _ in by_name)
        rows.append((name(record.round), updates, *failed, *personal, *learnt))
        rows[-1] += (slowest(cost, split=split), *who, total_joules(cost), *moved)
    columns = [TextColumn(heading, right=True) for heading in (*headings, *traffic)]
    table = TextTable(columns, rows, "Rounds", caption, seam=len(headings))
    wider = _with_terms(table, closed)
    return wider if width is None or fits(wider, width) else table


def _with_terms(table: TextTable, closed: Sequence[RoundClosed]) -> TextTable:
    """Return a table of rounds with the figures that the method has of its training."""
    by_round = [{} if one.terms is msgspec.UNSET else one.terms for one in closed]
    names = sorted({name for one in by_round for name in one})
    if not names:
        return table
    columns = [TextColumn(name.replace("_", "\n", 1), right=True) for name in names]
    cells = ((f"{one[name]:.4g}" if name in one else "-" for name in names) for one in by_round)
    rows = [(*row, *more) for row, more in zip(table.rows, cells, strict=True)]
    return replace(table, columns=[*table.columns, *columns], rows=rows)


def _silent_by_round(records: Sequence[AnyRecord]) -> dict[int, list[str]]:
    """Return who was left out since it said nothing, by the round after whose deadline."""
    found: dict[int, list[str]] = {}
    for record in records:
        if isinstance(record, LeftOut) and record.silent:
            found.setdefault(record.round, []).append(f"{record.device} (silent)")
    return found


def silent_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return which devices are left out since they say nothing, and why."""
    silent: dict[str, LeftOut] = {}
    for record in records:
        if isinstance(record, LeftOut) and record.silent:
            silent[record.device] = record
        elif isinstance(record, RoundClosed):
            for device in (*record.arrived, *record.failed):
                silent.pop(device, None)
    name = name_rounds(records)
    lines = [
        f"device {device} takes no part since round {name(out.round)}, until it speaks: {out.cause}"
        for device, out in sorted(silent.items())[:MOST_NAMED]
    ]
    rest = len(silent) - MOST_NAMED
    return [*lines, *([f"{rest} more devices say nothing"] if rest > 0 else [])]


def _some(devices: Collection[str], most: int = MOST_FAILED) -> str:
    """Return a few names, and how many more there are; a dash for none."""
    more = len(devices) - most
    return ", ".join([*sorted(devices)[:most], *([f"{more} more"] if more > 0 else [])]) or "-"


def _most(traffic: Traffic, rounds: int) -> int:
    """Return the most bytes that went one way in a round."""
    return max(
        (sum(rows[place][way] for rows in traffic.values()) for place in range(rounds) for way in (0, 1)), default=0
    )


def _traffic(
    records: Sequence[AnyRecord], closed: Sequence[RoundClosed], devices: Sequence[str], *, split: bool, many: bool
) -> tuple[Traffic, str]:
    """Return the columns of bytes, and their meaning for the caption."""
    if split:
        traffic, about = _exchanged(closed, by_round(records)), CUT_COLUMNS
    elif many:
        traffic, about = _summarized(closed), SUMMARY_CAPTION.format(count=len(devices))
    else:
        traffic, about = _by_device(closed, devices), "a device's column"
    if measured := statistics_by_round(records):
        about += MEASURED
        traffic = {**traffic, "statistics": [_measured(measured.get(record.round, {})) for record in closed]}
    return traffic, about


def _by_device(closed: Sequence[RoundClosed], devices: Sequence[str]) -> Traffic:
    return {
        device: [(record.bytes_down.get(device, 0), record.bytes_up.get(device, 0)) for record in closed]
        for device in devices
    }


def _summarized(closed: Sequence[RoundClosed]) -> Traffic:
    """Return minimum, median and maximum of the bytes of the devices that took part in each round."""
    rounds = []
    for record in closed:
        took_part = record.bytes_down.keys() | record.bytes_up.keys()
        ways = [
            [by_device.get(device, 0) for device in took_part] or [0]
            for by_device in (record.bytes_down, record.bytes_up)
        ]
        rounds.append([(min(way), round(statistics.median(way)), max(way)) for way in ways])
    return {heading: [(down[place], up[place]) for down, up in rounds] for place, heading in enumerate(SUMMARY_COLUMNS)}


def _exchanged(closed: Sequence[RoundClosed], costs: Mapping[int, Mapping[str, Cost]]) -> Traffic:
    return {
        "model": [(sum(record.bytes_down.values()), sum(record.bytes_up.values())) for record in closed],
        "cut": [_at_cut(costs.get(record.round, {})) for record in closed],
    }


def _measured(costs: Mapping[str, Cost]) -> tuple[int, int]:
    """Return the bytes of measuring running statistics: parameters and what answers features, features and updates."""
    down, up = _at_cut(costs)
    return down + sum(cost.bytes_down or 0 for cost in costs.values()), up + sum(
        cost.bytes_up or 0 for cost in costs.values()
    )


def _at_cut(costs: Mapping[str, Cost]) -> tuple[int, int]:
    """Return the bytes of gradients and of features."""
    known = costs.values()
    return sum(cost.gradient_bytes or 0 for cost in known), sum(cost.features_bytes or 0 for cost in known)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= HUNDRED else f"{value:.1f}"


def slowest(costs: Mapping[str, Cost], *, split: bool = False) -> str:
    """Return the longest computation and the longest upload of a round's devices, of those that are known.

    Between them stands the longest exchange of a split session.
    """
    names = [f"{part}_s" for part in PARTS if split or part != "exchange"]
    known = ([getattr(cost, name) for cost in costs.values()] for name in names)
    most = (max((one for one in found if one is not None), default=None) for found in known)
    return "/".join("-" if one is None else f"{one:.2f}" for one in most)


def slowest_device(costs: Mapping[str, Cost], *, split: bool = False) -> str:
    """Return the device whose computation, exchange and upload took longest together; a dash where none is known."""
    names = [f"{part}_s" for part in PARTS if split or part != "exchange"]
    seconds = {device: [getattr(cost, name) for name in names] for device, cost in costs.items()}
    known = {device: [part for part in parts if part is not None] for device, parts in seconds.items()}
    sums = {device: math.fsum(parts) for device, parts in known.items() if parts}
    return max(sorted(sums), key=sums.__getitem__) if sums else "-"


def total_joules(costs: Mapping[str, Cost]) -> str:
    """Return what a round's devices spent in all; at least that, where a part of it is not known."""
    parts = [getattr(cost, name) for cost in costs.values() for name in joule_parts(split=cost.exchange_s is not None)]
    known = [one for one in parts if one is not None]
    marks = {
        MARKS[cost.provenance[name].quality] for cost in costs.values() for name in JOULES if name in cost.provenance
    }
    worst = max(marks, key=list(MARKS.values()).index, default="")
    return f"{'≥' * (len(known) < len(parts))}{math.fsum(known):.3g}{worst}" if known else "-"


def device_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return what the devices measured of the final model, or each of its own, if they did."""
    found = [record for record in valid(records) if isinstance(record, Evaluated)]
    if not found:
        return []
    if not found[-1].by_device:
        return ["on the devices' held-out examples: unknown, no device answered in time; look at their links and logs"]
    shares = [(device, metrics.get("eval_accuracy")) for device, metrics in found[-1].by_device.items()]
    shown = shares
    if len(shares) > MOST_NAMED:
        ranked = sorted((share, device) for device, share in shares if share is not None)
        shown = [(device, share) for share, device in (*ranked[:1], *ranked[-1:])]
    by_device = (f"{len(shares)} devices, from " if shown is not shares else "") + ", ".join(
        f"{device} {figure(share)}" for device, share in shown
    )
    whose = "each with its own model, " if found[-1].personal else ""
    return [f"{whose}on the devices' held-out examples: {figure(found[-1].accuracy)} ({by_device})"]


def failure_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return which devices failed, how often and why the last time, who is asked no more, and who says nothing."""
    closed = [record for record in records if isinstance(record, RoundClosed)]
    causes = {device: (record.round, cause) for record in closed for device, cause in record.failed.items()}
    out = {record.device for record in records if isinstance(record, LeftOut) and not record.silent}
    back = {device for record in closed for device in record.arrived}
    name, alike = name_rounds(records), dict[tuple[str, str, int, bool], list[str]]()
    has_ended = any(isinstance(record, RunClosed) for record in records)
    for device, (number, cause) in sorted(causes.items()):
        times = sum(device in record.failed for record in closed)
        is_out = device in out - back and not has_ended
        alike.setdefault((cause, name(number), times, is_out), []).append(device)
    lines = []
    for (cause, last, times, is_out), devices in list(alike.items())[:MOST_NAMED]:
        who, whose = _whose(devices)
        stays = f"; asked no more until {whose} started anew" if is_out else ""
        often = f"{times} times, last in round" if times > 1 else "in round"
        lines.append(f"{who} failed {often} {last}: {cause}{stays}")
    rest = sum(map(len, list(alike.values())[MOST_NAMED:]))
    return [*lines, *([f"{rest} more devices failed"] if rest > 0 else []), *silent_lines(records)]


def _whose(devices: Sequence[str]) -> tuple[str, str]:
    """Return devices for the beginning of a sentence, and their agents for its end."""
    if len(devices) == 1:
        return f"device {devices[0]}", "its agent is"
    return f"devices {name_some(devices)}", "their agents are"


def trained_on_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return which devices trained on a GPU the last time, by its name."""
    last = {one.device: one.update.trained_on for one in records if isinstance(one, UpdateAccepted)}
    found: dict[str, list[str]] = {}
    for device, where in last.items():
        if where != CPU:
            found.setdefault(where, []).append(device)
    return [f"trained on {where}: {_some(devices, MOST_NAMED)}" for where, devices in sorted(found.items())]


def restart_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return which rounds went on after a restart of the server: their seconds hold the time it was away."""
    notes = [record.what for record in records if isinstance(record, Noted) and RESTARTED in record.what]
    rest = len(notes) - MOST_MISSED
    return [*notes[:MOST_MISSED], *([f"{rest} more rounds {RESTARTED}"] if rest > 0 else [])]


def missed_tries(records: Iterable[AnyRecord]) -> dict[int, int]:
    """Return how often each round was missed and done again, of those that were."""
    return dict(Counter(one.round for one in records if isinstance(one, Rewound) and one.missed))


def missed_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return how often rounds were missed and done again, of those that were most often; the last cause of each."""
    causes = {record.round: record.cause for record in records if isinstance(record, Rewound) and record.missed}
    name, tries = name_rounds(records), sorted(missed_tries(records).items(), key=lambda found: -found[1])
    lines = [f"round {name(one)} was done again {count} times, {causes[one]}" for one, count in tries[:MOST_MISSED]]
    if rest := tries[MOST_MISSED:]:
        lines.append(f"{len(rest)} more rounds were done again, {sum(count for _, count in rest)} times in all")
    return lines


def skipped_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return in how many tasks devices found nothing to learn from, and in how many rounds all of them did."""
    tasks: dict[int, list[bool]] = {}
    for record in valid(records):
        if isinstance(record, UpdateAccepted) and SKIPPED in record.update.metrics:
            tasks.setdefault(record.round, []).append(record.update.metrics[SKIPPED] > 0)
    count = sum(map(sum, tasks.values()))
    if not count:
        return []
    whole = sum(map(all, tasks.values()))
    by_all = f", all of them in {whole} of {len(tasks)} rounds" if whole else ""
    return [f"devices found nothing to learn from in {count} of {sum(map(len, tasks.values()))} tasks{by_all}"]


def runs_table(summaries: Sequence[RunSummary], width: int | None = None) -> TextTable:
    """Return one line a run, of as many columns as fit; those that matter least are left out first.

    Args:
        width: Of the terminal; None for any.
    """
    headings = ("run", "rounds", "accuracy", "outcome", "algorithm", "started")
    rows = [
        (one.run, f"{one.rounds}/{one.of}", figure(one.accuracy), one.outcome, one.algorithm, one.started)
        for one in summaries
    ]
    for shown in range(len(headings), 1, -1):
        columns = [TextColumn(heading) for heading in headings[:shown]]
        table = TextTable(columns, [row[:shown] for row in rows], "Runs, the newest first")
        if width is None or fits(table, width):
            break
    return table


def figure(value: float | None) -> str:
    """Return a figure with four decimals; a dash where nobody measured it."""
    return "-" if value is None else f"{value:.4f}"


def unit_of(count: int) -> tuple[str, float]:
    """Return the unit that fits a number of bytes, and how many bytes it is."""
    unit = choose_unit(count, BYTES, between=("GB", "kB"))
    return unit.name, unit.size

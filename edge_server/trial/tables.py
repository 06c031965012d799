"""Tables of runs and rounds for the terminal."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from edge_server.fleet.reading_cell import MARKS
from edge_server.journal.compared import (
    compared_metric,
    device_value,
    devices_value,
    devices_values,
    is_personal,
    server_value,
)
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.costs import costs_by_round, statistics_by_round
from edge_server.journal.outcome import name_some
from edge_server.journal.records import (
    SERVER_RESTARTED,
    AnyRecord,
    Evaluated,
    LeftOut,
    Noted,
    Rewound,
    RoundClosed,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
    enumerate_records,
    first,
    select,
    valid_records,
)
from edge_server.journal.runs import RunSummary, make_round_namer
from shared.protocol.measurements import JOULES, SKIPPED, Cost, joule_parts
from shared.protocol.units import BYTES, choose_unit
from shared.runtime.text_table import TextColumn, TextTable, fits_width

MAX_DEVICE_COLUMNS = 8
MOST_NAMED, MOST_MISSED, MOST_FAILED = 20, 5, 2
PARTS = ("compute", "exchange", "upload")
CPU = "cpu"
"""Default of `trained_on` for tasks that do not report it."""
CAPTION = (
    "slowest: seconds to {slowest}; joules: ~ corrected, ≈ modelled, ≥ lower bound\n{columns}: {unit} of frames down/up"
)
SUMMARY_COLUMNS = ("min", "median", "max")
SUMMARY_CAPTION = "min, median, max of {count} devices (`--devices` of `edge-server show` shows each)"
CUT_COLUMNS = "model; cut, gradients and features"
STATISTICS_COLUMN = "; statistics, measuring those of BatchNorm"
NO_DECIMALS_FROM = 100
"""Values from here on have no decimals, to save width."""

Traffic: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""Bytes of frames (down, up) of every round, by column."""


def rounds_table(records: Sequence[AnyRecord], *, each_device: bool = False, width: int | None = None) -> TextTable:
    """Return one row per round, with the bytes of frames by device.

    Beyond `MAX_DEVICE_COLUMNS` devices, the columns are minimum, median and maximum, and the slowest device is named.
    For a split run, the columns are all devices' model bytes and session bytes.

    Args:
        records: Journal of one run.
        each_device: Whether each device has a column regardless of their number.
        width: Columns of the terminal; the algorithm's own metrics are shown only if they fit.
    """
    closed, costs = closed_rounds(records), costs_by_round(records)
    split = any(record.steps is not None for record in closed)
    devices = sorted({device for record in closed for device in (*record.bytes_up, *record.bytes_down)})
    summarised = len(devices) > MAX_DEVICE_COLUMNS and not each_device
    traffic, description = _traffic(records, closed, devices, split=split, summarised=summarised, costs=costs)
    unit, scale = select_byte_unit(_most(traffic, len(closed)))
    slowest_parts = "/".join(part for part in PARTS if split or part != "exchange")
    caption = CAPTION.format(slowest=slowest_parts, columns=description, unit=unit)
    metric = compared_metric(records)
    personal_values = {
        record.round: devices_value(record, metric) for record in valid_records(records, Evaluated) if record.personal
    }
    personal_column = ("personal",) * bool(personal_values)
    metric_column, values = _common_values(records, closed)
    silent_by_round, name = _silent_by_round(records), make_round_namer(records)
    failed_column = ("failed",) * any(record.failed or record.round in silent_by_round for record in closed)
    by_name = ("slowest\ndevice",) * summarised
    headings = ("round", "updates", *failed_column, *personal_column, metric_column, "loss", "seconds", "slowest")
    headings += (*by_name, "joules")
    rows = []
    for index, record in enumerate(closed):
        traffic_cells = [
            f"{_short(down / scale)}/{_short(up / scale)}" for down, up in (ways[index] for ways in traffic.values())
        ]
        updates = str(len(record.arrived)) if record.outcome == "aggregated" else f"{len(record.arrived)} (missed)"
        cost = costs.get(record.round, {})
        personal = (metric.format(personal_values.get(record.round)) for _ in personal_column)
        training = (metric.format(values.get(record.round)), format_number(record.loss), f"{record.seconds:.2f}")
        failed = (_some([*record.failed, *silent_by_round.get(record.round, ())]) for _ in failed_column)
        slowest_cells = (slowest_device(cost, split=split) for _ in by_name)
        rows.append((name(record.round), updates, *failed, *personal, *training))
        rows[-1] += (format_longest_times(cost, split=split), *slowest_cells, total_joules(cost), *traffic_cells)
    columns = [TextColumn(heading, right=True) for heading in (*headings, *traffic)]
    table = TextTable(columns, rows, "Rounds", caption, seam=len(headings))
    wider = _with_terms(table, closed)
    return wider if width is None or fits_width(wider, width) else table


def _common_values(
    records: Sequence[AnyRecord], closed: Sequence[RoundClosed]
) -> tuple[str, Mapping[int, float | None]]:
    """Return the heading and each round's metric of the common model: the devices' if the server tests none."""
    metric = compared_metric(records)
    values = {record.round: server_value(record, metric) for record in closed}
    if not is_personal(records) and set(values.values()) <= {None} and (measured := devices_values(records)):
        return f"{metric.name}\non devices", measured
    return metric.name, values


def _with_terms(table: TextTable, closed: Sequence[RoundClosed]) -> TextTable:
    by_round = [{} if record.terms is msgspec.UNSET else record.terms for record in closed]
    names = sorted({name for terms in by_round for name in terms})
    if not names:
        return table
    columns = [TextColumn(name.replace("_", "\n", 1), right=True) for name in names]
    cells = ((f"{terms[name]:.4g}" if name in terms else "-" for name in names) for terms in by_round)
    rows = [(*row, *more) for row, more in zip(table.rows, cells, strict=True)]
    return replace(table, columns=[*table.columns, *columns], rows=rows)


def _silent_by_round(records: Sequence[AnyRecord]) -> dict[int, list[str]]:
    """Return the devices excluded for silence, by the round whose deadline they missed."""
    silent: dict[int, list[str]] = {}
    for record in select(records, LeftOut):
        if record.silent:
            silent.setdefault(record.round, []).append(f"{record.device} (silent)")
    return silent


def silent_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return the devices that are excluded for silence, with the cause."""
    silent_records = dict[str, LeftOut]()
    first_silent = [number for number, record in enumerate_records(records, LeftOut) if record.silent][:1]
    for record in select(records[first_silent[0] - 1 :], LeftOut, RoundClosed) if first_silent else ():
        if isinstance(record, LeftOut) and record.silent:
            silent_records[record.device] = record
        elif isinstance(record, RoundClosed):
            for device in (*record.arrived, *record.failed):
                silent_records.pop(device, None)
    name = make_round_namer(records)
    lines = [
        f"device {device} is excluded since round {name(record.round)} until it sends a message: {record.cause}"
        for device, record in sorted(silent_records.items())[:MOST_NAMED]
    ]
    omitted = len(silent_records) - MOST_NAMED
    return [*lines, *([f"{omitted} more devices are silent"] if omitted > 0 else [])]


def _some(devices: Collection[str], most: int = MOST_FAILED) -> str:
    """Return a few names and the number of others; a dash for none."""
    more = len(devices) - most
    return ", ".join([*sorted(devices)[:most], *([f"{more} more"] if more > 0 else [])]) or "-"


def _most(traffic: Traffic, rounds: int) -> int:
    return max(
        (sum(rows[index][way] for rows in traffic.values()) for index in range(rounds) for way in (0, 1)), default=0
    )


def _traffic(
    records: Sequence[AnyRecord],
    closed: Sequence[RoundClosed],
    devices: Sequence[str],
    *,
    costs: Mapping[int, Mapping[str, Cost]],
    split: bool,
    summarised: bool,
) -> tuple[Traffic, str]:
    if split:
        traffic, description = _split_traffic(closed, costs), CUT_COLUMNS
    elif summarised:
        traffic, description = _summary_traffic(closed), SUMMARY_CAPTION.format(count=len(devices))
    else:
        traffic, description = _device_traffic(closed, devices), "a device's column"
    if measured := statistics_by_round(records):
        description += STATISTICS_COLUMN
        traffic = {**traffic, "statistics": [_statistics_traffic(measured.get(record.round, {})) for record in closed]}
    return traffic, description


def _device_traffic(closed: Sequence[RoundClosed], devices: Sequence[str]) -> Traffic:
    return {
        device: [(record.bytes_down.get(device, 0), record.bytes_up.get(device, 0)) for record in closed]
        for device in devices
    }


def _summary_traffic(closed: Sequence[RoundClosed]) -> Traffic:
    """Return minimum, median and maximum bytes of the devices in each round."""
    rounds = []
    for record in closed:
        took_part = record.bytes_down.keys() | record.bytes_up.keys()
        ways = [
            [by_device.get(device, 0) for device in took_part] or [0]
            for by_device in (record.bytes_down, record.bytes_up)
        ]
        rounds.append([(min(way), round(statistics.median(way)), max(way)) for way in ways])
    return {heading: [(down[index], up[index]) for down, up in rounds] for index, heading in enumerate(SUMMARY_COLUMNS)}


def _split_traffic(closed: Sequence[RoundClosed], costs: Mapping[int, Mapping[str, Cost]]) -> Traffic:
    return {
        "model": [(sum(record.bytes_down.values()), sum(record.bytes_up.values())) for record in closed],
        "cut": [_cut_bytes(costs.get(record.round, {})) for record in closed],
    }


def _statistics_traffic(costs: Mapping[str, Cost]) -> tuple[int, int]:
    """Return the bytes of re-measuring running statistics: down parameters and answers, up features and updates."""
    down, up = _cut_bytes(costs)
    return down + sum(cost.bytes_down or 0 for cost in costs.values()), up + sum(
        cost.bytes_up or 0 for cost in costs.values()
    )


def _cut_bytes(costs: Mapping[str, Cost]) -> tuple[int, int]:
    all_costs = costs.values()
    return sum(cost.gradient_bytes or 0 for cost in all_costs), sum(cost.features_bytes or 0 for cost in all_costs)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= NO_DECIMALS_FROM else f"{value:.1f}"


def format_longest_times(costs: Mapping[str, Cost], *, split: bool = False) -> str:
    """Return the longest computation, exchange (in a split session) and upload of a round, where known."""
    names = [f"{part}_s" for part in PARTS if split or part != "exchange"]
    values_by_part = ([getattr(cost, name) for cost in costs.values()] for name in names)
    most = (max((value for value in values if value is not None), default=None) for values in values_by_part)
    return "/".join("-" if value is None else f"{value:.2f}" for value in most)


def slowest_device(costs: Mapping[str, Cost], *, split: bool = False) -> str:
    """Return the device with the longest computation, exchange and upload in total; a dash if none is known."""
    names = [f"{part}_s" for part in PARTS if split or part != "exchange"]
    seconds = {device: [getattr(cost, name) for name in names] for device, cost in costs.items()}
    known_parts = {device: [part for part in parts if part is not None] for device, parts in seconds.items()}
    sums = {device: math.fsum(parts) for device, parts in known_parts.items() if parts}
    return max(sorted(sums), key=sums.__getitem__) if sums else "-"


def total_joules(costs: Mapping[str, Cost]) -> str:
    """Return the joules of a round's devices, as a lower bound if a part is unknown."""
    parts = [getattr(cost, name) for cost in costs.values() for name in joule_parts(split=cost.exchange_s is not None)]
    known_parts = [part for part in parts if part is not None]
    marks = {
        MARKS[cost.provenance[name].quality] for cost in costs.values() for name in JOULES if name in cost.provenance
    }
    worst = max(marks, key=list(MARKS.values()).index, default="")
    return f"{'≥' * (len(known_parts) < len(parts))}{math.fsum(known_parts):.3g}{worst}" if known_parts else "-"


def device_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return the devices' evaluation of the final or personal models, if there is one."""
    evaluated = next(valid_records(records, Evaluated, newest_first=True), None)
    if evaluated is None:
        return []
    if not evaluated.by_device:
        return ["on the devices' held-out examples: unknown, no device answered in time; check their links and logs"]
    metric = compared_metric(records)
    shares = [(device, device_value(metrics, metric)) for device, metrics in evaluated.by_device.items()]
    selected = shares
    if len(shares) > MOST_NAMED:
        ranked = sorted((share, device) for device, share in shares if share is not None)
        selected = [(device, share) for share, device in (*ranked[:1], *ranked[-1:])]
    by_device = (f"{len(shares)} devices, from " if selected is not shares else "") + ", ".join(
        f"{device} {metric.format(share)}" for device, share in selected
    )
    prefix = "with personal models, " if evaluated.personal else ""
    name = "" if metric == ACCURACY else f"{metric.name} "
    value = metric.format(devices_value(evaluated, metric))
    return [f"{prefix}on the devices' held-out examples: {name}{value} ({by_device})"]


def failure_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return failed devices with count and last cause, then excluded and silent ones."""
    causes, times, returned = dict[str, tuple[int, str]](), Counter[str](), set[str]()
    for record in select(records, RoundClosed):
        causes |= {device: (record.round, cause) for device, cause in record.failed.items()}
        times.update(record.failed.keys())
        returned.update(record.arrived)
    excluded = {record.device for record in select(records, LeftOut) if not record.silent}
    name, groups = make_round_namer(records), dict[tuple[str, str, int, bool], list[str]]()
    has_ended = first(records, RunClosed) is not None
    for device, (number, cause) in sorted(causes.items()):
        is_out = device in excluded - returned and not has_ended
        groups.setdefault((cause, name(number), times[device], is_out), []).append(device)
    lines = []
    for (cause, last, count, is_out), devices in list(groups.items())[:MOST_NAMED]:
        subject, agents = _subject(devices)
        stays = f"; no more tasks until {agents} restarted" if is_out else ""
        often = f"{count} times, last in round" if count > 1 else "in round"
        lines.append(f"{subject} failed {often} {last}: {cause}{stays}")
    omitted = sum(map(len, list(groups.values())[MOST_NAMED:]))
    return [*lines, *([f"{omitted} more devices failed"] if omitted > 0 else []), *silent_lines(records)]


def _subject(devices: Sequence[str]) -> tuple[str, str]:
    if len(devices) == 1:
        return f"device {devices[0]}", "its agent is"
    return f"devices {name_some(devices)}", "their agents are"


def gpu_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return the GPUs used last, with their devices."""
    last = {record.device: record.update.trained_on for record in select(records, UpdateAccepted)}
    by_processor: dict[str, list[str]] = {}
    for device, processor in last.items():
        if processor != CPU:
            by_processor.setdefault(processor, []).append(device)
    return [
        f"trained on {processor}: {_some(devices, MOST_NAMED)}" for processor, devices in sorted(by_processor.items())
    ]


def restart_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return the rounds that span a server restart, whose seconds include the downtime."""
    notes = [record.what for record in select(records, Noted) if record.reason == SERVER_RESTARTED]
    omitted = len(notes) - MOST_MISSED
    return [
        *notes[:MOST_MISSED],
        *([f"{omitted} more rounds went on after a restart of the server"] if omitted > 0 else []),
    ]


def count_retries(records: Sequence[AnyRecord]) -> dict[int, int]:
    """Return the number of repetitions of each missed round."""
    return dict(Counter(record.round for record in select(records, Rewound) if record.missed))


def missed_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return the most repeated rounds with their last cause."""
    causes = {record.round: record.cause for record in select(records, Rewound) if record.missed}
    name, tries = make_round_namer(records), sorted(count_retries(records).items(), key=lambda item: -item[1])
    lines = [
        f"round {name(number)} was repeated {count} times, {causes[number]}" for number, count in tries[:MOST_MISSED]
    ]
    if others := tries[MOST_MISSED:]:
        lines.append(f"{len(others)} more rounds were repeated, {sum(count for _, count in others)} times in total")
    return lines


def skipped_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return in how many tasks devices found nothing to learn from, and in how many rounds all of them."""
    tasks: dict[int, list[bool]] = {}
    for record in valid_records(records, UpdateAccepted):
        if SKIPPED in record.update.metrics:
            tasks.setdefault(record.round, []).append(record.update.metrics[SKIPPED] > 0)
    count = sum(map(sum, tasks.values()))
    if not count:
        return []
    full_rounds = sum(map(all, tasks.values()))
    by_all = f", all of them in {full_rounds} of {len(tasks)} rounds" if full_rounds else ""
    return [f"devices found nothing to learn from in {count} of {sum(map(len, tasks.values()))} tasks{by_all}"]


def runs_table(summaries: Sequence[RunSummary], width: int | None = None) -> TextTable:
    """Return one row per run with as many columns as fit, most important first.

    Args:
        width: Of the terminal; None for any.
    """
    heading = "accuracy" if all(summary.metric is msgspec.UNSET for summary in summaries) else "metric"
    headings = ("run", "rounds", heading, "outcome", "algorithm", "started")
    rows = [
        (
            summary.run,
            f"{summary.rounds}/{summary.of}",
            summary.metric_value,
            summary.outcome,
            summary.algorithm,
            summary.started,
        )
        for summary in summaries
    ]
    for column_count in range(len(headings), 1, -1):
        columns = [TextColumn(heading) for heading in headings[:column_count]]
        table = TextTable(columns, [row[:column_count] for row in rows], "Runs, the newest first")
        if width is None or fits_width(table, width):
            break
    return table


def format_number(value: float | None) -> str:
    """Return a number with four decimals; a dash for None."""
    return "-" if value is None else f"{value:.4f}"


def select_byte_unit(count: int) -> tuple[str, float]:
    """Return the unit for a number of bytes, and its size in bytes."""
    unit = choose_unit(count, BYTES, between=("GB", "kB"))
    return unit.name, unit.size

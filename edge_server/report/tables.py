"""Summary, target and facts tables of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from markupsafe import Markup

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import Amount
from edge_server.report import targets
from edge_server.report.digest import ARRIVALS, Digest, Traffic, common_metric, metric_name
from edge_server.report.formatting import (
    NOTHING,
    bytes_label,
    format_amount,
    format_change,
    format_loss,
    format_metric,
    format_section,
    format_share_change,
    format_spec,
)
from edge_server.report.html import clean, macro, render

MOST_DEVICES = 20
"""Devices of a plan that are printed."""

FACTS: Mapping[str, Callable[[Digest], str]] = {
    "trial": lambda run: run.plan.name,
    "kind": lambda run: f"{'live' if run.live else 'replay'}, {run.clock} seconds",
    "started": lambda run: run.started or NOTHING,
    "algorithm": lambda run: format_spec(run.plan.algorithm),
    "model": lambda run: format_spec(run.plan.model),
    "codec": lambda run: format_spec(run.plan.codec),
    "training": lambda run: format_section(run.plan.hyper),
    "data": lambda run: f"{run.plan.data.source} {run.plan.data.path}".strip() if run.plan.data else "the devices'",
    "partition": lambda run: format_section(run.plan.partition),
    "cohort": lambda run: format_section(run.plan.cohort),
    "a round ends": lambda run: format_section(run.plan.round),
    "budget": lambda run: format_section(run.plan.budget) or "none",
    "seed": lambda run: str(run.plan.seed),
    "versions": lambda run: _list_counts(sorted(run.versions.items())) or NOTHING,
    "agents": lambda run: ", ".join(sorted({device.version for device in run.devices} - {""})) or NOTHING,
    "devices that took part": lambda run: str(len(run.devices)),
    "boards": lambda run: ", ".join(sorted({device.board for device in run.devices} - {""})) or NOTHING,
    "server processes": lambda run: str(run.servers or NOTHING),
    "disconnections of devices": lambda run: (
        str(sum(device.went_away for device in run.devices)) if run.servers else NOTHING
    ),
    "joules of measurements before round 1": lambda run: format_amount(run.measuring, "joules"),
    "rewinds after a lost checkpoint": lambda run: f"{run.went_back} times",
    "refused by the server": lambda run: _list_counts(run.refused.items()) or "nothing",
    "notes": lambda run: "; ".join(run.notes) or "none",
}


def seconds_label(runs: Sequence[Digest]) -> str:
    """Return the label of seconds for all runs, naming the clocks."""
    return f"seconds ({' or '.join(sorted({run.clock for run in runs}))})"


def run_names(runs: Sequence[Digest]) -> list[str]:
    """Return the runs' names, numbered if there are several."""
    return [f"{index}. {run.run}" for index, run in enumerate(runs, 1)] if len(runs) > 1 else [run.run for run in runs]


def column_headers(runs: Sequence[Digest]) -> list[Markup]:
    """Return column headers: each run's name with its curve."""
    return [macro("keyed")(colour, name) for colour, name in enumerate(run_names(runs))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str | None = None) -> Markup:
    """Return a table that scrolls sideways where the page is too narrow; the first cell of a row is its header."""
    return macro("table")(head, rows, class_)


def summary_table(runs: Sequence[Digest]) -> Markup:
    """Return the outcome of every run and its difference from the first."""
    totals = [run.rounds[-1].until if run.rounds else None for run in runs]
    last_rounds, name = [targets.last_evaluated(run) for run in runs], metric_name(runs)
    is_personal = any(run.personal for run in runs)
    rows: dict[str, Iterable[str]] = {
        "outcome": (_breakable(f"{run.outcome}: {run.cause}" if run.cause else run.outcome) for run in runs),
        "rounds": (f"{len(run.rounds)} of {run.plan.rounds}" for run in runs),
        f"{name} at the end": _metric_cells(runs, [last.metric_value() if last else None for last in last_rounds]),
        f"best {name}": _metric_cells(runs, [targets.best_value(run) for run in runs]),
    }
    if is_personal:
        values = [last.metric_value("global") if last else None for last in last_rounds]
        rows[f"{name} of the aggregated model"] = _metric_cells(runs, values)
    last_metrics = [next((round_.metrics for round_ in reversed(run.rounds) if round_.metrics), {}) for run in runs]
    for metric in sorted({metric for metrics in last_metrics for metric in metrics}):
        rows[f"{metric} at the end"] = _losses([metrics.get(metric) for metrics in last_metrics])
    rows["loss at the end"] = _losses([last.test_loss if last else None for last in last_rounds])
    if is_personal:
        models = ("the devices' own models" if run.personal else "the aggregated model" for run in runs)
        rows[f"{name} refers to"] = map(_breakable, models)
    rows[f"{name} on devices"] = _metric_cells(runs, [run.metric_value("device") for run in runs])
    for field, heading in _spending(runs).items():
        amounts = [getattr(total, field) if total else Amount() for total in totals]
        rows[heading] = _amounts(runs, amounts, field if field in ("seconds", "joules") else "bytes")
    for arrival in ARRIVALS:
        rows[f"updates {arrival}"] = [str(sum(getattr(round_, arrival) for round_ in run.rounds)) for run in runs]
    return table(["", *column_headers(runs)], [[heading, *cells] for heading, cells in rows.items()], "summary")


def _breakable(text: str) -> Markup:
    """Return text that may wrap between words, unlike a number and its unit."""
    return Markup('<span class="words">{}</span>').format(clean(text))


def _spending(runs: Sequence[Digest]) -> Mapping[str, str]:
    """Return the label of each field of `SpentByRound` that some run has."""
    is_split, model = any(run.split for run in runs), Traffic.__struct_fields__[:2]
    labels = {"seconds": seconds_label(runs), "joules": "joules"}
    labels |= {name: bytes_label(name, split=is_split) for name in model}
    exchanged = {name for run in runs for name in run.traffic} - {*model}
    if not exchanged:
        return labels
    names = [name for name in Traffic.__struct_fields__ if name in exchanged]
    return labels | {name: bytes_label(name, split=True) for name in names} | {"bytes": "total bytes"}


def targets_table(runs: Sequence[Digest], values: Sequence[float]) -> Markup:
    """Return the rounds, seconds, joules and bytes that every run needed for each target."""
    rows: list[list[str]] = []
    for value in values:
        costs = targets.costs_to_targets(runs, [value])
        columns = [
            _amounts(runs, [getattr(cost, kind) for cost in costs], kind) for kind in ("seconds", "joules", "bytes")
        ]
        for run, name, cost, *cells in zip(runs, run_names(runs), costs, *columns, strict=True):
            label, cause = format_metric(value, run.metric), ""
            if not cost.round:
                top = targets.best_value(run)
                cause = "never evaluated" if top is None else f"not reached; best {format_metric(top, run.metric)}"
            rows.append([label, macro("changed")(name, cause), str(cost.round or NOTHING), *cells])
    return table([metric_name(runs), "run", "round", seconds_label(runs), "joules", "bytes"], rows, "targets")


def _metric_cells(runs: Sequence[Digest], values: Sequence[float | None]) -> list[Markup]:
    metric = common_metric(runs)
    texts = [format_metric(value, run.metric) for run, value in zip(runs, values, strict=True)]
    format_difference = format_share_change if metric == ACCURACY else format_change
    return _cells(texts, [format_difference(value, values[0]) if metric else "" for value in values])


def _losses(values: Sequence[float | None]) -> list[Markup]:
    return _cells([format_loss(value) for value in values], [format_change(value, values[0]) for value in values])


def _amounts(runs: Sequence[Digest], amounts: Sequence[Amount], kind: str) -> list[Markup]:
    """Return amounts and their changes; lower bounds and different clocks are not compared."""
    base, texts = amounts[0], [format_amount(amount, kind) for amount in amounts]
    if kind == "seconds" and len({run.live for run in runs}) > 1:
        return [macro("changed")(text, run.clock) for text, run in zip(texts, runs, strict=True)]
    changes = [format_change(amount.value, base.value) if amount.whole and base.whole else "" for amount in amounts]
    return _cells(texts, changes)


def _cells(texts: Sequence[str], changes: Sequence[str]) -> list[Markup]:
    """Return cells with their change; the first is the base and has none."""
    return [macro("changed")(text, change) for text, change in zip(texts, ("", *changes[1:]), strict=True)]


def _list_counts(items: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items)


def facts_table(runs: Sequence[Digest]) -> Markup:
    """Return the settings of the runs with differences in bold, and their full plans."""
    values = {name: [str(clean(read_fact(run))) for run in runs] for name, read_fact in FACTS.items()}
    bold = Markup("<b>{}</b>").format
    rows = [[name, *(map(bold, texts) if len(set(texts)) > 1 else texts)] for name, texts in values.items()]
    facts = table(["", *column_headers(runs)], rows, "facts")
    return render("facts.html", facts=facts, plans=dict(zip(run_names(runs), map(_plan_lines, runs), strict=True)))


def _plan_lines(run: Digest) -> list[str]:
    """Return a plan as JSON, line by line since long texts are cut; only the first devices are printed."""
    devices = run.plan.device
    plan = msgspec.structs.replace(run.plan, device=devices[:MOST_DEVICES])
    lines = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode().splitlines()
    return lines + [f"and {len(devices) - MOST_DEVICES} more devices"] * (len(devices) > MOST_DEVICES)

"""Summary, target and facts tables of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from edge_server.report import formatting
from edge_server.report import targets as compare
from edge_server.report.charts import key
from edge_server.report.digest import ARRIVALS, Amount, Digest, Traffic, common_metric, metric_name
from edge_server.report.html import NOTHING, Markup, element, join

PERSONAL_MODELS = "the devices' own models"
MOST_DEVICES = 20
"""Devices of a plan that are printed."""


def clock_kind(run: Digest) -> str:
    """Return the kind of clock of a run's seconds: `wall` or `virtual`."""
    return "wall" if run.live else "virtual"


def seconds_label(runs: Sequence[Digest]) -> str:
    """Return the label of seconds for all runs, naming the clocks."""
    return f"seconds ({' or '.join(sorted({clock_kind(run) for run in runs}))})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], class_: str | None = None) -> Markup:
    """Return a table that scrolls sideways where the page is too narrow; the first cell of a row is its header.

    Args:
        rows: Cells, as markup or text.
    """
    top = element("tr", (element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", [element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])]) for row in rows
    ]
    table_element = element("table", [element("thead", top), element("tbody", body)], class_=class_)
    return element("div", table_element, class_="wide", tabindex="0")


def figure_with_change(text: str, change: str) -> Markup:
    """Return a value with its change from the first run below it."""
    return join([text, element("small", change)]) if change else join([text])


def summary_table(runs: Sequence[Digest]) -> Markup:
    """Return the outcome of every run and its difference from the first."""
    totals = [run.rounds[-1].until if run.rounds else None for run in runs]
    last_rounds, name = [compare.last_evaluated(run) for run in runs], metric_name(runs)
    rows = [
        ["outcome", *(_breakable(f"{run.outcome}: {run.cause}" if run.cause else run.outcome) for run in runs)],
        ["rounds", *(f"{len(run.rounds)} of {run.plan.rounds}" for run in runs)],
        [f"{name} at the end", *_metric_cells(runs, [last.metric_value() if last else None for last in last_rounds])],
        [f"best {name}", *_metric_cells(runs, [compare.best_value(run) for run in runs])],
        *(
            [row, *_metric_cells(runs, [last.metric_value("global") if last else None for last in last_rounds])]
            for row in [f"{name} of the aggregated model"] * any(run.personal for run in runs)
        ),
        *_metric_rows(runs),
        ["loss at the end", *_losses([last.test_loss if last else None for last in last_rounds])],
        *(
            [
                f"{name} refers to",
                *(_breakable(PERSONAL_MODELS if run.personal else "the aggregated model") for run in runs),
            ]
            for _ in range(any(run.personal for run in runs))
        ),
        [f"{name} on devices", *_metric_cells(runs, [run.on_devices for run in runs])],
    ]
    for field, kind, heading in _spending_rows(runs):
        amounts = [getattr(total, field) if total else Amount() for total in totals]
        rows.append([heading, *_amounts(runs, amounts, kind)])
    rows += [
        [f"updates {arrival}", *(str(sum(getattr(round_, arrival) for round_ in run.rounds)) for run in runs)]
        for arrival in ARRIVALS
    ]
    return table(["", *column_headers(runs)], rows, class_="summary")


def _breakable(text: str) -> Markup:
    """Return text that may wrap between words, unlike a number and its unit."""
    return element("span", text, class_="words")


def _spending_rows(runs: Sequence[Digest]) -> list[tuple[str, str, str]]:
    figures = [("seconds", "seconds", seconds_label(runs)), ("joules", "joules", "joules")]
    figures += [
        (name, "bytes", formatting.bytes_label(name, split=_any_split(runs))) for name in Traffic.__struct_fields__[:2]
    ]
    if not any(run.traffic[2:] for run in runs):
        return figures
    exchanged = [
        (name, "bytes", formatting.bytes_label(name, split=True))
        for name in Traffic.__struct_fields__[2:]
        if any(name in run.traffic for run in runs)
    ]
    return [*figures, *exchanged, ("bytes", "bytes", "total bytes")]


def _any_split(runs: Sequence[Digest]) -> bool:
    return any(run.split for run in runs)


def column_headers(runs: Sequence[Digest]) -> list[Markup]:
    """Return column headers: each run's name with its curve."""
    return [join([key(colour), name]) for colour, name in enumerate(run_names(runs))]


def run_names(runs: Sequence[Digest]) -> list[str]:
    """Return the runs' names, numbered if there are several."""
    return [f"{index}. {run.run}" for index, run in enumerate(runs, 1)] if len(runs) > 1 else [run.run for run in runs]


def targets_table(runs: Sequence[Digest], targets: Sequence[float]) -> Markup:
    """Return the rounds, seconds, joules and bytes that every run needed for each target."""
    rows: list[list[str]] = []
    for target in targets:
        costs = compare.costs_to_targets(runs, [target])
        columns = [
            _amounts(runs, [getattr(cost, kind) for cost in costs], kind) for kind in ("seconds", "joules", "bytes")
        ]
        for index, name in enumerate(run_names(runs)):
            number = str(costs[index].round or NOTHING)
            cause = "" if costs[index].round else _why_not_reached(runs[index])
            rows.append(
                [
                    formatting.format_metric(target, runs[index].metric),
                    figure_with_change(name, cause),
                    number,
                    *(column[index] for column in columns),
                ]
            )
    return table([metric_name(runs), "run", "round", seconds_label(runs), "joules", "bytes"], rows, class_="targets")


def _why_not_reached(run: Digest) -> str:
    top = compare.best_value(run)
    return "never evaluated" if top is None else f"not reached; best {formatting.format_metric(top, run.metric)}"


def _metric_rows(runs: Sequence[Digest]) -> list[list[str]]:
    """Return the other metrics of the last evaluated round, in runs that have any."""
    measured = [{} if (last := _last_metrics(run)) is None else last for run in runs]
    rows = []
    for name in sorted({name for metrics in measured for name in metrics}):
        values = [metrics.get(name) for metrics in measured]
        rows.append([f"{name} at the end", *_losses(values)])
    return rows


def _last_metrics(run: Digest) -> dict[str, float] | None:
    return next((round_.metrics for round_ in reversed(run.rounds) if round_.metrics), None)


def _metric_cells(runs: Sequence[Digest], values: Sequence[float | None]) -> list[Markup]:
    metric = common_metric(runs)
    texts = [formatting.format_metric(value, run.metric) for run, value in zip(runs, values, strict=True)]
    changes = [formatting.format_metric_change(value, values[0], metric) if metric else "" for value in values]
    return _cells(texts, changes)


def _losses(values: Sequence[float | None]) -> list[Markup]:
    return _cells(
        [formatting.format_loss(value) for value in values],
        [formatting.format_change(value, values[0]) for value in values],
    )


def _amounts(runs: Sequence[Digest], amounts: Sequence[Amount], kind: str) -> list[Markup]:
    """Return amounts and their changes; lower bounds and different clocks are not compared."""
    base, texts = amounts[0], [formatting.format_amount(amount, kind) for amount in amounts]
    if kind == "seconds" and len({run.live for run in runs}) > 1:
        return [figure_with_change(text, clock_kind(run)) for text, run in zip(texts, runs, strict=True)]
    changes = [
        formatting.format_change(amount.value, base.value) if amount.whole and base.whole else "" for amount in amounts
    ]
    return _cells(texts, changes)


def _cells(texts: Sequence[str], changes: Sequence[str]) -> list[Markup]:
    """Return cells with their change; the first is the base and has none."""
    pairs = zip(texts, ("", *changes[1:]), strict=True)
    return [figure_with_change(text, change) for text, change in pairs]


def _list_facts() -> Sequence[tuple[str, Callable[[Digest], str]]]:
    return (
        ("trial", lambda run: run.plan.name),
        ("kind", lambda run: f"live, {clock_kind(run)} seconds" if run.live else f"replay, {clock_kind(run)} seconds"),
        ("started", lambda run: run.started or NOTHING),
        ("algorithm", lambda run: formatting.format_spec(run.plan.algorithm)),
        ("model", lambda run: formatting.format_spec(run.plan.model)),
        ("codec", lambda run: formatting.format_spec(run.plan.codec)),
        ("training", lambda run: formatting.format_section(run.plan.hyper)),
        (
            "data",
            lambda run: f"{run.plan.data.source} {run.plan.data.path}".strip() if run.plan.data else "the devices'",
        ),
        ("partition", lambda run: formatting.format_section(run.plan.partition)),
        ("cohort", lambda run: formatting.format_section(run.plan.cohort)),
        ("a round ends", lambda run: formatting.format_section(run.plan.round)),
        ("budget", lambda run: formatting.format_section(run.plan.budget) or "none"),
        ("seed", lambda run: str(run.plan.seed)),
        (
            "versions",
            lambda run: ", ".join(f"{name} {version}" for name, version in sorted(run.versions.items())) or NOTHING,
        ),
        ("agents", lambda run: _join_sorted(device.version for device in run.devices)),
        ("devices that took part", lambda run: str(len(run.devices))),
        ("boards", lambda run: _join_sorted(device.board for device in run.devices)),
        ("server processes", lambda run: str(run.servers or NOTHING)),
        (
            "disconnections of devices",
            lambda run: str(sum(device.went_away for device in run.devices)) if run.servers else NOTHING,
        ),
        ("joules of measurements before round 1", lambda run: formatting.format_amount(run.measuring, "joules")),
        ("rewinds after a lost checkpoint", lambda run: f"{run.went_back} times"),
        ("refused by the server", lambda run: _counts(run) or "nothing"),
        ("notes", lambda run: "; ".join(run.notes) or "none"),
    )


def _join_sorted(words_: Iterable[str]) -> str:
    return ", ".join(sorted({*words_} - {""})) or NOTHING


def _counts(run: Digest) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in run.refused.items())


def facts_table(runs: Sequence[Digest]) -> Markup:
    """Return the settings of the runs with differences in bold, and their full plans."""
    rows = []
    for name, of in _list_facts():
        values = [of(run) for run in runs]
        rows.append([name, *(element("b", value) if len(set(values)) > 1 else value for value in values)])
    plans = [
        element(
            "details",
            [element("summary", f"Plan of {name}"), element("pre", _lines(run))],
        )
        for name, run in zip(run_names(runs), runs, strict=True)
    ]
    return join([table(["", *column_headers(runs)], rows, class_="facts"), *plans])


def _lines(run: Digest) -> list[Markup]:
    """Return a plan as JSON, line by line since `escape` cuts long texts; only the first devices are printed."""
    devices = run.plan.device
    plan = msgspec.structs.replace(run.plan, device=devices[:MOST_DEVICES])
    lines = msgspec.json.format(msgspec.json.encode(plan), indent=2).decode().splitlines()
    if len(devices) > MOST_DEVICES:
        lines.append(f"and {len(devices) - MOST_DEVICES} more devices")
    return [part for line in lines for part in (join([line]), Markup("\n"))]

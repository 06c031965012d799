"""Report section: final accuracy by class, compared metric by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_server.journal.compared_metric import ACCURACY
from edge_server.report import formatting
from edge_server.report.bars import Slice, bar
from edge_server.report.charts import COLOURS
from edge_server.report.digest import Digest, common_metric, quantile
from edge_server.report.formatting import format_metric
from edge_server.report.html import NOTHING, Markup, element, join
from edge_server.report.sections.time_energy import MOST_BARS, QUANTILES
from edge_server.report.summarise import natural_order
from edge_server.report.tables import column_headers, run_names, table


def accuracy(runs: Sequence[Digest]) -> list[Markup]:
    """Return the section's content; nothing unless some run has accuracies by class or device."""
    parts = [part for part in (_by_class(runs), _by_device(runs)) if part]
    return [join(parts)] if parts else []


def _by_class(runs: Sequence[Digest]) -> Markup:
    last_rounds = [next((round_ for round_ in reversed(run.rounds) if round_.class_accuracy), None) for run in runs]
    shares = [dict(enumerate(round_.class_accuracy)) if round_ else {} for round_ in last_rounds]
    if not any(shares):
        return join()
    labels = range(max(map(len, shares)))
    numbers = list(dict.fromkeys(str(round_.round) for round_ in last_rounds if round_))
    note = (
        f"Of the aggregated model on the server's test data, after the last round that tested it: {', '.join(numbers)}"
    )
    rows = [[_class_name(runs, label), *_cells(runs, [by_label.get(label) for by_label in shares])] for label in labels]
    return join(
        [
            element("h4", "By class of the test data"),
            element("p", note + ".", class_="note"),
            table(["class", *column_headers(runs)], rows, class_="shares"),
        ],
    )


def _class_name(runs: Sequence[Digest], label: int) -> str:
    """Return a class's label, with its name if the runs agree on one."""
    class_names = {run.classes[label] for run in runs if label < len(run.classes)}
    return f"{label} {class_names.pop()}" if len(class_names) == 1 else str(label)


def _by_device(runs: Sequence[Digest]) -> Markup:
    values = [
        {device.device: device.metric_value for device in run.devices if device.metric_value is not None}
        for run in runs
    ]
    devices = sorted({device for by_device in values for device in by_device}, key=natural_order)
    if not devices:
        return join()
    return join(
        [
            element("h4", "By device"),
            element("p", "On each device's held-out data, last measured.", class_="note"),
            _device_rows(runs, values, devices) if len(devices) <= MOST_BARS else _quantiles(runs, values),
        ],
    )


def _device_rows(
    runs: Sequence[Digest], values: Sequence[Mapping[str, float | None]], devices: Sequence[str]
) -> Markup:
    rows = []
    for device in devices:
        of_runs = [by_device.get(device) for by_device in values]
        if common_metric(runs) == ACCURACY:
            rows.append([device, *_cells(runs, of_runs)])
        else:
            cells = (format_metric(value, run.metric) for run, value in zip(runs, of_runs, strict=True))
            rows.append([device, *cells])
    return table(["device", *column_headers(runs)], rows, class_="shares")


def _quantiles(runs: Sequence[Digest], values: Sequence[Mapping[str, float | None]]) -> Markup:
    rows = []
    for name, run, by_device in zip(run_names(runs), runs, values, strict=True):
        ordered = sorted(value for value in by_device.values() if value is not None)
        spread = [format_metric(quantile(ordered, share), run.metric) if ordered else NOTHING for _, share in QUANTILES]
        rows.append([name, str(len(ordered)), *spread])
    return table(["run", "devices", *(name for name, _ in QUANTILES)], rows)


def _cells(runs: Sequence[Digest], shares: Sequence[float | None]) -> list[Markup]:
    return [
        join([formatting.format_share(share), _bar(name, colour, share)])
        for colour, (name, share) in enumerate(zip(run_names(runs), shares, strict=True))
    ]


def _bar(name: str, colour: int, share: float | None) -> Markup:
    if share is None:
        return join()
    return bar([Slice(f"c{colour % COLOURS} fill", share, f"{name}: {formatting.format_share(share)}")], 1.0)

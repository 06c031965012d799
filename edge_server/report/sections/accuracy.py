"""Report section: final accuracy by class, compared metric by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import quantile
from edge_server.report.charts import COLOURS, Slice
from edge_server.report.digest import Digest, common_metric
from edge_server.report.formatting import NOTHING, format_metric, format_share
from edge_server.report.html import macro, render
from edge_server.report.sections.time_energy import MOST_BARS, QUANTILES
from edge_server.report.summarise import natural_order
from edge_server.report.tables import column_headers, run_names, table


def accuracy(runs: Sequence[Digest]) -> Markup | None:
    """Return the section's content; None unless some run has accuracies by class or device."""
    last_rounds = [next((round_ for round_ in reversed(run.rounds) if round_.class_accuracy), None) for run in runs]
    shares = [dict(enumerate(round_.class_accuracy)) if round_ else {} for round_ in last_rounds]
    rows = [
        [_class_name(runs, label), *_share_cells(runs, [by_label.get(label) for by_label in shares])]
        for label in range(max(map(len, shares)))
    ]
    devices = _device_table(runs)
    if not rows and devices is None:
        return None
    numbers = dict.fromkeys(str(round_.round) for round_ in last_rounds if round_)
    classes = table(["class", *column_headers(runs)], rows, "shares") if rows else None
    return render("accuracy.html", classes=classes, rounds=", ".join(numbers), devices=devices)


def _class_name(runs: Sequence[Digest], label: int) -> str:
    """Return a class's label, with its name if the runs agree on one."""
    class_names = {run.classes[label] for run in runs if label < len(run.classes)}
    return f"{label} {class_names.pop()}" if len(class_names) == 1 else str(label)


def _device_table(runs: Sequence[Digest]) -> Markup | None:
    values = [
        {device.device: value for device in run.devices if (value := device.metric_value()) is not None} for run in runs
    ]
    devices = sorted(set[str]().union(*values), key=natural_order)
    if len(devices) > MOST_BARS:
        return _quantile_table(runs, values)
    is_share = common_metric(runs) == ACCURACY
    rows: list[list[str]] = []
    for device in devices:
        of_runs = [by_device.get(device) for by_device in values]
        texts = [format_metric(value, run.metric) for run, value in zip(runs, of_runs, strict=True)]
        rows.append([device, *(_share_cells(runs, of_runs) if is_share else texts)])
    return table(["device", *column_headers(runs)], rows, "shares") if rows else None


def _quantile_table(runs: Sequence[Digest], values: Sequence[Mapping[str, float]]) -> Markup:
    rows = []
    for name, run, by_device in zip(run_names(runs), runs, values, strict=True):
        ordered = sorted(by_device.values())
        spread = [format_metric(quantile(ordered, at), run.metric) if ordered else NOTHING for at in QUANTILES.values()]
        rows.append([name, str(len(ordered)), *spread])
    return table(["run", "devices", *QUANTILES], rows)


def _share_cells(runs: Sequence[Digest], shares: Sequence[float | None]) -> list[Markup]:
    """Return each run's share in percent with a bar."""
    cells = []
    for colour, (name, share) in enumerate(zip(run_names(runs), shares, strict=True)):
        text = format_share(share)
        slices = [] if share is None else [Slice(f"c{colour % COLOURS} fill", share, f"{name}: {text}")]
        cells.append(Markup("{}{}").format(text, macro("bar")(slices, 1.0) if slices else ""))
    return cells

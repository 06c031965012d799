"""Accuracy by class of the test data and by device, of all runs side by side: a bar a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_server.report import formatting
from edge_server.report.charts import COLOURS, Slice, bar
from edge_server.report.digest import Digest, quantile
from edge_server.report.html import NOTHING, Markup, element, joined
from edge_server.report.sections.spent import MOST_BARS, SHARES
from edge_server.report.summarise import natural_order
from edge_server.report.tables import heads, names, table


def accuracy(runs: Sequence[Digest]) -> list[Markup]:
    """Return the section's content; nothing where no run knows more than one accuracy a round."""
    parts = [part for part in (_by_class(runs), _by_device(runs)) if part]
    return [joined(*parts)] if parts else []


def _by_class(runs: Sequence[Digest]) -> Markup:
    lasts = [next((one for one in reversed(run.rounds) if one.class_accuracy), None) for run in runs]
    shares = [dict(enumerate(one.class_accuracy)) if one else {} for one in lasts]
    if not any(shares):
        return joined()
    labels = range(max(map(len, shares)))
    numbers = list(dict.fromkeys(str(one.round) for one in lasts if one))
    note = (
        f"Of the aggregated model on the server's test data, after the last round that tested it: {', '.join(numbers)}"
    )
    rows = [[_class_name(runs, label), *_cells(runs, [one.get(label) for one in shares])] for label in labels]
    return joined(
        element("h4", "By class of the test data"),
        element("p", note + ".", class_="note"),
        table(["class", *heads(runs)], rows, class_="shares"),
    )


def _class_name(runs: Sequence[Digest], label: int) -> str:
    """Return a class's label, with its name where the runs agree on one."""
    found = {run.classes[label] for run in runs if label < len(run.classes)}
    return f"{label} {found.pop()}" if len(found) == 1 else str(label)


def _by_device(runs: Sequence[Digest]) -> Markup:
    found = [{one.device: one.accuracy for one in run.devices if one.accuracy is not None} for run in runs]
    devices = sorted({device for one in found for device in one}, key=natural_order)
    if not devices:
        return joined()
    return joined(
        element("h4", "By device"),
        element("p", "On what each device holds back, as it measured it last.", class_="note"),
        _each_device(runs, found, devices) if len(devices) <= MOST_BARS else _quantiles(runs, found),
    )


def _each_device(runs: Sequence[Digest], found: Sequence[Mapping[str, float | None]], devices: Sequence[str]) -> Markup:
    rows = [[device, *_cells(runs, [one.get(device) for one in found])] for device in devices]
    return table(["device", *heads(runs)], rows, class_="shares")


def _quantiles(runs: Sequence[Digest], found: Sequence[Mapping[str, float | None]]) -> Markup:
    rows = []
    for name, one in zip(names(runs), found, strict=True):
        values = sorted(share for share in one.values() if share is not None)
        spread = [formatting.share(quantile(values, share)) if values else NOTHING for _, share in SHARES]
        rows.append([name, str(len(values)), *spread])
    return table(["of devices", "known of", *(name for name, _ in SHARES)], rows)


def _cells(runs: Sequence[Digest], shares: Sequence[float | None]) -> list[Markup]:
    """Return a bar and its figure for each run, in the run's colour."""
    return [
        joined(formatting.share(share), _bar(name, colour, share))
        for colour, (name, share) in enumerate(zip(names(runs), shares, strict=True))
    ]


def _bar(name: str, colour: int, share: float | None) -> Markup:
    if share is None:
        return joined()
    return bar([Slice(f"c{colour % COLOURS} fill", share, f"{name}: {formatting.share(share)}")], 1.0)

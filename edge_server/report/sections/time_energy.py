"""Report section: time and energy by device, with quantiles over tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge_server.report import formatting
from edge_server.report.bars import Slice, bar, legend
from edge_server.report.charts import figure
from edge_server.report.digest import Amount, DeviceDigest, Digest, TaskDigest, quantile, sum_known
from edge_server.report.html import NOTHING, Markup, element, join
from edge_server.report.summarise import PARTS, sum_joules
from edge_server.report.tables import clock_kind, table

MOST_BARS = 120
"""Devices beyond which only quantiles are shown."""

QUANTILES = (
    ("least", 0.0),
    ("5 %", 0.05),
    ("25 %", 0.25),
    ("median", 0.5),
    ("75 %", 0.75),
    ("95 %", 0.95),
    ("most", 1.0),
)

PART_LABELS = {
    "exchange": "exchanging features and gradients",
    "statistics": "measuring running statistics",
    "waiting": "waiting for the others",
}

READING_HEADINGS: Mapping[str, str] = {
    "gpu.load_ratio": "highest GPU load",
    "gpu.hottest_celsius": "hottest GPU",
    "gpu.rail_watts": "highest GPU rail power",
    "memory.swap_used_bytes": "highest swap use",
}
"""Column headings of the highest readings; a column appears if some device has a value above zero."""


def activities(run: Digest) -> list[str]:
    """Return the activities of a run: exchange and statistics only if it has them."""
    measured = ["statistics"] if "statistics_bytes" in run.traffic else []
    return [part for part in PARTS if part != "exchange" or run.split] + measured


def time_and_energy(run: Digest) -> Markup:
    """Return a run's time and energy by device."""
    if not run.devices:
        return element("p", "No round has ended yet.")
    parts = [quantile_table(run)]
    if len(run.devices) <= MOST_BARS:
        parts = [
            _bars(run),
            element("details", [element("summary", "All devices as a table"), _device_table(run)]),
            *parts,
        ]
    else:
        note = f"{len(run.devices)} devices took part, too many to show each; see the CSV or JSON."
        parts.append(element("p", note))
    return join(parts)


def quantile_table(run: Digest) -> Markup:
    """Return the distribution over tasks of each known amount, with the number of tasks that know it."""
    figures: list[tuple[str, str, Callable[[TaskDigest], Amount]]] = [
        *(
            (f"{part}, {clock_kind(run)} time", "seconds", lambda task, part=part: getattr(task.seconds, part))
            for part in (*activities(run), "waiting")
        ),
        *(
            (f"{part}, energy", "joules", lambda task, part=part: getattr(task.joules, part))
            for part in activities(run)
        ),
        ("energy above idle", "joules", lambda task: task.joules.above_idle),
        *((_frames(name, run), "bytes", lambda task, name=name: getattr(task, name)) for name in run.traffic),
    ]
    rows, absent = [], []
    for name, kind, of in figures:
        amounts = [of(task) for task in run.tasks]
        known_amounts = [amount for amount in amounts if amount.value is not None and amount.whole]
        values = sorted(amount.value or 0.0 for amount in known_amounts)
        if not values:
            absent.append(name)
            continue
        quality = sum_known(known_amounts).quality
        cells = [
            formatting.format_amount(Amount(value=quantile(values, share), quality=quality), kind)
            for _, share in QUANTILES
        ]
        rows.append([name, f"{len(values)} of {len(amounts)}", *cells])
    head = ["per task", "known for", *(name for name, _ in QUANTILES)]
    note = element("p", f"Fully known for no task: {'; '.join(absent)}.", class_="note") if absent else ""
    return join([element("h4", "Quantiles over tasks"), table(head, rows) if rows else "", note])


def _frames(name: str, run: Digest) -> str:
    return formatting.bytes_label(name, split=run.split).replace("bytes", "frames")


def _bars(run: Digest) -> Markup:
    slices = {device.device: _time_slices(device, activities(run)) for device in run.devices}
    most_s = max(
        sum(slice_.size for slice_ in device_slices) for device_slices in slices.values()
    )  # a late task outlives its round
    all_joules = {device.device: sum_joules(device) for device in run.devices}
    most_j = max((amount.value or 0.0 for amount in all_joules.values()), default=0.0)
    time = [
        [
            device.device,
            bar(slices[device.device], most_s),
            formatting.format_amount(Amount(value=device.rounds_s), "seconds"),
        ]
        for device in run.devices
    ]
    energy = [
        [
            device.device,
            bar(_energy_slices(device, activities(run)), most_j),
            formatting.format_amount(all_joules[device.device], "joules"),
        ]
        for device in run.devices
    ]
    keys = [(part, PART_LABELS.get(part, part)) for part in activities(run)]
    figures = [
        figure(
            f"{clock_kind(run)} time of the rounds it was selected in",
            join(
                [
                    legend([*keys, ("waiting", PART_LABELS["waiting"]), ("unknown", "not attributed")]),
                    table(["device", "time", "total"], time, class_="bars"),
                ]
            ),
        )
    ]
    if not most_j:
        return join(
            [element("div", figures, class_="pair"), element("p", "No device measured its energy.", class_="note")]
        )
    figures.append(
        figure(
            "energy of the whole device, idle included",
            join([legend(keys), table(["device", "energy", "total"], energy, class_="bars")]),
        )
    )
    return element("div", figures, class_="pair")


def _time_slices(device: DeviceDigest, names: Sequence[str]) -> list[Slice]:
    amounts = [(part, getattr(device.seconds, part)) for part in (*names, "waiting")]
    slices = [_slice(device, part, amount, "seconds") for part, amount in amounts]
    unknown_s = max(0.0, device.rounds_s - sum(slice_.size for slice_ in slices))
    if all(amount.whole for _, amount in amounts):
        return slices
    return [
        *slices,
        Slice(
            "unknown",
            unknown_s,
            f"{device.device}: {formatting.format_amount(Amount(value=unknown_s), 'seconds')} not attributed",
        ),
    ]


def _energy_slices(device: DeviceDigest, names: Sequence[str]) -> list[Slice]:
    return [_slice(device, part, getattr(device.joules, part), "joules") for part in names]


def _slice(device: DeviceDigest, part: str, amount: Amount, kind: str) -> Slice:
    return Slice(part, amount.value or 0.0, f"{device.device}: {part} {formatting.format_amount(amount, kind)}")


def _highest_reading(device: DeviceDigest, name: str) -> str:
    value = device.most.get(name)
    if value is None:
        return NOTHING
    if name.endswith("_ratio"):
        return formatting.format_share(value)
    if name.endswith("_bytes"):
        return formatting.format_amount(Amount(value=value, quality="measured"), "bytes")
    return f"{value:.3g} {'°C' if name.endswith('_celsius') else 'W'}"


def _device_table(run: Digest) -> Markup:
    head = ["device", "board", "went away", "selected", "arrived", "late", "failed"]
    names = activities(run)
    head += [f"{part} time" for part in (*names, "waiting")] + [f"{part} energy" for part in names]
    head += ["total energy", "above idle", *(_frames(name, run) for name in run.traffic), run.metric.name]
    most_columns = {
        name: heading
        for name, heading in READING_HEADINGS.items()
        if any(device.most.get(name) for device in run.devices)
    }
    head += most_columns.values()
    rows = [
        [
            *(
                device.device,
                device.board or NOTHING,
                *map(str, (device.went_away, device.selected, device.arrived, device.late, device.failed)),
            ),
            *(formatting.format_amount(getattr(device.seconds, part), "seconds") for part in (*names, "waiting")),
            *(formatting.format_amount(getattr(device.joules, part), "joules") for part in names),
            *(
                formatting.format_amount(sum_joules(device), "joules"),
                formatting.format_amount(device.joules.above_idle, "joules"),
            ),
            *(formatting.format_amount(getattr(device, name), "bytes") for name in run.traffic),
            formatting.format_metric(device.metric_value, run.metric),
            *(_highest_reading(device, name) for name in most_columns),
        ]
        for device in run.devices
    ]
    columns = [index for index in range(len(head)) if index == 0 or any(row[index] != NOTHING for row in rows)]
    return table([head[index] for index in columns], [[row[index] for index in columns] for row in rows])

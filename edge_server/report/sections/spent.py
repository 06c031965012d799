"""Where the devices' time and energy went: a bar and a row for each, and quantiles for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge_server.report import formatting
from edge_server.report.charts import Slice, bar, figure, legend
from edge_server.report.digest import Amount, DeviceDigest, Digest, TaskDigest, quantile, sum_known
from edge_server.report.html import NOTHING, Markup, element, joined
from edge_server.report.summarise import PARTS, joules
from edge_server.report.tables import clock, table

MOST_BARS = 120
"""Devices beyond which there are only quantiles."""

SHARES = (("least", 0.0), ("5 %", 0.05), ("25 %", 0.25), ("median", 0.5), ("75 %", 0.75), ("95 %", 0.95), ("most", 1.0))

SAID = {
    "exchange": "exchanging features and gradients",
    "statistics": "measuring running statistics",
    "waiting": "waiting for the others",
}

MOST: Mapping[str, str] = {
    "gpu.load_ratio": "highest GPU load",
    "gpu.hottest_celsius": "hottest GPU",
    "gpu.rail_watts": "most of the GPU's rail",
    "memory.swap_used_bytes": "most swap",
}
"""Headings of what was highest, by reading; a column is there where some device had more than nothing of it."""


def parts(run: Digest) -> list[str]:
    """Return what a run's time and energy went into: an exchange and a measurement only where there was one."""
    measured = ["statistics"] if "statistics_bytes" in run.traffic else []
    return [part for part in PARTS if part != "exchange" or run.split] + measured


def spent(run: Digest) -> Markup:
    """Return a run's time and energy by device."""
    if not run.devices:
        return element("p", "No round has ended: no device has spent anything.")
    parts = [quantiles(run)]
    if len(run.devices) <= MOST_BARS:
        parts = [_bars(run), element("details", element("summary", "Every device in figures"), _figures(run)), *parts]
    else:
        said = f"{len(run.devices)} devices took part, too many to show one by one; the CSV and JSON hold each of them."
        parts.append(element("p", said))
    return joined(*parts)


def quantiles(run: Digest) -> Markup:
    """Return how the tasks spread: of those of which a figure is known, and how many these are."""
    figures: list[tuple[str, str, Callable[[TaskDigest], Amount]]] = [
        *(
            (f"{part}, {clock(run)} time", "seconds", lambda task, part=part: getattr(task.seconds, part))
            for part in (*parts(run), "waiting")
        ),
        *((f"{part}, energy", "joules", lambda task, part=part: getattr(task.joules, part)) for part in parts(run)),
        ("energy above idle", "joules", lambda task: task.joules.above_idle),
        *((_frames(name, run), "bytes", lambda task, name=name: getattr(task, name)) for name in run.traffic),
    ]
    rows, absent = [], []
    for name, kind, of in figures:
        amounts = [of(task) for task in run.tasks]
        known = [one for one in amounts if one.value is not None and one.whole]
        values = sorted(one.value or 0.0 for one in known)
        if not values:
            absent.append(name)
            continue
        quality = sum_known(known).quality
        cells = [formatting.amount(Amount(value=quantile(values, share), quality=quality), kind) for _, share in SHARES]
        rows.append([name, f"{len(values)} of {len(amounts)}", *cells])
    head = ["of a device's task", "known of", *(name for name, _ in SHARES)]
    note = element("p", f"Known in full of no task: {'; '.join(absent)}.", class_="note") if absent else ""
    return joined(element("h4", "All tasks, in quantiles"), table(head, rows) if rows else "", note)


def _frames(name: str, run: Digest) -> str:
    return formatting.bytes_label(name, split=run.split).replace("bytes", "frames")


def _bars(run: Digest) -> Markup:
    slices = {one.device: _time(one, parts(run)) for one in run.devices}
    most_s = max(sum(slice_.size for slice_ in found) for found in slices.values())  # a late task outlives its round
    all_joules = {one.device: joules(one) for one in run.devices}
    most_j = max((one.value or 0.0 for one in all_joules.values()), default=0.0)
    time = [
        [one.device, bar(slices[one.device], most_s), formatting.amount(Amount(value=one.rounds_s), "seconds")]
        for one in run.devices
    ]
    energy = [
        [one.device, bar(_energy(one, parts(run)), most_j), formatting.amount(all_joules[one.device], "joules")]
        for one in run.devices
    ]
    keys = [(part, SAID.get(part, part)) for part in parts(run)]
    figures = [
        figure(
            f"{clock(run)} time of the rounds it was selected in",
            legend(*keys, ("waiting", SAID["waiting"]), ("unknown", "not told apart")),
            table(["device", "time", "in all"], time, class_="bars"),
        )
    ]
    if not most_j:
        return joined(
            element("div", *figures, class_="pair"), element("p", "No device knows its energy.", class_="note")
        )
    figures.append(
        figure(
            "energy of the whole device, idle included",
            legend(*keys),
            table(["device", "energy", "in all"], energy, class_="bars"),
        )
    )
    return element("div", *figures, class_="pair")


def _time(one: DeviceDigest, names: Sequence[str]) -> list[Slice]:
    found = [(part, getattr(one.seconds, part)) for part in (*names, "waiting")]
    slices = [_slice(one, part, amount, "seconds") for part, amount in found]
    left = max(0.0, one.rounds_s - sum(slice_.size for slice_ in slices))
    if all(amount.whole for _, amount in found):
        return slices
    return [
        *slices,
        Slice("unknown", left, f"{one.device}: {formatting.amount(Amount(value=left), 'seconds')} not told apart"),
    ]


def _energy(one: DeviceDigest, names: Sequence[str]) -> list[Slice]:
    return [_slice(one, part, getattr(one.joules, part), "joules") for part in names]


def _slice(one: DeviceDigest, part: str, amount: Amount, kind: str) -> Slice:
    return Slice(part, amount.value or 0.0, f"{one.device}: {part} {formatting.amount(amount, kind)}")


def _most(device: DeviceDigest, name: str) -> str:
    value = device.most.get(name)
    if value is None:
        return NOTHING
    if name.endswith("_ratio"):
        return formatting.share(value)
    if name.endswith("_bytes"):
        return formatting.amount(Amount(value=value, quality="measured"), "bytes")
    return f"{value:.3g} {'°C' if name.endswith('_celsius') else 'W'}"


def _figures(run: Digest) -> Markup:
    head = ["device", "board", "went away", "selected", "arrived", "late", "failed"]
    names = parts(run)
    head += [f"{part} time" for part in (*names, "waiting")] + [f"{part} energy" for part in names]
    head += ["energy in all", "above idle", *(_frames(name, run) for name in run.traffic), "accuracy"]
    shown = {name: heading for name, heading in MOST.items() if any(one.most.get(name) for one in run.devices)}
    head += shown.values()
    rows = [
        [
            *(
                one.device,
                one.board or NOTHING,
                *map(str, (one.went_away, one.selected, one.arrived, one.late, one.failed)),
            ),
            *(formatting.amount(getattr(one.seconds, part), "seconds") for part in (*names, "waiting")),
            *(formatting.amount(getattr(one.joules, part), "joules") for part in names),
            *(formatting.amount(joules(one), "joules"), formatting.amount(one.joules.above_idle, "joules")),
            *(formatting.amount(getattr(one, name), "bytes") for name in run.traffic),
            formatting.share(one.accuracy),
            *(_most(one, name) for name in shown),
        ]
        for one in run.devices
    ]
    known = [place for place in range(len(head)) if place == 0 or any(row[place] != NOTHING for row in rows)]
    return table([head[place] for place in known], [[row[place] for place in known] for row in rows])

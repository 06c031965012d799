"""What is said of one device: by its reports, by its tasks so far, by the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_server.allocation.experience import Experience, Task
from edge_server.allocation.figures import Word, chosen
from edge_server.allocation.resources import Resources, resources
from edge_server.journal.decision import Figure
from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink, RangeLink, WirelessLink
from edge_server.plan.optimizer import BandwidthOptions, KeepOptions
from edge_server.plan.radio import usual_rates
from edge_server.plan.simulated_devices import GivenCompute, RangeCompute, Span, ends
from shared.protocol.messages import Report

MEGA = 1e6


@dataclass(frozen=True)
class Said:
    """One device.

    Attributes:
        report: Its last one, if it reported.
        known: What was measured of it before round 1, and of its link.
        task: The newest of which it told a cost.
        carried: The newest of which it told what its upload took.
        planned: What the plan says of it.
    """

    report: Report | None
    known: Resources
    task: Task | None
    carried: Task | None
    planned: DevicePlan | None


def said(device: str, reports: Mapping[str, Report], experience: Experience, planned: DevicePlan | None) -> Said:
    """Return what is said of a device."""
    report = reports.get(device)
    known, tasks = resources(experience.steps.get(device), report, 1), experience.tasks.get(device)
    return Said(report, known, tasks, experience.carried.get(device), planned)


def link_words(one: Said, options: BandwidthOptions | KeepOptions) -> dict[str, Word]:
    """Return what is said of its link."""
    up, down = _planned_rates(one.planned)
    return {
        "up_bits_per_s": Word(
            _reading(one, "link.up_bits_per_s") or (one.carried.up_bits_per_s if one.carried else None),
            _is_stale(one, "link.up_bits_per_s", options.stale_s),
            up,
            options.up_bits_per_s,
        ),
        "down_bits_per_s": Word(
            _reading(one, "link.down_bits_per_s") or (one.task.down_bits_per_s if one.task else None),
            _is_stale(one, "link.down_bits_per_s", options.stale_s),
            down,
            options.down_bits_per_s,
        ),
        "f_hertz": Word(one.known.f_hertz),
        "tx_w": Word(one.known.tx_w),
        "memory_bytes": Word(_reading(one, "memory.available_bytes")),
    }


def error_words(device: str, experience: Experience, one: Said, *, steps: bool) -> dict[str, Word]:
    """Return by how much to put predictions right.

    What was found out from the costs of tasks is right by itself; only another measurement has an error to correct,
    and a rate that a device was held to.
    """
    errors = experience.errors.get(device, {})
    words = {}
    is_held = one.carried is not None and one.carried.is_held
    if (is_held or _reading(one, "link.up_bits_per_s")) and "upload_error" in errors:
        words["upload_error"] = Word(errors["upload_error"])
    if steps and one.known.mu_s and "compute_error" in errors:
        words["compute_error"] = Word(errors["compute_error"])
    return words


def figures_of(
    words: Mapping[str, Word], last: Mapping[str, Figure], options: BandwidthOptions | KeepOptions
) -> dict[str, Figure]:
    """Return the figures to decide from."""
    found = {}
    for name, word in words.items():
        is_error = name.endswith("_error")  # it is smoothed already, and belongs to no earlier round
        smoothing = 0.0 if is_error else options.smoothing
        figure = chosen(name, word, None if is_error else last.get(name), jump=options.jump, smoothing=smoothing)
        if figure:
            found[name] = figure
    return found


def planned_task_s(one: Said) -> float | None:
    """Return the seconds of a task as the plan has them."""
    if one.planned is None:
        return None
    match one.planned.compute:
        case None:
            return one.planned.compute_s
        case GivenCompute() as compute:
            return compute.seconds
        case _:
            return None


def planned_step_s(one: Said, weights: float) -> float | None:
    """Return the seconds of a local iteration by the cycles and the clock that the plan gives the device."""
    compute = one.planned.compute if one.planned else None
    if not isinstance(compute, RangeCompute):
        return None
    cycles = compute.cycles_per_step or (compute.cycles_per_weight or 0.0) * weights
    return 2 * cycles / sum(ends(compute.hertz)) if cycles else None


def _planned_rates(planned: DevicePlan | None) -> tuple[float | None, float | None]:
    if planned is None:
        return None, None
    if isinstance(planned.link, WirelessLink):
        return usual_rates(planned.link)
    rates: tuple[Span | None, Span | None] = (planned.up_mbit_s, planned.down_mbit_s)
    if isinstance(planned.link, GivenLink | RangeLink):
        rates = (planned.link.up_mbit_s, planned.link.down_mbit_s)
    up, down = (None if rate is None else MEGA * sum(ends(rate)) / 2 for rate in rates)
    return up, down


def _reading(one: Said, name: str) -> float | None:
    reading = one.report.readings.get(name) if one.report else None
    return reading.value if reading else None


def _is_stale(one: Said, name: str, stale_s: float) -> bool:
    reading = one.report.readings.get(name) if one.report else None
    return bool(one.report and reading and one.report.at - reading.at > stale_s)

"""Device facts: measurements, last report, plan entry and earlier tasks.

Measured figures are in the papers' symbols. A. HCEF (P2): mu_n seconds and alpha_n joules of one local iteration, nu_n
seconds to upload the full model, p_n watts while sending. Pruned personalization: C_k cycles per weight and local
iteration, f_k hertz, R_k bit/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.allocation.experience import Experience, PastTask
from edge_server.allocation.figures import Estimate
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.claims import drop_implausible
from edge_server.journal.decision import Figure
from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink, RangeLink, WirelessLink
from edge_server.plan.radio import mean_rates
from edge_server.plan.simulated_devices import GivenCompute, RangeCompute, Span, range_ends
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Report

MEGA = 1e6
STALE_S = 3600.0
"""Age beyond which a reading counts as the last good value, not as a new measurement."""


@dataclass(frozen=True)
class MeasuredResources:
    """Measured resources of one device; None if not measured.

    Attributes:
        mu_s: Seconds of one local iteration.
        alpha_joules: Joules of one local iteration, beyond what the idle device draws.
        nu_s: Seconds to upload the full model.
        tx_w: Watts while sending, beyond what the idle device draws; p_n.
        cycles_per_weight: CPU cycles of one local iteration over the network's weights; C_k.
        f_hertz: Clock of the CPU while it trains; f_k.
        up_bits_per_s: Goodput from the device; R_k.
        weights: Trainable parameters; N.
        flops: Floating-point operations of one local iteration.
    """

    mu_s: float | None = None
    alpha_joules: float | None = None
    nu_s: float | None = None
    tx_w: float | None = None
    cycles_per_weight: float | None = None
    f_hertz: float | None = None
    up_bits_per_s: float | None = None
    weights: int | None = None
    flops: int | None = None


def measured_resources(step: StepCost | None, report: Report | None, model_bytes: int) -> MeasuredResources:
    """Derive a device's resources from its step cost and last report.

    Args:
        model_bytes: Upload size of the full model.
    """
    rate = _rate(report)
    link = MeasuredResources(
        nu_s=8 * model_bytes / rate if rate else None,
        tx_w=_sending_w(report),
        up_bits_per_s=rate,
    )
    if step is None:
        return link
    return MeasuredResources(
        mu_s=step.seconds,
        alpha_joules=_beyond_idle(step.joules, step.idle_w, step.seconds),
        nu_s=link.nu_s,
        tx_w=link.tx_w,
        cycles_per_weight=step.cycles / step.weights if step.cycles is not None and step.weights else None,
        f_hertz=step.hertz,
        up_bits_per_s=rate,
        weights=step.weights,
        flops=step.flops,
    )


def _rate(report: Report | None) -> float | None:
    reading = report.readings.get("link.up_bits_per_s") if report else None
    return reading.value if reading and 0 < reading.value < math.inf else None


def _sending_w(report: Report | None) -> float | None:
    """Return watts beyond idle during the last settled upload."""
    cost = drop_implausible(report.spent.cost) if report and report.spent else None
    if cost is None or not cost.upload_s:
        return None
    extra = _beyond_idle(cost.upload_joules, cost.idle_w, cost.upload_s)
    return None if extra is None else extra / cost.upload_s


def _beyond_idle(joules: float | None, idle_w: float | None, seconds: float) -> float | None:
    """Return the joules beyond idle, at least zero: noise can make small increments negative."""
    return None if joules is None or idle_w is None else max(0.0, joules - idle_w * seconds)


@dataclass(frozen=True)
class DeviceFacts:
    """Known facts about one device before a decision.

    Attributes:
        report: Last report.
        resources: Measurements before round 1, and of the link.
        timed: Cost of a training step, measured before round 1.
        task: Newest task with a reported cost.
        last_upload: Newest task with a reported upload time.
        planned: Entry in the plan.
        errors: Smoothed ratio measured / predicted, by part of a cost.
        last: Figures used last, by name.
        metrics: Metrics of the newest update, or of the measurement before round 1.
    """

    report: Report | None = None
    resources: MeasuredResources = MeasuredResources()
    timed: StepCost | None = None
    task: PastTask | None = None
    last_upload: PastTask | None = None
    planned: DevicePlan | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, Figure] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def device_facts(
    device: str, reports: Mapping[str, Report], experience: Experience, planned: DevicePlan | None
) -> DeviceFacts:
    """Collect the facts about a device from its report, the journal and the plan."""
    report, timed = reports.get(device), experience.steps.get(device)
    return DeviceFacts(
        report=report,
        resources=measured_resources(timed, report, 1),
        timed=timed,
        task=experience.tasks.get(device),
        last_upload=experience.last_upload.get(device),
        planned=planned,
        errors=experience.errors.get(device, {}),
        last=experience.last.get(device, {}),
        metrics=experience.metrics.get(device, {}),
    )


def link_estimates(device: DeviceFacts, options: MeasuringOptions) -> dict[str, Estimate]:
    """Return estimates of link rates, clock and free memory."""
    up, down = _planned_rates(device.planned)
    return {
        "up_bits_per_s": Estimate(
            _reading(device, "link.up_bits_per_s")
            or (device.last_upload.up_bits_per_s if device.last_upload else None),
            _is_stale(device, "link.up_bits_per_s"),
            up,
            options.up_bits_per_s,
        ),
        "down_bits_per_s": Estimate(
            _reading(device, "link.down_bits_per_s") or (device.task.down_bits_per_s if device.task else None),
            _is_stale(device, "link.down_bits_per_s"),
            down,
            options.down_bits_per_s,
        ),
        "f_hertz": Estimate(device.resources.f_hertz),
        "memory_bytes": Estimate(_reading(device, "memory.available_bytes")),
    }


def error_estimates(device: DeviceFacts, *, steps: bool) -> dict[str, Estimate]:
    """Return correction factors of predictions.

    Figures derived from task costs need no correction; only figures measured otherwise do, and a rate that the device
    was limited to.
    """
    errors, estimates = device.errors, {}
    is_rate_limited = device.last_upload is not None and device.last_upload.is_rate_limited
    if (is_rate_limited or _reading(device, "link.up_bits_per_s")) and "upload_error" in errors:
        estimates["upload_error"] = Estimate(errors["upload_error"])
    if steps and device.resources.mu_s and "compute_error" in errors:
        estimates["compute_error"] = Estimate(errors["compute_error"])
    return estimates


def planned_task_s(device: DeviceFacts) -> float | None:
    """Return the seconds of a task given in the plan."""
    if device.planned is None:
        return None
    match device.planned.compute:
        case None:
            return device.planned.compute_s
        case GivenCompute() as compute:
            return compute.seconds
        case _:
            return None


def planned_step_s(device: DeviceFacts, weights: float) -> float | None:
    """Return the seconds of a local iteration from the plan's cycles and clock."""
    compute = device.planned.compute if device.planned else None
    if not isinstance(compute, RangeCompute):
        return None
    cycles = compute.cycles_per_step or (compute.cycles_per_weight or 0.0) * weights
    return 2 * cycles / sum(range_ends(compute.hertz)) if cycles else None


def _planned_rates(planned: DevicePlan | None) -> tuple[float | None, float | None]:
    if planned is None:
        return None, None
    if isinstance(planned.link, WirelessLink):
        return mean_rates(planned.link)
    rates: tuple[Span | None, Span | None] = (planned.up_mbit_s, planned.down_mbit_s)
    if isinstance(planned.link, GivenLink | RangeLink):
        rates = (planned.link.up_mbit_s, planned.link.down_mbit_s)
    up, down = (None if rate is None else MEGA * sum(range_ends(rate)) / 2 for rate in rates)
    return up, down


def _reading(device: DeviceFacts, name: str) -> float | None:
    reading = device.report.readings.get(name) if device.report else None
    return reading.value if reading else None


def _is_stale(device: DeviceFacts, name: str) -> bool:
    reading = device.report.readings.get(name) if device.report else None
    return bool(device.report and reading and device.report.at - reading.at > STALE_S)

"""What a coordinator's optimizers are told of a device: measured figures in the papers' symbols.

A. HCEF (P2): mu_n seconds and alpha_n joules of one local iteration, nu_n seconds to upload the full model, p_n watts
while sending. Pruned personalization: C_k cycles per weight and local iteration, f_k hertz, R_k bit/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_server.journal.plausible import plausible
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Report


@dataclass(frozen=True)
class Resources:
    """One device; None for what nobody measured.

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


def resources(step: StepCost | None, report: Report | None, model_bytes: int) -> Resources:
    """Return what is known of a device.

    Args:
        step: What a training step costs it, if it was measured.
        report: What it reported last, if it did.
        model_bytes: Of the full model as it is uploaded.
    """
    rate = _rate(report)
    known = Resources(
        nu_s=8 * model_bytes / rate if rate else None,
        tx_w=_sending_w(report),
        up_bits_per_s=rate,
    )
    if step is None:
        return known
    return Resources(
        mu_s=step.seconds,
        alpha_joules=_beyond_idle(step.joules, step.idle_w, step.seconds),
        nu_s=known.nu_s,
        tx_w=known.tx_w,
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
    """Return watts beyond idle during the upload that was settled last."""
    cost = plausible(report.spent.cost) if report and report.spent else None
    if cost is None or not cost.upload_s:
        return None
    extra = _beyond_idle(cost.upload_joules, cost.idle_w, cost.upload_s)
    return None if extra is None else extra / cost.upload_s


def _beyond_idle(joules: float | None, idle_w: float | None, seconds: float) -> float | None:
    """Return the increment, never below zero: noise may make it so where little is drawn beyond idle."""
    return None if joules is None or idle_w is None else max(0.0, joules - idle_w * seconds)

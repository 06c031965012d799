"""Format an allocation explanation as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.allocation.explain import DeviceExplanation, Explanation
from edge_server.journal.decision import Source
from shared.protocol.measurements import JOULES, Cost
from shared.protocol.messages import Value
from shared.registry import find

PARTS: Mapping[str, Label] = {
    "compute_s": ("computing", 1.0, "s"),
    "upload_s": ("upload", 1.0, "s"),
    "download_s": ("download", 1.0, "s"),
    "download_joules": ("download", 1.0, "J"),
    "compute_joules": ("computing", 1.0, "J"),
    "upload_joules": ("upload", 1.0, "J"),
    "bytes_up": ("sent", 1e-3, "kB"),
}


LIMITS: Mapping[str, Label] = {
    "joules": ("joules per task", 1.0, "J"),
    "round_joules": ("joules per round", 1.0, "J"),
    "backhaul_s": ("mixing at the end of the global round", 1.0, "s"),
    "spread_joules": ("of which moved here from other rounds for estimates", 1.0, "J"),
    "spent_s": ("spent time of the run", 1.0, "s"),
    "spent_joules": ("spent energy of the run", 1.0, "J"),
    "weights": ("weights", 1.0, ""),
    "weights_global": ("of which shared", 1.0, ""),
    "model_bytes": ("model", 1e-3, "kB"),
    "download_bytes": ("download", 1e-3, "kB"),
    "dense_bytes": ("never pruned", 1e-3, "kB"),
    "most_share": ("per device at most", 1e2, "% of the uplink"),
    "personal_steps": ("personal steps", 1.0, ""),
    "warmup_steps": ("warm-up", 1.0, ""),
    "global_steps": ("global", 1.0, ""),
    "local_steps": ("local steps", 1.0, ""),
    "gradients": ("gradients for estimates", 1.0, ""),
    "gradients_left": ("of which in the remaining rounds", 1.0, ""),
}


FIGURES: Mapping[str, Label] = {
    "up_bits_per_s": ("uplink", 1e-6, "Mbit/s"),
    "down_bits_per_s": ("downlink", 1e-6, "Mbit/s"),
    "step_s": ("local step", 1e3, "ms"),
    "step_joules": ("local step", 1.0, "J"),
    "task_s": ("task with the whole model", 1.0, "s"),
    "task_joules": ("computing the whole model", 1.0, "J"),
    "compute_w": ("computing", 1.0, "W"),
    "upload_w": ("sending", 1.0, "W"),
    "download_w": ("receiving", 1.0, "W"),
    "download_joules": ("download", 1.0, "J"),
    "tx_w": ("sending", 1.0, "W above idle"),
    "f_hertz": ("clock", 1e-9, "GHz"),
    "memory_bytes": ("free memory", 1e-6, "MB"),
    "keep": ("fixed since its first task", 1e2, "% of the neurons"),
    "sigma2": ("variance of its gradients", 1.0, ""),
    "g2": ("their squared norm", 1.0, ""),
}


ERRORS = {"compute_error": "computing", "upload_error": "upload", "joules_error": "joules"}


SOURCES: Mapping[Source, str] = {
    "measured": "measured",
    "last_good": "last good value",
    "profile": "from the plan",
    "default": "default",
}


VALUES: Mapping[str, Label] = {
    "prune": ("of the shared weights pruned", 1e2, "%"),
    "keep": ("of the neurons kept", 1e2, "%"),
    "share": ("of the uplink", 1e2, "%"),
    "up_bits_per_s": ("at most", 1e-6, "Mbit/s"),
    "steps": ("of the local steps", 1e2, "%"),
    "sent": ("of the change sent", 1e2, "%"),
}


BUYS = {"second": "second of deadline", "joule": "J", "megahertz": "MHz of clock", "megabit_per_s": "Mbit/s of link"}


WORDS = {
    "interior": "the shared bandwidth",
    "floor": "its floor: the bandwidth gains more on other devices",
    "time": "its own deadline",
    "full": "nothing: it has all that it can use",
    "nothing": "the other devices: the bandwidth gains more there",
    "out": "its exclusion: no time left, no link, or no clock",
    "unknown": "missing or invalid figures",
    "energy": "its joules",
    "memory": "its memory",
    "settled": "its first value: this method fixes it for the whole run",
    "fairness": "the maximum share of the uplink per device (fairness)",
    "cluster": "the fixed ratio of its cluster",
    "round_joules": "the shared joules of the round",
    "least": "the floors rho_min and theta_min",
    "baseline": "nothing: this baseline ignores budgets",
}


NOTHING = 1e-9
"""Smallest margin that is shown; below it is rounding error of deciding twice."""


Label = tuple[str, float, str]
"""Label of a figure, factor to its display unit, name of that unit."""


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the lines that `edge-server explain` prints."""
    deadline = explanation.limits.get("deadline_s")
    yield f"round {explanation.named}: {explanation.optimizer} decided" + (
        f", for tasks within {deadline:.4g} s" if deadline else ""
    )
    if limits := [
        _format_figure(LIMITS, name, explanation.limits[name]) for name in LIMITS if name in explanation.limits
    ]:
        yield f"  {', '.join(limits)}"
    if explanation.objective is not None:
        allocator, price = find(ALLOCATORS, explanation.optimizer, "optimizer"), explanation.multiplier
        margin = f"; one more {allocator.shared} would lower it by {price:.4g}" if price else ""
        yield f"  {allocator.objective} {explanation.objective:.4g}{margin}"
    if not explanation.feasible:
        enough = ", ".join(f"{name} {value:.4g}" for name, value in explanation.enough.items())
        yield f"  not all devices can meet the limits; sufficient: {enough or 'no limit'}"
    tasks = {device.device: _task_s(device.measured) for device in explanation.devices if device.measured}
    if deadline and (durations := {name: seconds for name, seconds in tasks.items() if seconds is not None}):
        name, seconds = max(durations.items(), key=lambda pair: pair[1])
        share = seconds / deadline
        yield f"  longest task: {seconds:.4g} s of computing and upload ({name}), {share:.2f} of the limit"
    if explanation.seconds is not None:
        yield f"  the round took {explanation.seconds:.4g} s, including downloads and waiting"
    for device in explanation.devices:
        yield from _device_lines(device)
        if explanation.limits.keys() & {"joules", "round_joules"} and device.predicted.compute_joules is None:
            yield "  its joules were unknown, so the joule limit did not apply"


def _task_s(cost: Cost) -> float | None:
    """Return the seconds that count against a task's deadline; None if one is not reported."""
    return None if cost.compute_s is None or cost.upload_s is None else cost.compute_s + cost.upload_s


def _device_lines(device: DeviceExplanation) -> Iterator[str]:
    values = ", ".join(_format_value(name, value) for name, value in device.values.items())
    yield f"{device.device}: {values or 'the defaults'}"
    multiplier = "" if device.multiplier is None else f" (multiplier {device.multiplier:.4g})"
    yield f"  limited by {WORDS.get(device.binding, device.binding)}{multiplier}"
    if margins := [
        f"{100 * more:.3g} % per additional {BUYS[what]}" for what, more in device.buys.items() if more > NOTHING
    ]:
        yield f"  increase in the keep ratio: {', '.join(margins)}"
    for source, label in SOURCES.items():
        figures = {name: figure.value for name, figure in device.figures.items() if figure.source == source}
        if texts := [
            _format_figure(FIGURES, name, figures[name])
            for name in (*FIGURES, *figures)
            if name in figures.keys() - ERRORS
        ]:
            yield f"  {label}: {', '.join(dict.fromkeys(texts))}"
    if errors := [f"{ERRORS[name]} {device.figures[name].value:.3g}" for name in ERRORS if name in device.figures]:
        yield f"  correction factors from earlier rounds: {', '.join(errors)}"
    for part in PARTS:
        if (line := _comparison_line(part, device.predicted, device.measured)) is not None:
            yield line
    if device.predicted.compute_joules is not None:
        yield _task_joules_line(device.predicted, device.measured)


def _task_joules_line(predicted: Cost, measured: Cost | None) -> str:
    """Return the line of a task's joules, summed over the predicted parts, as limits and budgets count them."""
    names = [name for name in JOULES if getattr(predicted, name) is not None]
    expected = math.fsum(getattr(predicted, name) for name in names)
    measured_joules = [joules for name in names if measured and (joules := getattr(measured, name)) is not None]
    if len(measured_joules) < len(names):
        return f"  the task: {expected:.4g} J predicted, not measured as a whole"
    off = f" ({100 * (math.fsum(measured_joules) / expected - 1):+.0f} %)" if expected else ""
    return f"  the task: {expected:.4g} J predicted, {math.fsum(measured_joules):.4g} measured{off}"


def _comparison_line(part: str, predicted: Cost, measured: Cost | None) -> str | None:
    expected, actual = getattr(predicted, part), getattr(measured, part) if measured else None
    label, factor, unit = PARTS[part]
    if expected is None:
        return None
    if actual is None:
        return f"  {label}: {factor * expected:.4g} {unit} predicted, not measured"
    off = f" ({100 * (actual / expected - 1):+.0f} %)" if expected else ""
    return f"  {label}: {factor * expected:.4g} {unit} predicted, {factor * actual:.4g} measured{off}"


def _format_value(name: str, value: Value) -> str:
    if name not in VALUES or not isinstance(value, float | int):
        return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
    label, factor, unit = VALUES[name]
    amount = f"{factor * value:.3g} {unit}"
    return f"{label} {amount}" if name == "up_bits_per_s" else f"{amount} {label}"


def _format_figure(labels: Mapping[str, Label], name: str, value: float) -> str:
    label, factor, unit = labels.get(name, (name, 1.0, ""))
    number = f"{factor * value:,.0f}" if abs(factor * value) >= 1000 else f"{factor * value:.3g}"  # noqa: PLR2004
    return f"{label} {number} {unit}".rstrip()

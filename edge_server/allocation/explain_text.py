"""An explanation as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_server.allocation.explain import Explained, Explanation
from edge_server.journal.decision import Source
from shared.protocol.measurements import Cost
from shared.protocol.messages import Value

Label = tuple[str, float, str]
"""What people call a figure, and its unit: what to multiply by, and the unit's name."""

PARTS: Mapping[str, Label] = {
    "compute_s": ("computing", 1.0, "s"),
    "upload_s": ("upload", 1.0, "s"),
    "download_s": ("download", 1.0, "s"),
    "compute_joules": ("computing", 1.0, "J"),
    "upload_joules": ("upload", 1.0, "J"),
    "bytes_up": ("sent", 1e-3, "kB"),
}
LIMITS: Mapping[str, Label] = {
    "joules": ("joules of a task", 1.0, "J"),
    "spent_s": ("of the run's time is spent", 1.0, "s"),
    "spent_joules": ("of the run's energy is spent", 1.0, "J"),
    "weights": ("weights", 1.0, ""),
    "weights_global": ("of them shared", 1.0, ""),
    "model_bytes": ("the model", 1e-3, "kB"),
    "dense_bytes": ("never pruned", 1e-3, "kB"),
    "personal_steps": ("personal steps", 1.0, ""),
    "warmup_steps": ("warm-up", 1.0, ""),
    "global_steps": ("global", 1.0, ""),
}
FIGURES: Mapping[str, Label] = {
    "up_bits_per_s": ("uplink", 1e-6, "Mbit/s"),
    "down_bits_per_s": ("downlink", 1e-6, "Mbit/s"),
    "step_s": ("a local step", 1e3, "ms"),
    "task_s": ("a task of the whole model", 1.0, "s"),
    "task_joules": ("a task of the whole model", 1.0, "J"),
    "tx_w": ("sending", 1.0, "W"),
    "f_hertz": ("clock", 1e-9, "GHz"),
    "memory_bytes": ("free memory", 1e-6, "MB"),
}
ERRORS = {"compute_error": "computing", "upload_error": "upload"}
SOURCES: Mapping[Source, str] = {
    "measured": "measured",
    "last_good": "measured last",
    "profile": "as the plan says",
    "default": "guessed",
}
VALUES: Mapping[str, Label] = {
    "prune": ("of the shared weights pruned", 1e2, "%"),
    "keep": ("of the neurons kept", 1e2, "%"),
    "share": ("of the uplink", 1e2, "%"),
    "up_bits_per_s": ("at most", 1e-6, "Mbit/s"),
}
BUYS = {"second": "second of deadline", "joule": "J", "megahertz": "MHz of clock", "megabit_per_s": "Mbit/s of link"}
WORDS = {
    "interior": "the bandwidth that all share",
    "floor": "its floor: the others make more of the bandwidth",
    "time": "its own deadline",
    "full": "nothing: it has all that it can use",
    "nothing": "the others make more of the bandwidth",
    "out": "it cannot take part: no time is left to it, or it has no link or clock",
    "unknown": "nothing is known of it",
    "energy": "its joules",
    "memory": "its memory",
    "cluster": "its cluster's ratio, whatever it measures",
}
NOTHING = 1e-9
"""What is less buys nothing: it is a rounding error of deciding twice."""


def lines(found: Explanation) -> Iterator[str]:
    """Yield the lines."""
    deadline = found.limits.get("deadline_s")
    yield f"round {found.round}: {found.optimizer} decided" + (
        f", for tasks within {deadline:.4g} s" if deadline else ""
    )
    if limits := [_amount(LIMITS, name, found.limits[name]) for name in LIMITS if name in found.limits]:
        yield f"  {', '.join(limits)}"
    if found.objective is not None:
        yield f"  pruned of all devices together {found.objective:.4g}" + (
            f"; one more of the whole uplink would save {found.multiplier:.4g} of it" if found.multiplier else ""
        )
    if not found.feasible:
        enough = ", ".join(f"{name} {value:.4g}" for name, value in found.enough.items())
        yield f"  the limits cannot be met by all; {enough or 'nothing'} would do"
    tasks = {one.device: _task_s(one.measured) for one in found.devices if one.measured}
    if deadline and (known := {name: took for name, took in tasks.items() if took is not None}):
        name, took = max(known.items(), key=lambda pair: pair[1])
        yield f"  the longest task took {took:.4g} s, computing and upload ({name}): {took / deadline:.2f} of the limit"
    if found.seconds is not None:
        yield f"  the round took {found.seconds:.4g} s, with downloads and all waiting"
    for one in found.devices:
        yield from _device(one)
        if "joules" in found.limits and "task_joules" not in one.figures:
            yield "  nobody knows its joules: their limit did not hold it back"


def _task_s(cost: Cost) -> float | None:
    """Return the seconds that a deadline of tasks counts; None where the device did not tell them all."""
    return None if cost.compute_s is None or cost.upload_s is None else cost.compute_s + cost.upload_s


def _device(one: Explained) -> Iterator[str]:
    given = ", ".join(_given(name, value) for name, value in one.values.items())
    yield f"{one.device}: {given or 'the defaults'}"
    multiplier = "" if one.multiplier is None else f" (multiplier {one.multiplier:.4g})"
    yield f"  held back by {WORDS.get(one.binding, one.binding)}{multiplier}"
    if bought := [f"{100 * more:.3g} % by one more {BUYS[what]}" for what, more in one.buys.items() if more > NOTHING]:
        yield f"  would keep more of the model: {', '.join(bought)}"
    for source, said in SOURCES.items():
        told = {name: figure.value for name, figure in one.figures.items() if figure.source == source}
        if known := [_amount(FIGURES, name, told[name]) for name in (*FIGURES, *told) if name in told.keys() - ERRORS]:
            yield f"  {said}: {', '.join(dict.fromkeys(known))}"
    if errors := [f"{ERRORS[name]} {one.figures[name].value:.3g}" for name in ERRORS if name in one.figures]:
        yield f"  predictions multiplied, as earlier rounds taught: {', '.join(errors)}"
    for part in PARTS:
        if (line := _compared(part, one.predicted, one.measured)) is not None:
            yield line


def _compared(part: str, predicted: Cost, measured: Cost | None) -> str | None:
    expected, found = getattr(predicted, part), getattr(measured, part) if measured else None
    label, factor, unit = PARTS[part]
    if expected is None:
        return None
    if found is None:
        return f"  {label}: {factor * expected:.4g} {unit} predicted, not measured"
    off = f" ({100 * (found / expected - 1):+.0f} %)" if expected else ""
    return f"  {label}: {factor * expected:.4g} {unit} predicted, {factor * found:.4g} measured{off}"


def _given(name: str, value: Value) -> str:
    if name not in VALUES or not isinstance(value, float | int):
        return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
    label, factor, unit = VALUES[name]
    amount = f"{factor * value:.3g} {unit}"
    return f"{label} {amount}" if name == "up_bits_per_s" else f"{amount} {label}"


def _amount(labels: Mapping[str, Label], name: str, value: float) -> str:
    label, factor, unit = labels.get(name, (name, 1.0, ""))
    number = f"{factor * value:,.0f}" if abs(factor * value) >= 1000 else f"{factor * value:.3g}"  # noqa: PLR2004
    return f"{label} {number} {unit}".rstrip()

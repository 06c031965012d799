"""An explanation as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from edge_server.explain import Explained, Explanation
from shared.measures import Cost
from shared.messages import Value

PARTS = ("compute_s", "upload_s", "download_s", "compute_joules", "upload_joules", "bytes_up")
BUYS = {"second": "s of deadline", "joule": "J", "megahertz": "MHz of clock", "megabit_per_s": "Mbit/s of link"}
WORDS = {
    "interior": "the bandwidth that all share",
    "floor": "its floor: the others make more of the bandwidth",
    "time": "its own deadline",
    "full": "nothing, it has all that it can use",
    "nothing": "the others make more of the bandwidth",
    "out": "it cannot take part: no time is left to it, or it has no link or clock",
    "unknown": "nothing is known of it",
    "energy": "its joules",
    "memory": "its memory",
    "cluster": "its cluster's ratio, whatever it measures",
}


def lines(found: Explanation) -> Iterator[str]:
    """Yield the lines."""
    limits = ", ".join(f"{name} {value:.6g}" for name, value in sorted(found.limits.items()))
    yield f"round {found.round}: decided by {found.optimizer}" + (f" from {limits}" if limits else "")
    if found.objective is not None:
        yield f"  objective {found.objective:.6g}, multiplier of what all share {found.multiplier or 0.0:.4g}"
    if not found.feasible:
        enough = ", ".join(f"{name} {value:.4g}" for name, value in found.enough.items())
        yield f"  the limits cannot be met by all; {enough or 'nothing'} would do"
    deadline = found.limits.get("deadline_s")
    if found.seconds is not None:
        of = f", {found.seconds / deadline:.2f} of the deadline" if deadline else ""
        yield f"  took {found.seconds:.4g} s{of}"
    for one in found.devices:
        yield from _device(one)


def _device(one: Explained) -> Iterator[str]:
    given = ", ".join(f"{name} {_value(value)}" for name, value in one.values.items())
    yield f"{one.device}: {given or 'the defaults'}"
    for name, figure in sorted(one.figures.items()):
        yield f"  {name} {figure.value:.6g} ({figure.source.replace('_', ' ')})"
    multiplier = "" if one.multiplier is None else f", multiplier {one.multiplier:.4g}"
    yield f"  held back by {WORDS.get(one.binding, one.binding)}{multiplier}"
    if one.buys:
        bought = ", ".join(f"{value:+.4g} for one more {BUYS[name]}" for name, value in one.buys.items())
        yield f"  kept of the model: {bought}"
    for part in PARTS:
        if (line := _compared(part, one.predicted, one.measured)) is not None:
            yield line


def _compared(part: str, predicted: Cost, measured: Cost | None) -> str | None:
    expected, found = getattr(predicted, part), getattr(measured, part) if measured else None
    if expected is None:
        return None
    if found is None:
        return f"  {part} {expected:.4g} predicted, not measured"
    off = f" ({100 * (found / expected - 1):+.0f} %)" if expected else ""
    return f"  {part} {expected:.4g} predicted, {found:.4g} measured{off}"


def _value(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

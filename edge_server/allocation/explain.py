"""Explanations of a round's decision: each device's figures, what binds, what more would buy, predicted and measured.

What one more second or joule would buy is found by deciding the recorded case once more with a little more of it, and
so is what one more megahertz or Mbit/s of a single device would buy it, with `WhatIf.kept` for all at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from edge_server.allocation.coordinator import ALLOCATORS, allocator_of, decide, options_of
from edge_server.allocation.inputs import Case, recorded_case
from edge_server.journal.costs import costs_by_round
from edge_server.journal.decision import Decision, Figure, Source, keep_ratio
from edge_server.journal.records import AnyRecord, RoundClosed, RoundOpened, RunOpened, drop_void
from edge_server.journal.runs import name_rounds
from edge_server.plan.optimizer import OptimizerPlan
from shared.errors import ConfigError
from shared.protocol.measurements import JOULES, Cost
from shared.protocol.messages import Value

MEGA, LITTLE = 1e6, 0.01

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
    "joules": ("joules of a task", 1.0, "J"),
    "round_joules": ("joules of the round", 1.0, "J"),
    "backhaul_s": ("for mixing at the end of the global round", 1.0, "s"),
    "spread_joules": ("of these moved here from other rounds, for estimates", 1.0, "J"),
    "spent_s": ("of the run's time is spent", 1.0, "s"),
    "spent_joules": ("of the run's energy is spent", 1.0, "J"),
    "weights": ("weights", 1.0, ""),
    "weights_global": ("of them shared", 1.0, ""),
    "model_bytes": ("the model", 1e-3, "kB"),
    "dense_bytes": ("never pruned", 1e-3, "kB"),
    "most_share": ("a device at most", 1e2, "% of the uplink"),
    "personal_steps": ("personal steps", 1.0, ""),
    "warmup_steps": ("warm-up", 1.0, ""),
    "global_steps": ("global", 1.0, ""),
    "local_steps": ("local steps", 1.0, ""),
    "gradients": ("gradients to estimate by", 1.0, ""),
    "gradients_left": ("of them in the rounds that are left", 1.0, ""),
}

FIGURES: Mapping[str, Label] = {
    "up_bits_per_s": ("uplink", 1e-6, "Mbit/s"),
    "down_bits_per_s": ("downlink", 1e-6, "Mbit/s"),
    "step_s": ("a local step", 1e3, "ms"),
    "step_joules": ("a local step", 1.0, "J"),
    "task_s": ("a task of the whole model", 1.0, "s"),
    "task_joules": ("computing the whole model", 1.0, "J"),
    "compute_w": ("computing", 1.0, "W"),
    "upload_w": ("sending", 1.0, "W"),
    "download_w": ("receiving", 1.0, "W"),
    "download_joules": ("a download", 1.0, "J"),
    "tx_w": ("sending", 1.0, "W above idle"),
    "f_hertz": ("clock", 1e-9, "GHz"),
    "memory_bytes": ("free memory", 1e-6, "MB"),
    "keep": ("its own since its first task", 1e2, "% of the neurons"),
    "sigma2": ("variance of its gradients", 1.0, ""),
    "g2": ("their squared norm", 1.0, ""),
}

ERRORS = {"compute_error": "computing", "upload_error": "upload", "joules_error": "joules"}
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
    "steps": ("of the local steps", 1e2, "%"),
    "sent": ("of the change sent", 1e2, "%"),
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
    "settled": "what it kept at first: this method chooses once and for all",
    "fairness": "the largest share of the uplink that one device may have (fairness)",
    "cluster": "its cluster's ratio, whatever it measures",
    "round_joules": "the joules of the round, which all share",
    "least": "its floors: fewer steps would do, but for rho_min and theta_min",
    "baseline": "nothing: this baseline looks at no budget",
}

NOTHING = 1e-9
"""What is less buys nothing: it is a rounding error of deciding twice."""


class DeviceExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One device in one round.

    Attributes:
        values: What it was given.
        figures: What that was decided from.
        binding: Which limit kept it from more.
        buys: How much more of the model it would keep, for one more of: `second` of the deadline, `joule` of its task,
            `megahertz` of its clock, `megabit_per_s` of its link; what does not apply is left out. Of large fleets,
            the last two to within what `edge_server.allocation.allocators.bandwidth` leaves out.
        predicted: What the task should cost.
        measured: What it cost; None while nobody knows.
    """

    device: str
    values: dict[str, Value]
    figures: dict[str, Figure]
    binding: str
    multiplier: float | None
    buys: dict[str, float]
    predicted: Cost
    measured: Cost | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One round.

    Attributes:
        named: As people are shown it: of a plan with sites `global.edge`.
        limits: What held for all.
        feasible: Whether all could be met.
        enough: If not, the smallest that would do.
        multiplier: Of what all share.
        seconds: What the round took; None while it lasts.
        devices: In order of name.
    """

    round: int
    named: str
    optimizer: str
    limits: dict[str, float]
    feasible: bool
    enough: dict[str, float]
    objective: float | None
    multiplier: float | None
    seconds: float | None
    devices: list[DeviceExplanation]


def explain(records: Iterable[AnyRecord], number: int, only: str = "") -> Explanation:
    """Explain a round.

    Args:
        only: The device to explain; empty for all.

    Raises:
        ConfigError: There is no such round or device, or nothing was decided in it.
    """
    kept = drop_void(records)
    table = next((one.plan.optimizer for one in kept if isinstance(one, RunOpened)), None)
    opened = [one for one in kept if isinstance(one, RoundOpened) and one.round == number]
    named = name_rounds(kept)(number)
    if not opened:
        raise ConfigError(f"round {named}: the run has not begun it; `edge-server show` lists its rounds")
    decision = opened[-1].decision
    if table is None or decision is None:
        why = "its record, that of a trace, keeps no decisions" if table else "the plan has no table [optimizer]"
        raise ConfigError(f"round {named}: there is nothing to explain, {why}")
    if only and only not in decision.devices:
        raise ConfigError(f"device {only!r}: not in round {named}, whose devices are {', '.join(decision.devices)}")
    closed = [one for one in kept if isinstance(one, RoundClosed) and one.round == number]
    costs = costs_by_round(kept).get(number, {})
    names = [only] if only else sorted(decision.devices)
    bought = find_margins(table, decision, names)
    return Explanation(
        round=number,
        named=named,
        optimizer=decision.optimizer,
        limits=decision.limits,
        feasible=decision.feasible,
        enough=decision.enough,
        objective=decision.objective,
        multiplier=decision.multiplier,
        seconds=closed[-1].seconds if closed else None,
        devices=[_explained(name, decision, bought.get(name, {}), costs.get(name)) for name in names],
    )


def _explained(name: str, decision: Decision, buys: dict[str, float], measured: Cost | None) -> DeviceExplanation:
    given = decision.devices[name]
    return DeviceExplanation(
        device=name,
        values=given.values,
        figures=given.figures,
        binding=given.binding,
        multiplier=given.multiplier,
        buys=buys,
        predicted=given.predicted,
        measured=measured,
    )


def find_margins(table: OptimizerPlan, decision: Decision, names: list[str]) -> dict[str, dict[str, float]]:
    """Return what more would buy each device. Where there is a ladder to climb, one unit of it; else a little.

    Args:
        decision: What it decided for a round.
        names: The devices of which it is asked.
    """
    what_if, options = allocator_of(table).what_if, options_of(table)
    if what_if is None:
        return {}
    table, case = msgspec.structs.replace(table, solver="numpy"), recorded_case(decision)
    bought: dict[str, dict[str, float]] = {name: {} for name in names}
    for limit, what in (("deadline_s", "second"), ("joules", "joule")):
        if limit in case.limits:
            amount = 1.0 if case.ladder else LITTLE * (case.limits[limit] or 1.0)
            more = {**case.limits, limit: case.limits[limit] + amount}
            again = decide(table, dataclasses.replace(case, limits=more))
            for name in names:
                now = keep_ratio(again.devices[name].values)
                bought[name][what] = (now - keep_ratio(decision.devices[name].values)) / amount
    before = what_if.kept(options, case, case)
    for what, changes in _more_of_each(case, what_if.clock).items():
        figures = {name: {**case.figures[name], one.figure: one.value} for name, one in changes.items()}
        after = what_if.kept(options, case, dataclasses.replace(case, figures={**case.figures, **figures}))
        for name in changes.keys() & bought.keys():
            bought[name][what] = (after[name] - before[name]) / changes[name].amount
    return bought


class _Change(NamedTuple):
    """A little more of a thing of one device's own: how much, in millions, and the figure that it makes another."""

    amount: float
    figure: str
    value: Figure


def _more_of_each(case: Case, seconds: str) -> dict[str, dict[str, _Change]]:
    """Return a little more of each thing of the devices' own, by thing and device."""
    found: dict[str, dict[str, _Change]] = {"megahertz": {}, "megabit_per_s": {}}
    for name, figures in case.figures.items():
        clock, took, rate = figures.get("f_hertz"), figures.get(seconds), figures.get("up_bits_per_s")
        if clock and took:
            more = 1.0 if case.ladder else LITTLE * clock.value / MEGA
            faster = Figure(took.value * clock.value / (clock.value + more * MEGA), "measured")
            found["megahertz"][name] = _Change(more, seconds, faster)
        if rate:
            more = 1.0 if case.ladder else LITTLE * rate.value / MEGA
            faster = Figure(rate.value + more * MEGA, "measured")
            found["megabit_per_s"][name] = _Change(more, "up_bits_per_s", faster)
    return found


Label = tuple[str, float, str]
"""What people call a figure, and its unit: what to multiply by, and the unit's name."""


def explanation_lines(found: Explanation) -> Iterator[str]:
    """Yield the lines."""
    deadline = found.limits.get("deadline_s")
    yield f"round {found.named}: {found.optimizer} decided" + (
        f", for tasks within {deadline:.4g} s" if deadline else ""
    )
    if limits := [_amount(LIMITS, name, found.limits[name]) for name in LIMITS if name in found.limits]:
        yield f"  {', '.join(limits)}"
    if found.objective is not None:
        chosen = ALLOCATORS[found.optimizer]
        more = f"; one more {chosen.shared} would save {found.multiplier:.4g} of it" if found.multiplier else ""
        yield f"  {chosen.objective} {found.objective:.4g}{more}"
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
        if found.limits.keys() & {"joules", "round_joules"} and one.predicted.compute_joules is None:
            yield "  nobody knew its joules: their limit did not hold it back"


def _task_s(cost: Cost) -> float | None:
    """Return the seconds that a deadline of tasks counts; None where the device did not tell them all."""
    return None if cost.compute_s is None or cost.upload_s is None else cost.compute_s + cost.upload_s


def _device(one: DeviceExplanation) -> Iterator[str]:
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
    if one.predicted.compute_joules is not None:
        yield _task_joules(one.predicted, one.measured)


def _task_joules(predicted: Cost, measured: Cost | None) -> str:
    """Return the joules of the whole task, of those parts that were predicted: what its limit and a budget count."""
    names = [name for name in JOULES if getattr(predicted, name) is not None]
    expected = math.fsum(getattr(predicted, name) for name in names)
    told = [one for name in names if measured and (one := getattr(measured, name)) is not None]
    if len(told) < len(names):
        return f"  the task: {expected:.4g} J predicted, not measured as a whole"
    off = f" ({100 * (math.fsum(told) / expected - 1):+.0f} %)" if expected else ""
    return f"  the task: {expected:.4g} J predicted, {math.fsum(told):.4g} measured{off}"


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

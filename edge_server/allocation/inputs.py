"""Put one round's case together from a plan, a journal and the devices' last reports.

What one round's decision is made from, and nothing else: the same case gives the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.allocation.experience import Experience
from edge_server.allocation.figures import (
    Said,
    Word,
    error_words,
    figures_of,
    link_words,
    planned_step_s,
    planned_task_s,
    said,
)
from edge_server.allocation.model_sizes import Sizes
from edge_server.journal.budget import Spending
from edge_server.journal.decision import Decision, Figure
from edge_server.plan.devices import expanded
from edge_server.plan.optimizer import BandwidthOptions, KeepOptions
from edge_server.plan.plan import Plan
from shared.protocol.messages import Report, Scalar


@dataclass(frozen=True)
class Case:
    """One round, for all devices of its cohort.

    Attributes:
        devices: By name; one that is named twice is one.
        limits: What holds for all of them: seconds, joules, sizes of the model.
        figures: Of each device, by name.
        ladder: Ratios to choose from, each with the bytes of an update.
        places: Of each device in the order in which the run has met them.
    """

    devices: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)
    ladder: tuple[tuple[float, int], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the devices, each once."""
        return list(dict.fromkeys(self.devices))

    def column(self, name: str, otherwise: float) -> list[float]:
        """Return one figure of every device; `otherwise` where it is not known."""
        found = [self.figures.get(device, {}).get(name) for device in self.names]
        return [figure.value if figure else otherwise for figure in found]

    def known(self, device: str) -> dict[str, Figure]:
        """Return what the record keeps of a device."""
        return dict(self.figures.get(device, {}))


def of(decision: Decision) -> Case:
    """Return the case that a recorded decision was made from."""
    return Case(
        devices=tuple(decision.devices),
        limits=decision.limits,
        figures={device: given.figures for device, given in decision.devices.items()},
        ladder=tuple(decision.ladder),
    )


STEPS: Mapping[str, int] = {"personal_steps": 5, "global_steps": 5, "warmup_steps": 1, "updates_at_once": 0}
"""Of paper 004's method, where the plan's algorithm does not say: tau_v, tau_u, those of the warm-up; and whether steps
on both parts are the same ones."""


LEAST = 1e-9
"""Iterations of a task that has none."""


def case(  # noqa: PLR0913 - everything that a decision is made from
    plan: Plan,
    devices: Sequence[str],
    number: int,
    *,
    experience: Experience,
    spending: Spending,
    reports: Mapping[str, Report],
    sizes: Sizes,
    ladder: tuple[tuple[float, int], ...] = (),
) -> Case:
    """Return the case of round `number` for a cohort of devices."""
    assert plan.optimizer is not None
    options = plan.optimizer.chosen()
    planned = {one.name: one for one in expanded(plan.device)}
    met = list(dict.fromkeys([*planned, *experience.order, *devices]))
    places = {device: place for place, device in enumerate(met)}
    if not isinstance(options, BandwidthOptions | KeepOptions):
        return Case(tuple(devices), places=places)
    limits = _limits(plan, options, number, spending, len(devices)) | {
        "weights": float(sizes.weights),
        "model_bytes": float(sizes.bytes),
    }
    if isinstance(options, BandwidthOptions):
        told = {**plan.algorithm.options, **sizes.facts}
        limits |= {name: _number(told.get(name), usual) for name, usual in STEPS.items()}
        limits |= {"weights_global": float(sizes.shared), "dense_bytes": float(sizes.dense_bytes)}
    figures = {
        device: _figures(device, said(device, reports, experience, planned.get(device)), options, limits, experience)
        for device in devices
    }
    return Case(tuple(devices), limits, figures, ladder, places)


def _limits(
    plan: Plan, options: BandwidthOptions | KeepOptions, number: int, spending: Spending, count: int
) -> dict[str, float]:
    """Return seconds of a task, and joules of one device's task where there is a limit; what is spent is gone."""
    left = max(1, plan.rounds - number + 1)
    seconds = options.deadline_s or plan.round.deadline_s
    if plan.budget.time_s is not None:
        seconds = min(seconds, max(0.0, plan.budget.time_s - spending.seconds) / left)
    limits = {"deadline_s": seconds}
    if plan.budget.time_s is not None:
        limits["spent_s"] = spending.seconds
    joules = options.joules if isinstance(options, KeepOptions) else None
    if plan.budget.joules is not None:
        limits["spent_joules"] = spending.joules or 0.0
    if joules is None and plan.budget.joules is not None:
        joules = max(0.0, plan.budget.joules - (spending.joules or 0.0)) / left / max(1, count)
    if joules is not None:
        limits["joules"] = joules
    return limits


def _figures(
    device: str,
    one: Said,
    options: BandwidthOptions | KeepOptions,
    limits: Mapping[str, float],
    experience: Experience,
) -> dict[str, Figure]:
    words = link_words(one, options)
    if isinstance(options, BandwidthOptions):
        words["step_s"] = _step_word(one, options, limits)
    else:
        seconds, joules = (_whole(one, part, options) for part in ("compute_s", "compute_joules"))
        if (timed := experience.steps.get(device)) and options.steps:
            seconds = seconds or timed.seconds * options.steps
            joules = timed.joules * options.steps if joules is None and timed.joules is not None else joules
        words["task_s"] = Word(seconds, profile=planned_task_s(one), default=options.task_s)
        words["task_joules"] = Word(joules)
    if options.calibrated:
        words |= error_words(device, experience, one, steps=isinstance(options, BandwidthOptions))
    return figures_of(words, experience.last.get(device, {}), options)


def _step_word(one: Said, options: BandwidthOptions, limits: Mapping[str, float]) -> Word:
    """Return what is said of one local iteration; a task's seconds are divided among its iterations."""
    measured = one.known.mu_s
    if measured is None and one.known.cycles_per_weight and one.known.f_hertz and one.known.weights:
        measured = one.known.cycles_per_weight * one.known.weights / one.known.f_hertz
    if measured is None and one.task and one.task.cost.compute_s:
        pruned = one.task.given.values.get("prune") if one.task.given else None
        kept = 1 - pruned if isinstance(pruned, float) else 1.0
        before, warm, masked = options.iterations(limits, kept)
        measured = one.task.cost.compute_s / max(LEAST, before + warm + kept * masked)
    task_s, whole = planned_task_s(one), max(LEAST, sum(options.iterations(limits)))
    profile = task_s / whole if task_s else planned_step_s(one, limits["weights"])
    return Word(measured, profile=profile, default=options.step_s)


def _whole(one: Said, part: str, options: KeepOptions) -> float | None:
    """Return what a task of the whole model would have cost, by what the last one cost at its own ratio."""
    cost = getattr(one.task.cost, part) if one.task else None
    if cost is None or one.task is None:
        return None
    keep = one.task.given.values.get("keep") if one.task.given else None
    return float(cost) / options.work(keep if isinstance(keep, float) else 1.0)


def _number(told: Scalar | None, usual: int) -> float:
    return float(told) if isinstance(told, int | float) and told >= 0 else float(usual)

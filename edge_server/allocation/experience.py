"""Experience from a run's journal: device order, last good figures, prediction errors.

All of it is computed from the records, so that a restarted server decides like one that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from edge_server.journal.claims import drop_implausible
from edge_server.journal.decision import Decision, DeviceDecision, Figure, keep_ratio
from edge_server.journal.records import AnyRecord, CostSettled, Measured, RoundOpened, UpdateAccepted
from shared.protocol.measurements import JOULES, Cost, StepCost
from shared.protocol.messages import AllocatedValues

WEIGHT, MOST_OFF = 0.5, 4.0
"""Weight of the newest prediction error; and the largest factor by which a prediction is corrected."""

LEAST_BYTES = 4096
"""Smaller uploads measure the delay of the link; they only prove that its rate is not lower."""

ALIKE = 0.02
"""Largest difference in keep ratio between tasks whose costs predict each other."""

JOULE_FIGURES = frozenset({"task_joules", "compute_w", "upload_w", "download_w", "download_joules"})

LATE = 2
"""Rounds after which the steps of a task are no longer needed."""

NEAR = 0.8
"""Share of the assigned rate from which an upload counts as rate limited: it does not show what the link can carry."""


@dataclass(frozen=True)
class PastTask:
    """An assigned task and its cost.

    Attributes:
        decision: None without an allocation.
        cost: Reported by the device; without upload until the update is settled.
        was_rate_limited: Whether the device's previous upload was rate limited; True without one.
        steps: Assigned training steps; None if they follow from the examples.
    """

    round: int
    decision: DeviceDecision | None
    cost: Cost
    was_rate_limited: bool = True
    steps: int | None = None

    @property
    def share(self) -> float | None:
        """Assigned share of the device's link; None if its rate was not limited."""
        values = AllocatedValues.of(self.decision.values if self.decision else {})
        return values.share if values.up_bits_per_s and values.share and 0 < values.share <= 1 else None

    @property
    def is_rate_limited(self) -> bool:
        """True if it sent at the assigned rate, so that the upload shows nothing new about its link."""
        assigned, measured = self._assigned_rate, self._measured_rate
        return assigned is not None and measured is not None and measured >= NEAR * assigned

    @property
    def up_bits_per_s(self) -> float | None:
        """Rate of the device's whole link as measured by its upload, which may have had only a share of it."""
        measured, size, assumed = self._measured_rate, self.cost.bytes_up or 0, self._assumed_rate
        if measured is None:
            return None
        if self.is_rate_limited:  # faster than assigned: the device ignored the limit and had the whole link
            return max(measured, assumed or 0.0)
        if size < LEAST_BYTES:
            return measured if assumed and measured > assumed else None
        if self.share and self.was_rate_limited and not self.was_guessed:  # a single stall does not change the link
            return assumed
        return measured / (self.share or 1.0)

    @property
    def was_guessed(self) -> bool:
        """True if its link had not been measured when the task was assigned."""
        figure = self.decision.figures.get("up_bits_per_s") if self.decision else None
        return figure is not None and figure.source in ("profile", "default")

    @property
    def _measured_rate(self) -> float | None:
        seconds, size = self.cost.upload_s, self.cost.bytes_up
        return 8 * size / seconds if seconds and size else None

    @property
    def _assigned_rate(self) -> float | None:
        return AllocatedValues.of(self.decision.values).up_bits_per_s if self.decision and self.share else None

    @property
    def _assumed_rate(self) -> float | None:
        """Rate of the whole link that the decision assumed."""
        if self._assigned_rate and self.share:
            return self._assigned_rate / self.share
        figure = self.decision.figures.get("up_bits_per_s") if self.decision else None
        return figure.value if figure else None

    @property
    def down_bits_per_s(self) -> float | None:
        """Rate of the download; None if too few bytes were sent."""
        seconds, size = self.cost.download_s, self.cost.bytes_down
        return 8 * size / seconds if seconds and size and size >= LEAST_BYTES else None


@dataclass
class Experience:
    """Summary of a run's journal, updated record by record.

    Attributes:
        record_count: Records processed so far.
        order: Devices in order of first appearance.
        steps: Step costs measured before round 1, by device.
        last: Figures used last, by device.
        limits: Limits of the last decision.
        metrics: Metrics of each device's newest update.
        tasks: Newest task with a reported cost, by device.
        last_upload: Newest task with a reported upload time, by device.
        errors: Smoothed ratio measured / predicted, by device and part of a cost.
    """

    record_count: int = 0
    order: list[str] = field(default_factory=list)
    steps: dict[str, StepCost] = field(default_factory=dict)
    last: dict[str, dict[str, Figure]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    tasks: dict[str, PastTask] = field(default_factory=dict)
    last_upload: dict[str, PastTask] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    _decisions: dict[int, Decision | None] = field(default_factory=dict)
    _steps: dict[tuple[int, str], int] = field(default_factory=dict)
    _alike: set[tuple[int, str]] = field(default_factory=set)

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Process the journal's next records."""
        for record in records:
            self.record_count += 1
            match record:
                case Measured():
                    self.steps |= record.by_device
                    self.metrics |= record.metrics
                case RoundOpened():
                    self._open_round(record)
                case UpdateAccepted():
                    cost = drop_implausible(record.update.cost)
                    self._learn(record.round, record.device, msgspec.structs.replace(cost, upload_s=None))
                    if record.round in self._decisions:
                        self.metrics[record.device] = record.update.metrics
                case CostSettled():
                    self._learn(record.round, record.device, drop_implausible(record.cost))
                case _:
                    pass

    def _open_round(self, record: RoundOpened) -> None:
        self.order += [device for device in record.assignments if device not in self.order]
        self._decisions[record.round] = record.decision
        self.limits = record.decision.limits if record.decision else {}
        self._steps = {key: steps for key, steps in self._steps.items() if key[0] >= record.round - LATE}
        for device, assignment in record.assignments.items():
            if (steps := assignment.allocation.local_steps) is not None:
                self._steps[record.round, device] = steps
        for device, device_decision in record.decision.devices.items() if record.decision else ():
            self.last[device] = self.last.get(device, {}) | device_decision.figures
            if _is_like(self.tasks.get(device), device_decision):
                self._alike.add((record.round, device))

    def _learn(self, number: int, device: str, cost: Cost) -> None:
        if number not in self._decisions:  # a measurement or an evaluation: its cost says nothing about training
            return
        decision = self._decisions[number]
        device_decision = decision.devices.get(device) if decision else None
        last_task = self.tasks.get(device)
        last_cost = last_task.cost if last_task and last_task.round == number else Cost()
        if last_task is None or last_task.round <= number:
            self.tasks[device] = PastTask(number, device_decision, cost, steps=self._steps.get((number, device)))
        if cost.upload_s is not None:
            last_upload = self.last_upload.get(device)
            was_rate_limited = last_upload is None or last_upload.share is None or last_upload.is_rate_limited
            self.last_upload[device] = PastTask(number, device_decision, cost, was_rate_limited)
        for part in ("compute_s", "upload_s") if device_decision else ():
            task = PastTask(number, device_decision, cost)
            if part == "upload_s" and task.was_guessed and not task.is_rate_limited:
                continue  # the error of a guess does not apply to the measurement that replaces it
            measured, before = getattr(cost, part), getattr(last_cost, part)
            predicted = getattr(device_decision.predicted, part) if device_decision else None
            if measured and predicted and before is None:  # count each part once: the settlement repeats it
                self._update_error(device, part.replace("_s", "_error"), device_decision, measured / predicted)
        ratio = _joules_ratio(device_decision.predicted, cost) if device_decision else None
        if ratio and (number, device) in self._alike:
            self._alike.remove((number, device))
            self._update_error(device, "joules_error", device_decision, ratio)

    def _update_error(self, device: str, name: str, device_decision: DeviceDecision | None, ratio: float) -> None:
        previous = device_decision.figures.get(name) if device_decision else None
        error = (previous.value if previous else 1.0) * min(max(ratio, 1 / MOST_OFF), MOST_OFF)
        errors = self.errors.setdefault(device, {})
        smoothed = WEIGHT * error + (1 - WEIGHT) * errors.get(name, error)
        errors[name] = min(max(smoothed, 1 / MOST_OFF), MOST_OFF)


def _is_like(before: PastTask | None, decision: DeviceDecision) -> bool:
    """True if a task's joules were predicted from a similar task; otherwise its error means nothing."""
    if before is None or before.decision is None:
        return False
    sources = {figure.source for name, figure in decision.figures.items() if name in JOULE_FIGURES}
    return sources == {"measured"} and abs(keep_ratio(before.decision.values) - keep_ratio(decision.values)) <= ALIKE


def _joules_ratio(predicted: Cost, cost: Cost) -> float | None:
    """Return measured / predicted joules of a whole task; None while a part is unknown."""
    names = [name for name in JOULES if getattr(predicted, name) is not None]
    measured = [getattr(cost, name) for name in names]
    expected = sum(getattr(predicted, name) for name in names)
    return sum(measured) / expected if expected and None not in measured else None

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
"""Of the newest error among the earlier ones; and the factor beyond which a prediction is not put right."""

LEAST_BYTES = 4096
"""An upload of less tells the delay of the link, not its rate; no more than that it is no slower."""

ALIKE = 0.02
"""Tasks whose shares of the model differ by no more are alike: what the one cost foretells what the other does."""

JOULE_FIGURES = frozenset({"task_joules", "compute_w", "upload_w", "download_w", "download_joules"})

LATE = 2
"""Rounds after which nobody asks for the steps of a task any more."""

NEAR = 0.8
"""Who sent at so much of the rate that it was told kept to it: what else its link could carry did not show."""


@dataclass(frozen=True)
class PastTask:
    """A task that was told, and what it cost.

    Attributes:
        decision: What had been decided; None where nothing was.
        cost: What the device says; of an update that is not settled yet, without its upload.
        was_rate_limited: Whether its upload before this one kept to what it was told; also where there was none.
        steps: Training steps that it was told; None where that follows from its examples.
    """

    round: int
    decision: DeviceDecision | None
    cost: Cost
    was_rate_limited: bool = True
    steps: int | None = None

    @property
    def share(self) -> float | None:
        """Return which part of its link the device was told to keep to; None where it had the link as it was."""
        values = AllocatedValues.of(self.decision.values if self.decision else {})
        return values.share if values.up_bits_per_s and values.share and 0 < values.share <= 1 else None

    @property
    def is_rate_limited(self) -> bool:
        """Whether it sent as fast as it was told, so that the upload shows no more of its link than was thought."""
        assigned, measured = self._assigned_rate, self._measured_rate
        return assigned is not None and measured is not None and measured >= NEAR * assigned

    @property
    def up_bits_per_s(self) -> float | None:
        """Return what the device's whole link carries, as far as its upload, which may have had but a share, shows."""
        measured, size, assumed = self._measured_rate, self.cost.bytes_up or 0, self._assumed_rate
        if measured is None:
            return None
        if self.is_rate_limited:  # faster than told, and it does not keep to it: then it had the whole link
            return max(measured, assumed or 0.0)
        if size < LEAST_BYTES:
            return measured if assumed and measured > assumed else None
        if (
            self.share and self.was_rate_limited and not self.was_guessed
        ):  # one stall is not another link, two in a row are
            return assumed
        return measured / (self.share or 1.0)

    @property
    def was_guessed(self) -> bool:
        """Whether nobody had measured its link when it was told."""
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
        """Return what was thought of the whole link."""
        if self._assigned_rate and self.share:
            return self._assigned_rate / self.share
        figure = self.decision.figures.get("up_bits_per_s") if self.decision else None
        return figure.value if figure else None

    @property
    def down_bits_per_s(self) -> float | None:
        """Return what the link carried in the download."""
        seconds, size = self.cost.download_s, self.cost.bytes_down
        return 8 * size / seconds if seconds and size and size >= LEAST_BYTES else None


@dataclass
class Experience:
    """Adds a journal up.

    Attributes:
        record_count: Records taken so far.
        order: Devices in order of first appearance.
        steps: What was measured before round 1.
        last: The figures that were decided from last, by device.
        limits: Those of the last decision.
        metrics: What the newest update of each device told beside its cost.
        tasks: The newest task of each device that has told a cost.
        last_upload: The newest of them that has told what its upload took.
        errors: Measured over predicted, smoothed, by device and part of a cost.
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
        """Take the journal's next records."""
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
        local_steps = {
            (record.round, name): assignment.allocation.local_steps for name, assignment in record.assignments.items()
        }
        recent = {key: steps for key, steps in self._steps.items() if key[0] >= record.round - LATE}
        self._steps = recent | {key: steps for key, steps in local_steps.items() if steps is not None}
        for device, device_decision in record.decision.devices.items() if record.decision else ():
            self.last[device] = self.last.get(device, {}) | device_decision.figures
            if _is_like(self.tasks.get(device), device_decision):
                self._alike.add((record.round, device))

    def _learn(self, number: int, device: str, cost: Cost) -> None:
        if number not in self._decisions:  # a measurement or an evaluation: what that cost tells of no training
            return
        decision = self._decisions[number]
        device_decision = decision.devices.get(device) if decision else None
        last_task = self.tasks.get(device)
        last_cost, steps = (
            last_task.cost if last_task and last_task.round == number else Cost(),
            self._steps.get((number, device)),
        )
        if last_task is None or last_task.round <= number:
            self.tasks[device] = PastTask(number, device_decision, cost, steps=steps)
        if cost.upload_s is not None:
            last_upload = self.last_upload.get(device)
            was_rate_limited = last_upload is None or last_upload.share is None or last_upload.is_rate_limited
            self.last_upload[device] = PastTask(number, device_decision, cost, was_rate_limited)
        for part in ("compute_s", "upload_s") if device_decision else ():
            task = PastTask(number, device_decision, cost)
            if part == "upload_s" and task.was_guessed and not task.is_rate_limited:
                continue  # how wrong a guess was is no error of what takes its place
            measured, before = getattr(cost, part), getattr(last_cost, part)
            predicted = getattr(device_decision.predicted, part) if device_decision else None
            if measured and predicted and before is None:  # each part once: an update tells one, its settling both
                self._update_error(device, part.replace("_s", "_error"), device_decision, measured / predicted)
        if (
            device_decision
            and (number, device) in self._alike
            and (ratio := _joules_ratio(device_decision.predicted, cost))
        ):
            self._alike.remove((number, device))
            self._update_error(device, "joules_error", device_decision, ratio)

    def _update_error(self, device: str, name: str, device_decision: DeviceDecision | None, ratio: float) -> None:
        previous = device_decision.figures.get(name) if device_decision else None
        error = (previous.value if previous else 1.0) * min(max(ratio, 1 / MOST_OFF), MOST_OFF)
        errors = self.errors.setdefault(device, {})
        smoothed = WEIGHT * error + (1 - WEIGHT) * errors.get(name, error)
        errors[name] = min(max(smoothed, 1 / MOST_OFF), MOST_OFF)


def _is_like(before: PastTask | None, decision: DeviceDecision) -> bool:
    """Tell whether the joules of a task were predicted from those of one like it: else the next prediction knows."""
    if before is None or before.decision is None:
        return False
    sources = {figure.source for name, figure in decision.figures.items() if name in JOULE_FIGURES}
    return sources == {"measured"} and abs(keep_ratio(before.decision.values) - keep_ratio(decision.values)) <= ALIKE


def _joules_ratio(predicted: Cost, cost: Cost) -> float | None:
    """Return the joules of a whole task over what was predicted of it; None while a part of them is not known."""
    names = [name for name in JOULES if getattr(predicted, name) is not None]
    measured = [getattr(cost, name) for name in names]
    expected = sum(getattr(predicted, name) for name in names)
    return sum(measured) / expected if expected and None not in measured else None

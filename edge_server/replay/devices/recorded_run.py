"""Behaviour from a recorded trace: repeat tasks, scale other work.

The same task in the same round takes the recorded seconds, cycles and joules. Other work (another algorithm, another
model, a further round) is scaled from the task that was recorded nearest in time:

    cycles  = cycles of that task * work / its work
    seconds = time until these cycles are done at that task's clock, corrected by the clock recorded since
    joules  = watts of that task * seconds

where work is the number of examples that pass through the network, times the network's operations per example, times
the share of these that the algorithm computes. In each round a link has the rate of that round's recorded transfers,
or of the nearest round's, or the rate that the device reported if others shared the transmission (`recorded_link`).
The time that no round was without is delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

from edge_server.record.rows import TaskRow
from edge_server.replay.devices.behaviour import Behaviour, Effort, Work, batches
from edge_server.replay.devices.curve import Curve, constant
from edge_server.replay.devices.recorded_device import RecordedDevice, load_devices
from edge_server.replay.devices.recorded_link import exchange_w, link_flows, radio_joules
from edge_server.replay.devices.recorded_work import StepShares, compute_step_shares, count_trainable_parameters
from edge_server.replay.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.measurements import Provenance

FORWARD = 1 / 3
"""Share of an evaluation in a training step's operations: the backward pass costs twice the forward pass."""

FIGURES = {"seconds": "compute_s", "cycles": "cycles", "joules": "compute_joules"}


def recorded_behaviours(trace: Trace, names: Sequence[str], example: tuple[int, ...] = ()) -> list[Behaviour]:
    """Return the behaviours of a trace's devices, in the order of `names`.

    A device without tasks takes the figures of a device with the same board, the median one by speed; without such a
    device, of the median one of all.

    Args:
        example: Shape of one input of the devices' examples; empty for that which the network declares.

    Raises:
        ConfigError: A name is not in the trace, or no device did any task.
    """
    devices = load_devices(trace)
    strangers = [name for name in names if name not in devices]
    if strangers:
        raise ConfigError(f"devices {', '.join(strangers)} are not in the trace; remove them from the plan")
    if not any(device.tasks for device in devices.values()):
        raise ConfigError("no task of the trace has a compute time; record a run with measured tasks")
    # Lazy: counting operations uses autograd, which must not run before a replay forks its processes.
    weights, shares = count_trainable_parameters(trace), cache(partial(compute_step_shares, trace, example))
    return [_build_behaviour(devices[name], devices.values(), weights, shares) for name in names]


def _build_behaviour(
    device: RecordedDevice, fleet: Iterable[RecordedDevice], weights: int, shares: Callable[[], StepShares]
) -> Behaviour:
    warnings = []
    if not device.tasks:
        like = _find_similar(device, fleet)
        warnings.append(f"{device.device} did no task in the trace: it uses the figures of {like.device}")
        device = replace(like, present=device.present)
    clock, gaps = device.curve("cpu.f_hertz")
    if gaps:
        warnings.append(f"{device.device} was away {gaps} times for more than 5 s: clock is the mean of both sides")
    source = EffortModel(device, weights, clock, shares)
    return Behaviour(
        compute=source.effort,
        least=source.least,
        of_round=partial(link_flows, device),
        delay_s=device.delay_s,
        radio=partial(radio_joules, device),
        present=device.present,
        provenance={
            name: _figure_provenance(device, name)
            for name in ("download_s", "upload_s", "download_joules", "upload_joules")
        },
        warnings=tuple(warnings),
    )


def _find_similar(device: RecordedDevice, fleet: Iterable[RecordedDevice]) -> RecordedDevice:
    able = [other for other in fleet if other.tasks]
    able = [other for other in able if device.board and other.board == device.board] or able
    able.sort(key=lambda other: (median(task.compute_s or 0.0 for task in other.tasks.values()), other.device))
    return able[(len(able) - 1) // 2]


def _figure_provenance(device: RecordedDevice, figure: str) -> Provenance:
    return next(
        (
            traced_provenance(task.provenance.get(figure))
            for task in device.tasks.values()
            if getattr(task, figure) is not None
        ),
        traced_provenance(None),
    )


def traced_provenance(origin: Provenance | None) -> Provenance:
    """Return the provenance of a figure taken from a trace unchanged."""
    if origin is None:
        return Provenance(source="trace", quality="modelled")
    return Provenance(source=f"trace: {origin.source}", quality=origin.quality, uncertainty=origin.uncertainty)


@dataclass(frozen=True)
class EffortModel:
    """Cost model of a recorded device.

    Attributes:
        weights: Number of trainable parameters on the devices in the trace.
        clock: Hertz over time; None if not measured.
        shares: Returns the recorded shares of a full training step.
    """

    device: RecordedDevice
    weights: int
    clock: Curve | None
    shares: Callable[[], StepShares]

    def effort(self, work: Work, second: float) -> Effort:
        """Return the cost of a task that starts at a second."""
        task = self.device.tasks.get(work.round)
        if task is not None and self._is_recorded(task, work):
            return self._recorded_effort(task)
        if not work.examples:
            return Effort(seconds=0.0)
        step = self.device.step
        if step is not None and work.steps == 1 and not (work.train and task is not None):
            return Effort(step.seconds, step.cycles, step.joules, step.idle_w, _mark_traced(step.provenance))
        return self._scale_nearest(work, second)

    def _is_recorded(self, task: TaskRow, work: Work) -> bool:
        """Check that the recorded task did the same work: as many examples, or none at all.

        An algorithm may skip training when the task runs; the planned work is then an upper bound.
        """
        if work.weights != self.weights or work.train != (task.purpose == "train"):
            return False
        if not work.train:
            return True
        if task.steps == 0 and task.examples:  # assigned no steps, however many examples it had
            return not work.examples
        return self._share(task) == work.share and self._count_examples(task) in (None, 0.0, work.examples)

    def _share(self, task: TaskRow) -> float:
        return self.shares().by_task.get((self.device.device, task.round), 1.0)

    def _count_examples(self, task: TaskRow) -> float | None:
        """Return the number of trained examples of a task, every epoch counted; None for a late one.

        Missed steps of a split session do not count.
        """
        if task.purpose != "train":
            return FORWARD * task.metrics.get("eval_examples", 0.0)
        if task.examples is None:
            return None
        merges = self.device.merges.get(task.round, False)
        if steps := self.device.sessions.get(task.round, 0):
            size = self.device.batch_size[task.round]
            sizes = batches(task.examples, size, steps, merges_single=merges)
            return sum(size * count for size, count in sizes.items()) * self.device.completed_steps(task) / steps
        size = self.device.batch_size.get(task.round, 1)
        sizes = batches(task.examples, size, task.steps or 0, merges_single=merges)
        return float(sum(a * b for a, b in sizes.items()) or task.examples * self.device.epochs.get(task.round, 1))

    def _recorded_effort(self, task: TaskRow) -> Effort:
        figures = {name: getattr(task, column) for name, column in FIGURES.items()}
        provenance = {
            FIGURES[name]: traced_provenance(task.provenance.get(FIGURES[name]))
            for name, value in figures.items()
            if value is not None
        }
        return Effort(
            *(task.compute_s or 0.0, task.cycles, task.compute_joules, task.idle_w),
            provenance | _exchange_provenance(task),
            self.device.lag_s(task.round),
            exchange_w(task),
        )

    def _scale_nearest(self, work: Work, second: float) -> Effort:
        task = min(self._reference_tasks(), key=lambda row: (abs(self.device.observed_s(row) - second), row.round))
        return self._scale_task(task, work, second, self.clock)

    def least(self, work: Work) -> Effort:
        """Return a lower bound on a task's cost: as recorded, else scaled at the highest clock."""
        task = self.device.tasks.get(work.round)
        if not work.examples or (task is not None and self._is_recorded(task, work)):
            return self.effort(work, 0.0)
        highest = constant(self.clock.most) if self.clock else None
        efforts = [self._scale_task(task, work, 0.0, highest) for task in self._reference_tasks()]
        joules = [effort.joules for effort in efforts if effort.joules is not None]
        return replace(min(efforts, key=lambda effort: effort.seconds), joules=min(joules, default=None))

    def _scale_task(self, task: TaskRow, work: Work, second: float, clock: Curve | None) -> Effort:
        """Return the cost of work that starts at a second, scaled from a recorded task."""
        examples = work.examples * (1.0 if work.train else FORWARD)
        ratio = examples / (self._count_examples(task) or examples) * self._operations_ratio(work)
        if work.train:
            ratio *= work.share / (self._share(task) if task.purpose == "train" else 1.0)
        seconds = self._compute_seconds(task, ratio, second, clock)
        watts = task.compute_joules / task.compute_s if task.compute_joules is not None and task.compute_s else None
        source = f"trace: round {task.round} scaled"
        figures = {
            "compute_s": seconds,
            "cycles": None if task.cycles is None else ratio * task.cycles,
            "compute_joules": None if watts is None else watts * seconds,
        }
        return Effort(
            seconds,
            figures["cycles"],
            figures["compute_joules"],
            task.idle_w,
            {
                name: Provenance(source=source, quality="modelled")
                for name, figure in figures.items()
                if figure is not None
            }
            | _exchange_provenance(task),
            self.device.lag_s(work.round),
            exchange_w(task),
        )

    def _reference_tasks(self) -> list[TaskRow]:
        """Return the tasks with known seconds per example; if there are none, late tasks, taken as equal work."""
        timed = [task for task in self.device.tasks.values() if task.compute_s]
        return [task for task in timed if self._count_examples(task)] or timed or list(self.device.tasks.values())

    def _operations_ratio(self, work: Work) -> float:
        """Return the operations per example relative to the recorded network."""
        step = self.device.step
        if work.weights == self.weights or not work.examples:
            return 1.0
        size = self.device.batch_size.get(min(self.device.batch_size, default=0), 0)
        if step is not None and step.flops and size and work.train:
            whole = step.flops / self.shares().trained
            return work.flops / work.share / work.examples / (whole / size)
        return work.weights / self.weights

    def _compute_seconds(self, task: TaskRow, ratio: float, second: float, clock: Curve | None) -> float:
        """Return the seconds of `ratio` times a task's work, at the clock of another time."""
        seconds = (task.compute_s or 0.0) * ratio
        window = self.device.compute_window(task)
        if self.clock is None or clock is None or window is None:
            return seconds
        then = self.clock.integral(*window) / (window[1] - window[0])
        until = clock.finish_time(second, seconds * then)
        return until - second if then and math.isfinite(until) else seconds


def _exchange_provenance(task: TaskRow) -> dict[str, Provenance]:
    provenance = task.provenance.get("exchange_joules")
    return {} if exchange_w(task) is None else {"exchange_joules": traced_provenance(provenance)}


def _mark_traced(provenance: dict[str, Provenance]) -> dict[str, Provenance]:
    return {name: traced_provenance(entry) for name, entry in provenance.items()}

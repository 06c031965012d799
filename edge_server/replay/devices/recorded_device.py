"""Recorded device: one device's rows of a trace, by round and by second."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from device_agent.measurement.link_rate import STEP_SHARE
from edge_server.record.rows import Presence, Sample, Step, TaskRow
from edge_server.replay.devices.behaviour import ALWAYS
from edge_server.replay.devices.curve import Curve, steps
from edge_server.replay.trace.trace import Trace
from shared.protocol.messages import MERGES_SINGLE
from shared.transfer.frames import FRAME_BYTES, HEADER_BYTES

# After a longer absence, a device's readings are no longer comparable.
AWAY_S = 5.0


# Minimum delay of a late update after the close of its round; the exact time is not recorded.
LATE_S = 0.1


# Maximum share of delay in the seconds of a transfer, which has bytes to move.
SHARE = 0.9


@dataclass(frozen=True)
class RecordedDevice:
    """Rows of one device in a trace.

    Attributes:
        board: Id of the board's profile.
        merges: By round: a last batch of one example was merged into the one before.
        sessions: Steps of split sessions by round.
        tasks: By round: tasks whose update arrived, in time or late, with known seconds of computing.
        opened_s: Start of each round, after the server's own training.
        step: Measured cost of a training step.
        readings: Samples by name, ascending in time.
        present: Connected intervals, half open, in seconds.
        longest_s: Longest download of each round with several downloads.
    """

    device: str
    board: str
    batch_size: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    merges: dict[int, bool] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, TaskRow] = field(default_factory=dict)
    opened_s: dict[int, float] = field(default_factory=dict)
    closed_s: dict[int, float] = field(default_factory=dict)
    step: Step | None = None
    readings: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    present: tuple[tuple[float, float], ...] = ALWAYS
    longest_s: Mapping[int, float] = field(default_factory=dict)

    def completed_steps(self, task: TaskRow) -> int:
        """Return the steps of a split session in which the device took part; 0 for any other task."""
        return max(0, self.sessions.get(task.round, 0) - (task.missed_steps or 0))

    def observed_s(self, task: TaskRow) -> float:
        """Return the second of a task's update, or the start of its round if that is unknown."""
        return self.opened_s.get(task.round, 0.0) if task.arrived_s is None else task.arrived_s

    @cached_property
    def delay_s(self) -> float:
        """Return the one-way delay: the largest that no round contradicts.

        A constant delay cannot be part of a rate. Every transfer contains two delays, and so does the part of a task
        beyond transfers and computing: those of the task, the offer and the request, less that of the last message,
        for which the round does not wait. Devices too slow for a shared transmission also received frames of it, which
        hides their delay.
        """
        if any(self._is_shared(task) and self._is_last(task) for task in self.tasks.values()):
            return 0.0
        lags = [(lag_s, task) for task in self.tasks.values() if (lag_s := self._lag_s(task)) is not None]
        spans = (part for lag_s, task in lags for part in (lag_s, *self._delays_s(task)) if task.outcome == "arrived")
        return min(spans, default=0.0) / 2

    def lag_s(self, number: int) -> float:
        """Return a task's seconds beyond transfers, computing and delays; else the median over all rounds.

        A late update is only known to have arrived after the close of its round.
        """
        lags = {task.round: lag_s for task in self.tasks.values() if (lag_s := self._lag_s(task)) is not None}
        return max(0.0, lags.get(number, median(lags.values()) if lags else 0.0) - 2 * self.delay_s)

    def _lag_s(self, task: TaskRow) -> float | None:
        parts = [task.download_s, task.compute_s, task.upload_s]
        if task.round in self.sessions:
            parts.append(task.exchange_s)
        came_s = self.closed_s.get(task.round, -LATE_S) + LATE_S if task.outcome == "late" else task.arrived_s
        if came_s is None or task.round not in self.opened_s or None in parts:
            return None
        return max(0.0, came_s - self.opened_s[task.round] - sum(part or 0.0 for part in parts))

    def reported_down_bps(self, task: TaskRow) -> float:
        """Return the downlink rate in bit/s that the device reported at that time; 0 if its download is more reliable.

        A device on a shared transmission waits for slower devices and receives frames of no use to it, so its link is
        faster than its download. The slowest device waited for nobody: its report counts only if it does not contradict
        the download by more than a meter's step.
        """
        rates = self.readings.get("link.down_bits_per_s")
        if not rates or not self._is_shared(task) or not task.download_s:
            return 0.0
        moment, slow_bps = self.observed_s(task), 8 * (task.bytes_down or 0) / task.download_s
        rate_bps = max(0.0, min(rates, key=lambda sample: abs(sample.at_s - (sample.age_s or 0.0) - moment)).value)
        return 0.0 if self._is_last(task) and slow_bps < (1 - STEP_SHARE) * rate_bps else rate_bps

    def _is_shared(self, task: TaskRow) -> bool:
        """Check for parameters in several frames, which may have been sent to several devices."""
        return task.round in self.longest_s and (task.bytes_down or 0) > FRAME_BYTES + HEADER_BYTES

    def _is_last(self, task: TaskRow) -> bool:
        return (task.download_s or 0.0) >= self.longest_s.get(task.round, 0.0)

    def curve(self, name: str) -> tuple[Curve | None, int]:
        """Return a reading over time while the device computed, and the number of filled gaps; None without samples.

        Samples between tasks are those of the idle board and are skipped. A reading is recorded when it changes, so it
        holds until the next one, the first also before and the last also after. During an absence of more than 5 s, the
        mean of both sides holds, and after it the later one.
        """
        samples = [row for row in self.readings.get(name, ()) if self._is_computing(row.at_s - (row.age_s or 0.0))]
        if not samples:
            return None, 0
        pairs, gaps = [(0.0, max(0.0, samples[0].value))], 0
        for before, after in pairwise(samples):
            for left_s, back_s in self._absences(before.at_s, after.at_s):
                gaps += 1
                pairs += [(left_s, (before.value + after.value) / 2), (back_s, after.value)]
            pairs.append((after.at_s, after.value))
        return steps(_keep_last_values(pairs)), gaps

    def compute_window(self, task: TaskRow) -> tuple[float, float] | None:
        """Return start and end of a task's computing by the server's clock; None if unknown.

        In a split session, it includes the waits between steps.
        """
        if task.arrived_s is None or task.upload_s is None or task.compute_s is None:
            return None
        stop_s = task.arrived_s - task.upload_s
        busy_s = task.compute_s + (task.exchange_s or 0.0 if self.completed_steps(task) else 0.0)
        return (stop_s - busy_s, stop_s) if task.compute_s > 0 and busy_s <= stop_s else None

    def _delays_s(self, task: TaskRow) -> list[float]:
        """Return the largest possible delays within a task's transfers and one step's exchange."""
        transfers = [(task.bytes_down, task.download_s), (task.arrived_bytes, task.upload_s)]
        if (steps := self.completed_steps(task)) and task.exchange_s is not None:
            transfers.append((task.features_bytes, task.exchange_s / steps))
        return [SHARE * seconds for count, seconds in transfers if count and seconds is not None]

    def _is_computing(self, second: float) -> bool:
        windows = (self.compute_window(task) for task in self.tasks.values())
        return any(start <= second <= stop for start, stop in filter(None, windows))

    def _absences(self, from_s: float, to_s: float) -> Iterable[tuple[float, float]]:
        for (_, left_s), (back_s, _) in pairwise(self.present):
            if back_s - left_s > AWAY_S and from_s < left_s and back_s <= to_s:
                yield left_s, back_s


def _keep_last_values(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Drop all but the last value of each moment."""
    return [pair for pair, following in pairwise([*pairs, (math.inf, 0.0)]) if pair[0] < following[0]]


def load_devices(trace: Trace) -> dict[str, RecordedDevice]:
    """Return all devices of a trace by name."""
    presence: defaultdict[str, list[Presence]] = defaultdict(list)
    for row in trace.presence:
        presence[row.device].append(row)
    server_s = server_training_s(trace) if trace.header.plan.server_data else 0.0  # not part of the links' delay
    opened_s = {row.round: row.opened_s + server_s for row in trace.rounds if row.opened_s is not None}
    closed_s = {row.round: row.closed_s for row in trace.rounds if row.closed_s is not None}
    moments: dict[str, Any] = {"opened_s": opened_s, "closed_s": closed_s, "longest_s": _longest_s(trace.tasks)}
    devices = {
        device.name: RecordedDevice(
            device.name, device.board, present=connected_intervals(presence[device.name]), **moments
        )
        for device in trace.header.devices
    }
    for task in trace.tasks:
        if task.outcome in ("arrived", "late") and task.compute_s is not None:
            devices[task.device].tasks[task.round] = task
    for decision in trace.decisions:
        devices[decision.device].batch_size[decision.round] = decision.batch_size
        devices[decision.device].epochs[decision.round] = decision.local_epochs
        devices[decision.device].merges[decision.round] = decision.values.get(MERGES_SINGLE) is True
        if decision.steps:
            devices[decision.device].sessions[decision.round] = decision.steps
    for sample in trace.readings:
        devices[sample.device].readings[sample.name].append(sample)
    for step in trace.steps:
        devices[step.device] = replace(devices[step.device], step=step)
    return devices


def server_training_s(trace: Trace) -> float:
    """Return the seconds of the server's own training before a broadcast; 0 if unknown.

    It delays every device, so it is the unexplained time of the least delayed update, in the median round.
    """
    opened_s = {row.round: row.opened_s for row in trace.rounds if row.opened_s is not None}
    waits_s: dict[int, list[float]] = {}
    for task in trace.tasks:
        if task.outcome == "arrived" and task.arrived_s is not None and task.round in opened_s:
            own_s = task.arrived_s - opened_s[task.round] - sum(part or 0.0 for part in measured_spans_s(task))
            waits_s.setdefault(task.round, []).append(max(0.0, own_s))
    return median(map(min, waits_s.values())) if waits_s else 0.0


def measured_spans_s(task: TaskRow) -> tuple[float | None, ...]:
    """Return the seconds of a task's spans; None for a span that was not measured."""
    return task.download_s, task.compute_s, task.exchange_s, task.upload_s


def _longest_s(tasks: Iterable[TaskRow]) -> dict[int, float]:
    """Return the longest download of every round with several downloads."""
    downloads_s: defaultdict[int, list[float]] = defaultdict(list)
    for task in tasks:
        if task.download_s is not None:
            downloads_s[task.round].append(task.download_s)
    return {number: max(seconds) for number, seconds in downloads_s.items() if len(seconds) > 1}


def connected_intervals(rows: Sequence[Presence]) -> tuple[tuple[float, float], ...]:
    """Return a device's connected intervals; always, if no presence was recorded."""
    intervals: list[tuple[float, float]] = []
    since: float | None = 0.0 if rows and rows[0].event == "left" else None
    for row in rows:
        if row.event == "joined" and since is None:
            since = row.at_s
        elif row.event == "left" and since is not None:
            if row.at_s > since:
                intervals.append((since, row.at_s))
            since = None
    if since is not None:
        intervals.append((since, math.inf))
    return tuple(intervals) if rows else ALWAYS

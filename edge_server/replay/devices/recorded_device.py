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
from edge_server.replay.devices.behaviour import ALWAYS
from edge_server.replay.devices.curve import Curve, steps
from edge_server.replay.trace.schema import Presence, Sample, Step, TaskRow
from edge_server.replay.trace.trace import Trace
from shared.protocol.messages import MERGES_SINGLE
from shared.transfer.frames import FRAME_BYTES, HEADER_BYTES

AWAY_S = 5.0
"""A device that is away for longer measures something else when it is back."""


LATE_S = 0.1
"""After the close of its round a late update came, at the least; when, nobody recorded."""


SHARE = 0.9
"""Of a transfer's seconds may be delay at the most: it has bytes."""


@dataclass(frozen=True)
class RecordedDevice:
    """One device's part of a trace.

    Attributes:
        board: Id of its board's profile.
        merges: By round, whether a last batch of one example joined the one before it.
        sessions: Steps of its split sessions, by round.
        tasks: Those whose update came, in time or late, and of which the seconds of computing are known; by round.
        opened_s: When each round opened and the server, where it trains, had done so.
        step: What a training step cost it, if that was measured.
        readings: By name, in order of time.
        present: When it was connected; half-open intervals of seconds.
        longest_s: The longest download of each round in which several devices had one.
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
        """Return the steps of a split session that a device had its part in; 0 of any other task."""
        return max(0, self.sessions.get(task.round, 0) - (task.missed_steps or 0))

    def observed_s(self, task: TaskRow) -> float:
        """Return a second at which a task was under way: when its update came, else when its round opened."""
        return self.opened_s.get(task.round, 0.0) if task.arrived_s is None else task.arrived_s

    @cached_property
    def delay_s(self) -> float:
        """Return one way's delay: the longest that no round contradicts, since what is constant is no rate's doing.

        Each transfer holds two of them, and so does what a task takes beyond its transfers and its computing: the way
        of the task, of the offer and of what is asked for, less that of the last word, for which the round waits not.
        Who was too slow for a shared transmission had frames of it to bear meanwhile: nothing tells its delay.
        """
        if any(self._is_shared(task) and self._is_last(task) for task in self.tasks.values()):
            return 0.0
        lags = [(lag_s, task) for task in self.tasks.values() if (lag_s := self._lag_s(task)) is not None]
        spans = (
            part
            for lag_s, task in lags
            for part in (lag_s, *self._possible_delays_s(task))
            if task.outcome == "arrived"
        )
        return min(spans, default=0.0) / 2

    def lag_s(self, number: int) -> float:
        """Return the seconds of a round's task beyond transfers, computing and delays; else the median of all rounds.

        Of an update that came late it is known only that it did not come before the round closed.
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
        """Return bit/s of the link down as the device itself told them about then; 0 where its download tells them.

        Who is on a shared transmission waits for slower ones, and bears frames that are of no use to it once it has
        left: its link is faster than its download. Who took longest waited for nobody: what it told counts for it only
        if it is no other link by what a meter calls a step.
        """
        rates = self.readings.get("link.down_bits_per_s")
        if not rates or not self._is_shared(task) or not task.download_s:
            return 0.0
        moment, slow_bps = self.observed_s(task), 8 * (task.bytes_down or 0) / task.download_s
        rate_bps = max(0.0, min(rates, key=lambda sample: abs(sample.at_s - (sample.age_s or 0.0) - moment)).value)
        return 0.0 if self._is_last(task) and slow_bps < (1 - STEP_SHARE) * rate_bps else rate_bps

    def _is_shared(self, task: TaskRow) -> bool:
        """Tell whether a task's parameters came in several frames that may have gone to several devices."""
        return task.round in self.longest_s and (task.bytes_down or 0) > FRAME_BYTES + HEADER_BYTES

    def _is_last(self, task: TaskRow) -> bool:
        return (task.download_s or 0.0) >= self.longest_s.get(task.round, 0.0)

    def curve(self, name: str) -> tuple[Curve | None, int]:
        """Return a reading over time while the device computed, and how many gaps were filled; None without any.

        What was read between tasks is the idle board's. A reading is recorded when it moves, so that one holds until
        the next while the device is there, the first also before it and the last behind it. Where the device was away
        for more than 5 s, the mean of both sides stands for that time, and the later one from its return on.
        """
        samples = [
            sample for sample in self.readings.get(name, ()) if self._is_computing(sample.at_s - (sample.age_s or 0.0))
        ]
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
        """Return from when to when a task computed, by the server's clock; None where nobody knows.

        In a split session it computed and waited by turns.
        """
        if task.arrived_s is None or task.upload_s is None or task.compute_s is None:
            return None
        stop_s = task.arrived_s - task.upload_s
        busy_s = task.compute_s + (task.exchange_s or 0.0 if self.completed_steps(task) else 0.0)
        return (stop_s - busy_s, stop_s) if task.compute_s > 0 and busy_s <= stop_s else None

    def _possible_delays_s(self, task: TaskRow) -> list[float]:
        """Return what of a task's transfers, or of one step's exchange, may be delay; where nothing moved, nothing."""
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
    """Keep of several values of one moment the last."""
    return [pair for pair, following in pairwise([*pairs, (math.inf, 0.0)]) if pair[0] < following[0]]


def load_devices(trace: Trace) -> dict[str, RecordedDevice]:
    """Return what a trace knows of every device, by name."""
    presence: defaultdict[str, list[Presence]] = defaultdict(list)
    for row in trace.presence:
        presence[row.device].append(row)
    server_s = server_training_s(trace) if trace.header.plan.server_data else 0.0  # no delay of the devices' links
    opened_s = {row.round: row.opened_s + server_s for row in trace.rounds if row.opened_s is not None}
    closed_s = {row.round: row.closed_s for row in trace.rounds if row.closed_s is not None}
    moments: dict[str, Any] = {
        "opened_s": opened_s,
        "closed_s": closed_s,
        "longest_s": _longest_downloads_s(trace.tasks),
    }
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
    """Return what the server's own training takes before a round's broadcast; 0 where nothing tells.

    It delays every device: what the least delayed one's update took beyond its own spans, in the median round.
    """
    opened_s = {row.round: row.opened_s for row in trace.rounds if row.opened_s is not None}
    waits_s: dict[int, list[float]] = {}
    for task in trace.tasks:
        if task.outcome == "arrived" and task.arrived_s is not None and task.round in opened_s:
            own_s = task.arrived_s - opened_s[task.round] - sum(part or 0.0 for part in measured_spans_s(task))
            waits_s.setdefault(task.round, []).append(max(0.0, own_s))
    return median(map(min, waits_s.values())) if waits_s else 0.0


def measured_spans_s(task: TaskRow) -> tuple[float | None, ...]:
    """Return the seconds of a task's own spans; None for one that nobody measured."""
    return task.download_s, task.compute_s, task.exchange_s, task.upload_s


def _longest_downloads_s(tasks: Iterable[TaskRow]) -> dict[int, float]:
    """Return the longest download of every round in which several devices had one."""
    downloads_s: defaultdict[int, list[float]] = defaultdict(list)
    for task in tasks:
        if task.download_s is not None:
            downloads_s[task.round].append(task.download_s)
    return {number: max(seconds) for number, seconds in downloads_s.items() if len(seconds) > 1}


def connected_intervals(rows: Sequence[Presence]) -> tuple[tuple[float, float], ...]:
    """Return when a device was connected; always, where nobody saw it come or go."""
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

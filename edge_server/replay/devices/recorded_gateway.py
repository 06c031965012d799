"""Server time of a recorded round: storing the last update, aggregation and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from edge_server.record.rows import Round, TaskRow
from edge_server.replay.devices.recorded_device import load_devices, measured_spans_s, server_training_s
from edge_server.replay.devices.recorded_link import server_wait_s
from edge_server.replay.trace.trace import Trace
from edge_server.rounds.round import ROUND_END, SERVER_TRAINING
from edge_server.rounds.split.session import SPLIT_STEP


def server_costs(trace: Trace, gossip_s: Mapping[int, float] | None = None) -> Mapping[str, Callable[..., float]]:
    """Return the seconds of a recorded server's calculations, by name.

    Args:
        gossip_s: Seconds of each round's end spent mixing with other sites.
    """
    end_s, step_s, training_s = round_end_seconds(trace, gossip_s), split_step_seconds(trace), server_training_s(trace)
    return {
        ROUND_END: lambda number, _state: end_s(number),
        SPLIT_STEP: lambda *_: step_s,
        SERVER_TRAINING: lambda *_: training_s,
    }


def round_end_seconds(trace: Trace, gossip_s: Mapping[int, float] | None = None) -> Callable[[int], float]:
    """Return the server's seconds by round, from the last counted update, or the deadline, to the round's end.

    Rounds without a known value take the median of the others, or 0 if there are none.

    Args:
        gossip_s: Seconds of each round's end spent mixing with other sites.
    """
    mixing_s = gossip_s or {}
    deadline_s, tasks = trace.header.plan.round.deadline_s, dict[int, list[TaskRow]]()
    for task in trace.tasks:
        # Statistics tasks are numbered from rounds + 1, but belong to the round before them.
        offset = trace.header.plan.rounds + 1 if task.purpose == "statistics" else 0
        tasks.setdefault(task.round - offset, []).append(task)
    round_ends = ((row.round, _server_time_s(row, tasks.get(row.round, []), deadline_s)) for row in trace.rounds)
    known_s = {number: max(0.0, own_s - mixing_s.get(number, 0.0)) for number, own_s in round_ends if own_s is not None}
    usual_s = median(known_s.values()) if known_s else 0.0
    return lambda number: known_s.get(number, usual_s)


def split_step_seconds(trace: Trace) -> float:
    """Return the server's seconds per step of a split session; 0 if there are none, or the links explain all.

    The device that delivers last waits only for the server: this is the shortest wait beyond a device's link, in the
    median round.
    """
    spares_s: dict[int, list[float]] = {}
    for device in load_devices(trace).values():
        for task in device.tasks.values():
            if (spare := server_wait_s(device, task)) is not None:
                spares_s.setdefault(task.round, []).append(spare)
    return median(map(min, spares_s.values())) if spares_s else 0.0


def _server_time_s(row: Round, tasks: list[TaskRow], deadline_s: float) -> float | None:
    """Return a round's seconds after its last update; None if it was not aggregated or that time is unknown."""
    if row.outcome != "aggregated" or row.opened_s is None or row.closed_s is None:
        return None
    ends_s = [end_s for task in tasks if (end_s := _end_s(task, row.opened_s)) is not None]
    if not ends_s:
        return None
    ended_s, due_s = max(ends_s), row.opened_s + deadline_s
    if ended_s < due_s <= row.closed_s and any(task.outcome in ("late", "missing") for task in tasks):
        ended_s = due_s
    return max(0.0, row.closed_s - ended_s)


def _end_s(task: TaskRow, opened_s: float) -> float | None:
    """Return the second at which a replay receives a counted update; an upload lasts until the server stored it."""
    if task.outcome != "arrived" or task.arrived_s is None:
        return None
    return max(task.arrived_s, opened_s + sum(part or 0.0 for part in measured_spans_s(task)))

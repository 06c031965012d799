"""Link rates and radio power of a recorded device."""

from __future__ import annotations

import math

from edge_server.record.rows import TaskRow
from edge_server.replay.devices.behaviour import Direction
from edge_server.replay.devices.curve import constant
from edge_server.replay.devices.flow import Flow
from edge_server.replay.devices.recorded_device import RecordedDevice


def link_flows(device: RecordedDevice, number: int) -> tuple[Flow | None, Flow | None]:
    """Return the rates up and down of a round; None for a direction without measurable time."""
    up_bps, down_bps = link_rates(device, number)
    return _as_flow(up_bps), _as_flow(down_bps)


def link_rates(device: RecordedDevice, number: int) -> tuple[float, float]:
    """Return the rates up and down of a round, or of the nearest one, in bit/s; infinite without measurable time.

    The rates are those of the model's transfers, raised until a split session's exchange fits its recorded time: the
    transfers of a small model are dominated by latency.
    """
    up_bps, down_bps = _direction_rate(device, number, "up"), _direction_rate(device, number, "down")
    session = min(
        filter(device.completed_steps, device.tasks.values()), key=lambda task: _distance(task, number), default=None
    )
    if session is None or not session.exchange_s:
        return up_bps, down_bps
    room_s = session.exchange_s - 2 * device.delay_s * device.completed_steps(session)
    faster = max(1.0, exchange_transfer_s(session, up_bps, down_bps) / room_s) if room_s > 0 else 1.0
    return up_bps * faster, down_bps * faster


def exchange_transfer_s(task: TaskRow, up_bps: float, down_bps: float) -> float:
    """Return the seconds that a split session's features and gradients take at these rates."""
    return 8 * ((task.features_bytes or 0) / up_bps + (task.gradient_bytes or 0) / down_bps)


def server_wait_s(device: RecordedDevice, task: TaskRow) -> float | None:
    """Return one step's exchange time beyond the link: the server and slower devices; None if unknown."""
    steps = device.completed_steps(task)
    if not steps or task.exchange_s is None or not task.features_bytes or not task.gradient_bytes:
        return None
    return max(
        0.0, (task.exchange_s - exchange_transfer_s(task, *link_rates(device, task.round))) / steps - 2 * device.delay_s
    )


def radio_joules(device: RecordedDevice, way: Direction, t0: float, t1: float) -> float | None:
    """Return the joules of a transfer from second `t0` to `t1`, at the power of the nearest recorded transfer."""
    joules, span = ("download_joules", "download_s") if way == "down" else ("upload_joules", "upload_s")
    tasks = [task for task in device.tasks.values() if getattr(task, joules) is not None and getattr(task, span)]
    if not tasks:
        return None
    task = min(tasks, key=lambda each: (abs(device.observed_s(each) - t1), each.round))
    watts: float = getattr(task, joules) / getattr(task, span)
    return watts * (t1 - t0)


def exchange_w(task: TaskRow) -> float | None:
    """Return the device's power during a split session's exchange, in watts; None if unknown."""
    if task.exchange_joules is None or not task.exchange_s:
        return None
    return task.exchange_joules / task.exchange_s


def _direction_rate(device: RecordedDevice, number: int, way: Direction) -> float:
    size, span = {"down": ("bytes_down", "download_s"), "up": ("arrived_bytes", "upload_s")}[way]
    tasks = [task for task in device.tasks.values() if getattr(task, size) and getattr(task, span) is not None]
    if not tasks:
        return math.inf
    task = min(tasks, key=lambda each: _distance(each, number))
    seconds = max(0.0, getattr(task, span) - 2 * device.delay_s)
    rate_bps = 8 * getattr(task, size) / seconds if seconds else math.inf
    return max(rate_bps, device.reported_down_bps(task)) if way == "down" else rate_bps


def _distance(task: TaskRow, number: int) -> tuple[int, int]:
    """Return the sort key that is smallest for the task nearest to a round."""
    return abs(task.round - number), task.round


def _as_flow(bits_per_s: float) -> Flow | None:
    return constant(bits_per_s) if math.isfinite(bits_per_s) else None

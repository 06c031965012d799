"""Participants of a replay: devices, their behaviour, and what runs their tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.plan.devices import DevicePlan
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.jobs import JobQueue
from edge_server.replay.workload import Workload
from shared.models.build import DRAW


@dataclass(frozen=True)
class Participants:
    """Devices of a replay and what runs their tasks.

    Attributes:
        behaviours: One per device, in the order of `fleet`.
        folder: Parent of the agents' state folders.
        server_s: Seconds of the server's calculations, by name; those without an entry take no time.
        draw: Generator of the first weights, see `shared.models.build`.
    """

    fleet: Sequence[DevicePlan]
    behaviours: Sequence[Behaviour]
    jobs: JobQueue
    workload: Workload
    folder: Path
    server_s: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    draw: str = DRAW

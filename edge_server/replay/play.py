"""Play a plan in virtual time with the real server and the real agents.

Five parts are replaced. Transport: memory behind each device's simulated link. Clock: the loop's virtual time. Worker:
inline, with training in separate processes that take the device's seconds. Sensing: none. Store: the same one, without
waiting for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import Store
from edge_server.journal.records import RoundOpened
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.jobs import Jobs
from edge_server.replay.site import SITE, Stage
from edge_server.replay.workload import Scale
from edge_server.rounds.run import run_plan
from shared.models.build import DRAW
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background, build_charging_worker
from shared.tensors.tree import State
from shared.transport.memory import MemoryTransport


@dataclass(frozen=True)
class Cast:
    """Who takes part in a replay.

    Attributes:
        behaviours: What each of them does with work and bytes.
        jobs: Has their tasks done.
        scale: Tells how much work they are.
        folder: For what their agents keep on disk.
        server_s: Seconds that the server's own calculations take, by their names; others take none.
        draw: Who draws first weights.
    """

    fleet: Sequence[DevicePlan]
    behaviours: Sequence[Behaviour]
    jobs: Jobs
    scale: Scale
    folder: Path
    server_s: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    draw: str = DRAW


@dataclass(frozen=True)
class ReplaySite:
    """One site of a replay.

    Attributes:
        members: Its devices; None for all.
        broker: On which its server and they meet.
    """

    site: str = SITE
    members: frozenset[str] | None = None
    broker: MemoryTransport = field(default_factory=MemoryTransport)


@asynccontextmanager
async def server_among_devices(plan: Plan, run: str, cast: Cast, place: ReplaySite) -> AsyncIterator[Server]:
    """Let a server listen, and the devices of its site come and go, while the block lasts.

    Args:
        plan: What will be done.
        cast: Who takes part, at whichever site.
    """
    folder, clock = (cast.folder / place.site if place.members else cast.folder), asyncio.get_running_loop().time
    us = plan, cast.fleet, cast.behaviours, folder, place.broker, cast.jobs, cast.scale, clock
    stage, worker = Stage(*us, place.site, place.members), build_charging_worker(cast.server_s)
    server = Server(place.site, stage, clock, worker, was_run=lambda name: name == run, keep=[stage.heard])
    async with background(stage.run()), server.listening():
        yield server


def wait_for_jobs(cast: Cast) -> None:
    """Have the running loop's virtual time wait for what is computed beside it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.before_time_moves(cast.jobs.settle)


async def play(plan: Plan, run: str, store: Store, cast: Cast, told: Mapping[int, RoundOpened] | None = None) -> State:
    """Run a plan on the running loop's virtual time; return the final server state.

    Args:
        store: Where it is recorded.
        told: What is told in each round, in place of what is decided here.
    """
    wait_for_jobs(cast)
    us, graph = (plan, run), make_evaluation_graph(plan)
    async with server_among_devices(*us, cast, ReplaySite()) as server:
        return await run_plan(
            *us, server, store, LinkConfig(), started="", draw=cast.draw, graph=graph, recorded_rounds=told
        )

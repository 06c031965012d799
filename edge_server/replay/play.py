"""Play a plan in virtual time with the real server and the real agents.

Five parts are replaced. Transport: memory behind each device's simulated link. Clock: the loop's virtual time. Worker:
inline, with training in separate processes that take the device's seconds. Sensing: none. Store: the same one, without
waiting for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import Store
from edge_server.journal.records import RoundOpened
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.participants import Participants
from edge_server.replay.site import SITE, VirtualSite
from edge_server.rounds.run import run_plan
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background, build_charging_worker
from shared.tensors.tree import State
from shared.transport.memory import MemoryTransport


@dataclass(frozen=True)
class ReplaySite:
    """Site of a replay.

    Attributes:
        members: Names of the site's devices; None for all.
        broker: Connects the site's server and devices.
    """

    site: str = SITE
    members: frozenset[str] | None = None
    broker: MemoryTransport = field(default_factory=MemoryTransport)


@asynccontextmanager
async def serve_devices(plan: Plan, run: str, participants: Participants, place: ReplaySite) -> AsyncIterator[Server]:
    """Run a site's server and devices while the block lasts.

    Args:
        participants: Devices of all sites.
    """
    folder = participants.folder / place.site if place.members else participants.folder
    clock = asyncio.get_running_loop().time
    virtual_site = VirtualSite(plan, participants, folder, place.broker, clock, place.site, place.members)
    worker = build_charging_worker(participants.server_s)
    server = Server(place.site, virtual_site, clock, worker, was_run=lambda name: name == run)
    server.presence.report_listeners.append(virtual_site.stop_settled_agent)
    async with background(virtual_site.run()), server.listening():
        yield server


def couple_jobs_to_time(participants: Participants) -> None:
    """Make the running loop's virtual time wait for due jobs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.before_time_moves(participants.jobs.settle)


async def play(
    plan: Plan,
    run: str,
    store: Store,
    participants: Participants,
    recorded_rounds: Mapping[int, RoundOpened] | None = None,
) -> State:
    """Run a plan on the running loop's virtual time; return the final server state.

    Args:
        recorded_rounds: Assignments of an earlier run to repeat, by round; None to decide them again.
    """
    couple_jobs_to_time(participants)
    graph = make_evaluation_graph(plan)
    async with serve_devices(plan, run, participants, ReplaySite()) as server:
        return await run_plan(
            plan,
            run,
            server,
            store,
            LinkConfig(),
            started="",
            draw=participants.draw,
            graph=graph,
            recorded_rounds=recorded_rounds,
        )

"""Replay a plan: the real server and the real agents, with five seams exchanged.

Transport: memory behind each device's link. Clock: the loop's virtual time. Worker: inline; training in processes
beside, at the seconds that the device takes. Sensing: none. Store: the same one, without waiting for the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.config import LinkConfig
from edge_server.fleet.hub import Server
from edge_server.journal.records import Store
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.jobs import Jobs
from edge_server.replay.site import SITE, Stage
from edge_server.replay.trainer import Scale
from edge_server.rounds.run import run_plan
from edge_server.rounds.split.top_model import Top
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import P, R, Worker, inline
from shared.runtime.tasks import background
from shared.tensors.tree import State
from shared.transport.memory import MemoryTransport


@dataclass(frozen=True)
class Cast:
    """Who takes part in a replay.

    Attributes:
        fleet: The devices.
        behaviours: What each of them does with work and bytes.
        jobs: Has their tasks done.
        scale: Tells how much work they are.
        folder: For what their agents keep on disk.
        server_s: Seconds that the server itself takes in a round; None for none.
        step_s: Seconds that it takes for a step of a split session.
    """

    fleet: Sequence[DevicePlan]
    behaviours: Sequence[Behaviour]
    jobs: Jobs
    scale: Scale
    folder: Path
    server_s: Callable[[int], float] | None = None
    step_s: float = 0.0


async def play(plan: Plan, run: str, store: Store, cast: Cast) -> State:
    """Run a plan on the running loop's virtual time; return the final server state.

    Args:
        plan: What to do.
        run: The run's name.
        store: Where it is recorded.
        cast: Who takes part.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.before_time_moves(cast.jobs.settle)
    stage = Stage(plan, cast.fleet, cast.behaviours, cast.folder, MemoryTransport(), cast.jobs, cast.scale, loop.time)
    worker = busy(store, cast.server_s, cast.step_s) if cast.server_s else inline
    server = Server(SITE, stage, loop.time, worker, was_run=lambda name: name == run, keep=[stage.heard])
    async with background(stage.run()), server.listening():
        return await run_plan(plan, run, server, store, LinkConfig(), started="")


def busy(store: Store, seconds: Callable[[int], float], step_s: float = 0.0) -> Worker:
    """Return a worker that runs inline, and lets a round's seconds pass when the state after that round is kept.

    Those of a split session's step pass when it is served.
    """

    async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        if function == store.save:
            number, *_ = args
            assert isinstance(number, int)
            await asyncio.sleep(seconds(number))
        elif getattr(function, "__func__", None) is Top.serve:
            await asyncio.sleep(step_s)
        return result

    return run

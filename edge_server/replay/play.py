"""Replay a plan: the real server and the real agents, with five seams exchanged.

Transport: memory behind a link of the plan's rate. Clock: the loop's virtual time. Worker: inline, then the plan's
seconds. Sensing: none. Store: the same one, without waiting for the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.agent import Agent, Job
from device_agent.compose import compose
from device_agent.config import AgentConfig
from device_agent.metering import GivenMeter
from device_agent.training import Bench, perform
from edge_server.config import LinkConfig
from edge_server.run import run_plan
from edge_server.server import Server
from edge_server.store.base import Store
from edge_server.trial.plan import DevicePlan, Plan, share
from shared.background import background
from shared.clock import Clock
from shared.presence import Session
from shared.transport.base import Transport
from shared.transport.link import Link, Rate
from shared.transport.memory import MemoryTransport
from shared.tree import State
from shared.worker import costing, inline

SITE = "replay"
REPORT_S = 3600.0
MEGA = 1e6


@dataclass
class InlineTrainer:
    """A trainer without a process: computes at once, then lets the device's seconds pass."""

    compute_s: float
    bench: Bench = field(default_factory=Bench)

    async def ready(self) -> None:
        """There is nothing to wait for."""

    async def __call__(self, job: Job) -> None:
        meter = GivenMeter(self.compute_s)
        await costing(self.compute_s)(perform, job, self.bench, meter.task, lambda: False)


async def play(plan: Plan, fleet: list[DevicePlan], run: str, store: Store, folder: Path) -> State:
    """Run a plan on the running loop's time; return the final server state.

    Args:
        plan: What to do.
        fleet: The devices and their links.
        run: The run's name.
        store: Where it is recorded.
        folder: For the devices' outboxes and states.
    """
    clock = asyncio.get_running_loop().time
    broker, link = MemoryTransport(), LinkConfig()
    server = Server(SITE, broker, clock, inline, was_run=lambda name: name == run)
    agents = [_live(plan, fleet, index, folder / device.name, broker, clock) for index, device in enumerate(fleet)]
    async with server.listening(), background(*agents):
        return await run_plan(plan, run, server, store, link, started="")


async def _live(plan: Plan, fleet: list[DevicePlan], index: int, folder: Path, broker: Transport, clock: Clock) -> None:
    """Run one device: say that it is here, then serve."""
    device = fleet[index]
    transport = Link(broker, _rate(device), clock, seed=index)
    agent = agent_of(plan, fleet, index, folder, transport, clock)
    presence = Session(folder / "session", device.name, SITE, device.name).presence()
    await transport.publish(presence.topic, presence.birth, retain=True)
    await agent.run()


def agent_of(
    plan: Plan, fleet: list[DevicePlan], index: int, folder: Path, transport: Transport, clock: Clock
) -> Agent:
    """Return the agent of a plan's device, with a trainer that computes inline and takes the plan's seconds."""
    device, data = fleet[index], share(plan, fleet, index)
    config = AgentConfig(device=device.name, site=SITE, state_dir=str(folder), data=data, report_s=REPORT_S)
    trainer = InlineTrainer(device.compute_s)
    return compose(config, folder, transport, trainer, clock=clock, worker=inline, seed=index)


def _rate(device: DevicePlan) -> Rate:
    return Rate(
        up_bits_per_second=device.up_mbit_s and device.up_mbit_s * MEGA,
        down_bits_per_second=device.down_mbit_s and device.down_mbit_s * MEGA,
        delay_s=device.delay_s,
    )

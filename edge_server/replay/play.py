"""Replay a plan: the real server and the real agents, with five seams exchanged.

Transport: memory behind a link of the plan's rate. Clock: the loop's virtual time. Worker: inline, then the plan's
seconds. Sensing: none. Store: the same one, without waiting for the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from device_agent.agent import Agent, Job
from device_agent.delivery import Delivery
from device_agent.download import Download
from device_agent.metering import GivenMeter
from device_agent.outbox import Outbox
from device_agent.training import Bench, perform
from edge_server.config import LinkConfig
from edge_server.run import run_plan
from edge_server.server import Server
from edge_server.store.base import Store
from edge_server.trial.plan import DevicePlan, Plan, share
from shared.background import background
from shared.clock import Clock
from shared.messages import Report
from shared.presence import Session
from shared.transport.base import Transport
from shared.transport.link import Link, Rate
from shared.transport.memory import MemoryTransport
from shared.tree import State
from shared.worker import costing, inline

SITE = "replay"
MAX_PAYLOAD_BYTES = 4 << 30
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
    agent = _agent(plan, fleet, index, folder, transport, clock)
    presence = Session(folder / "session", device.name, SITE, device.name).presence()
    await transport.publish(presence.topic, presence.birth, retain=True)
    await agent.run()


def _agent(plan: Plan, fleet: list[DevicePlan], index: int, folder: Path, transport: Transport, clock: Clock) -> Agent:
    device, link = fleet[index], LinkConfig()
    outbox = Outbox(folder / "outbox", folder / "state")
    return Agent(
        device=device.name,
        site=SITE,
        transport=transport,
        clock=clock,
        trainer=InlineTrainer(device.compute_s),
        outbox=outbox,
        download=Download(
            *(transport, SITE, device.name, folder, inline, clock),
            window=link.window,
            patience_s=link.patience_s,
            limit=MAX_PAYLOAD_BYTES,
        ),
        delivery=Delivery(transport, SITE, device.name, outbox, jitter=Random(index)),  # noqa: S311 - no secret
        data=share(plan, fleet, index),
        states=folder / "state",
        frame_bytes=link.frame_bytes,
        report_s=3600.0,
        sense=lambda: Report(device=device.name, at=clock()),
    )


def _rate(device: DevicePlan) -> Rate:
    return Rate(
        up_bits_per_second=device.up_mbit_s and device.up_mbit_s * MEGA,
        down_bits_per_second=device.down_mbit_s and device.down_mbit_s * MEGA,
        delay_s=device.delay_s,
    )

"""Replayed devices of a site: connect, disconnect and run an agent on demand.

A device is online from its birth message alone. Its agent is created when the server sends the device a task and
removed when the server has received that task's cost, so memory grows with the cohort rather than the fleet. Between
tasks only a state on disk remains, for algorithms that need one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from device_agent.agent.build import compose
from device_agent.agent.lifecycle import Agent
from device_agent.config import AgentConfig
from device_agent.exchange.download import BASES, GRAPHS
from device_agent.trainer.workspace import Workspace
from edge_server.plan.data import device_data, planned_data
from edge_server.plan.plan import Plan
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.devices.flow import FlowShare
from edge_server.replay.participants import Participants
from edge_server.replay.trainer import ReplayTrainer
from shared.protocol import wire
from shared.protocol.messages import PAYLOAD, TASK_FIELDS, Report, Task
from shared.protocol.topics import parse_channel, parse_device, topic
from shared.runtime.clock import Clock
from shared.runtime.executor import inline
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport
from shared.transport.presence import build_presence
from shared.transport.simulated_link import Link, Rate

SITE = "replay"


REPORT_S = 3600.0
FRAMED_FIELDS = tuple(name for name in TASK_FIELDS if name != PAYLOAD)
"""Replayed devices fetch small payloads in frames too, so that their seconds and joules are modelled."""


@dataclass
class RunningAgent:
    """Agent of a device that has a task."""

    agent: Agent
    link: Link
    main_task: asyncio.Task[None]
    folder: Path
    task: tuple[str, int]


@dataclass
class VirtualSite:
    """Transport of a site's server that starts a device's agent when it is sent a task.

    Attributes:
        folder: Parent of the agents' state folders.
        broker: Connects the site's server and devices.
        members: Names of the site's devices; None for all.
        most: Highest number of agents that ran at the same time.
    """

    plan: Plan
    participants: Participants
    folder: Path
    broker: MemoryTransport
    clock: Clock
    site: str = SITE
    members: frozenset[str] | None = None
    most: int = 0
    _numbers: dict[str, int] = field(init=False)
    _agents: dict[str, RunningAgent] = field(default_factory=dict)
    _online: set[str] = field(default_factory=set)
    _spare: list[Path] = field(default_factory=list)
    _starts: int = 0
    _group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _workspace: Workspace = field(init=False)
    _classes: tuple[str, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        """Number the devices; their split sessions share one workspace, hence one copy of the data set."""
        self._workspace = Workspace(read=cache(self.participants.workload.cache.load))
        self._numbers = {device.name: number for number, device in enumerate(self.participants.fleet)}
        self._classes = self.participants.workload.cache.classes(planned_data(self.plan))

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        if parse_channel(topic) == "task" and parse_device(topic) in self._numbers:
            self._assign(parse_device(topic), wire.decode_as(Task, payload))
        await self.broker.publish(topic, payload, retain=retain, assured=assured)

    def subscribe(self, *patterns: str) -> AbstractAsyncContextManager[Inbox]:
        return self.broker.subscribe(*patterns)

    def stop_settled_agent(self, report: Report) -> None:
        """Stop the agent that reported the cost of its last task."""
        running, cost = self._agents.get(report.device), report.spent
        if running and cost and (cost.run, cost.round) == running.task:
            del self._agents[report.device]
            running.main_task.cancel()
            self._recycle_folder(running.folder)

    async def run(self) -> None:
        """Connect and disconnect devices on schedule and run their agents until cancelled.

        Raises:
            Exception: First unexpected error of an agent.
        """
        try:
            async with self._group:
                for moment, name, session, is_online in sorted(self._presence_changes()):
                    if (wait := moment - self.clock()) > 0:
                        await asyncio.sleep(wait)
                    await self._set_presence(name, session, is_online=is_online)
                await asyncio.Event().wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _presence_changes(self) -> Iterator[tuple[float, str, int, bool]]:
        """Yield second, device, session number and whether it connects, for every change of presence."""
        for device, behaviour in zip(self.participants.fleet, self.participants.behaviours, strict=True):
            if self.members is not None and device.name not in self.members:
                continue
            for session, (start, stop) in enumerate(behaviour.present, 1):
                yield start, device.name, session, True
                if stop < float("inf"):
                    yield stop, device.name, session, False

    async def _set_presence(self, name: str, session: int, *, is_online: bool) -> None:
        presence, running = (
            build_presence(name, self.site, name, session, classes=self._classes, knows=FRAMED_FIELDS),
            self._agents.get(name),
        )
        if is_online:
            self._online.add(name)
        else:
            self._online.discard(name)
        if running and is_online:
            running.link.connected.set()
            running.agent.delivery.wake.set()
        elif running:
            running.link.connected.clear()
        await self.broker.publish(presence.topic, presence.birth if is_online else presence.will, retain=True)

    def _assign(self, name: str, task: Task) -> None:
        if running := self._agents.get(name):
            running.task = (task.run, task.round)
            running.link.tune(_link_rate(self.participants.behaviours[self._numbers[name]], task))
            return
        self._starts += 1
        number, folder = self._numbers[name], self.folder / name
        behaviour, seed = self.participants.behaviours[number], number + len(self.participants.fleet) * self._starts
        link = Link(self.broker, _link_rate(behaviour, task), self.clock, seed=seed)
        if name not in self._online:
            link.connected.clear()
        if self._spare and not folder.exists():
            self._spare.pop().rename(folder)
        config = AgentConfig(
            device=name,
            site=self.site,
            state_dir=str(folder),
            data=device_data(self.plan, self.participants.fleet, number),
            report_s=REPORT_S,
        )
        trainer = ReplayTrainer(
            behaviour, self.participants.workload, self.participants.jobs, self.clock, self._workspace
        )
        agent = compose(
            config, folder, link, trainer, clock=self.clock, worker=inline, charge=trainer.charge, seed=seed
        )
        agent.delivery.bucket = None  # the simulated link already has its share of the bandwidth
        self.broker.keep(topic(self.site, name, "task"))
        main_task = self._group.create_task(agent.run(), name=name)
        self._agents[name] = RunningAgent(agent, link, main_task, folder, (task.run, task.round))
        self.most = max(self.most, len(self._agents))

    def _recycle_folder(self, folder: Path) -> None:
        """Keep a device's state; reuse its other files, at half the cost of creating new ones."""
        (folder / ".params").unlink(missing_ok=True)  # it names the stored payload; the folder's next device has none
        if not any((folder / "state").iterdir()) and not _stores_payloads(folder):
            self._spare.append(folder.rename(self.folder / f".spare-{self._starts}-{len(self._spare)}"))
            return
        shutil.rmtree(folder / "outbox", ignore_errors=True)
        (folder / "params").unlink(missing_ok=True)


def _stores_payloads(folder: Path) -> bool:
    return any((folder / name).exists() for name in (GRAPHS, BASES))


def _link_rate(behaviour: Behaviour, task: Task) -> Rate:
    """Return a device's link in a round, its uplink limited to the share that the coordinator allocated."""
    up, down = behaviour.of_round(task.round) if behaviour.of_round else (behaviour.up, behaviour.down)
    allocated = task.assignment.allocation
    # As in a live run, a share without a rate does not pace the device.
    share = allocated.share if allocated.up_bits_per_s is not None else None
    if up and share and 0 < share < 1:
        return Rate(FlowShare(up, share), down, behaviour.delay_s, behaviour.loss)
    return Rate(up, down, behaviour.delay_s, behaviour.loss)

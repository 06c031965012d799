"""Where replayed devices come and go. A device is there by its birth alone; its agent lives while it has work.

An agent is put together when the server sends the device a task, and taken away when the server has heard what that
task cost: by then nothing of it is left but, for some algorithms, a state on disk. So memory grows with the cohort.

Replay a plan: the real server and the real agents, with five seams exchanged.

Transport: memory behind each device's link. Clock: the loop's virtual time. Worker: inline; training in processes
beside, at the seconds that the device takes. Sensing: none. Store: the same one, without waiting for the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from device_agent.agent.build import compose
from device_agent.agent.lifecycle import Agent
from device_agent.config import AgentConfig
from device_agent.exchange.download import GRAPHS
from device_agent.trainer.workspace import Workspace
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import Store
from edge_server.journal.records import RoundOpened
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan, planned_data, share
from edge_server.plan.server_config import LinkConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.devices.behaviour import Behaviour, Part
from edge_server.replay.jobs import Jobs
from edge_server.replay.trainer import ReplayTrainer, Scale
from edge_server.rounds.run import run_plan
from shared.models.build import DRAW
from shared.protocol import wire
from shared.protocol.messages import Report, Task
from shared.protocol.topics import parse_channel, parse_device, topic
from shared.runtime.clock import Clock, VirtualLoop
from shared.runtime.executor import background, build_charging_worker, inline
from shared.tensors.tree import State
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport
from shared.transport.presence import build_presence
from shared.transport.simulated_link import Link, Rate

SITE = "replay"
REPORT_S = 3600.0


@dataclass
class Actor:
    """A device that has work."""

    agent: Agent
    link: Link
    living: asyncio.Task[None]
    folder: Path
    task: tuple[str, int]


@dataclass
class Stage:
    """The server's way to the devices, which wakes a device before it is given a task.

    Attributes:
        behaviours: What each of them does with work and bytes.
        folder: For what agents keep on disk.
        broker: What everybody meets on.
        scale: Tells how much work they are.
        clock: Virtual time.
        site: The name of the server's site.
        members: The devices that are of this site; None for all.
        most: Agents that lived at once, at most.
    """

    plan: Plan
    fleet: Sequence[DevicePlan]
    behaviours: Sequence[Behaviour]
    folder: Path
    broker: MemoryTransport
    jobs: Jobs
    scale: Scale
    clock: Clock
    site: str = SITE
    members: frozenset[str] | None = None
    most: int = 0
    _numbers: dict[str, int] = field(init=False)
    _actors: dict[str, Actor] = field(default_factory=dict)
    _here: set[str] = field(default_factory=set)
    _spare: list[Path] = field(default_factory=list)
    _entries: int = 0
    _group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _workspace: Workspace = field(init=False)
    _classes: tuple[str, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        """Number the devices. Those of split sessions take turns, and their shares together are one data set."""
        self._workspace = Workspace(read=cache(self.scale.shelf.load))
        self._numbers = {device.name: number for number, device in enumerate(self.fleet)}
        self._classes = self.scale.shelf.classes(planned_data(self.plan))

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        if parse_channel(topic) == "task" and parse_device(topic) in self._numbers:
            self._wake(parse_device(topic), wire.decode_as(Task, payload))
        await self.broker.publish(topic, payload, retain=retain, assured=assured)

    def subscribe(self, *patterns: str) -> AbstractAsyncContextManager[Inbox]:
        return self.broker.subscribe(*patterns)

    def heard(self, report: Report) -> None:
        """Let a device rest whose last task is settled, and its cost told."""
        actor, spent = self._actors.get(report.device), report.spent
        if actor and spent and (spent.run, spent.round) == actor.task:
            del self._actors[report.device]
            actor.living.cancel()
            self._put_away(actor.folder)

    async def run(self) -> None:
        """Let devices connect and leave as they do, and their agents live, until cancelled.

        Raises:
            Exception: What an agent failed with that nobody foresaw; the first, where there are several.
        """
        try:
            async with self._group:
                for moment, name, session, here in sorted(self._appearances()):
                    if (wait := moment - self.clock()) > 0:
                        await asyncio.sleep(wait)
                    await self._appear(name, session, here=here)
                await asyncio.Event().wait()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    def _appearances(self) -> Iterator[tuple[float, str, int, bool]]:
        """Yield when each device connects, True, and leaves, with the number of its session."""
        for device, behaviour in zip(self.fleet, self.behaviours, strict=True):
            if self.members is not None and device.name not in self.members:
                continue
            for session, (start, stop) in enumerate(behaviour.present, 1):
                yield start, device.name, session, True
                if stop < float("inf"):
                    yield stop, device.name, session, False

    async def _appear(self, name: str, session: int, *, here: bool) -> None:
        said, actor = build_presence(name, self.site, name, session, classes=self._classes), self._actors.get(name)
        if here:
            self._here.add(name)
        else:
            self._here.discard(name)
        if actor and here:
            actor.link.connected.set()
            actor.agent.delivery.wake.set()
        elif actor:
            actor.link.connected.clear()
        await self.broker.publish(said.topic, said.birth if here else said.will, retain=True)

    def _wake(self, name: str, task: Task) -> None:
        if actor := self._actors.get(name):
            actor.task = (task.run, task.round)
            actor.link.tune(_rate(self.behaviours[self._numbers[name]], task))
            return
        self._entries += 1
        number, folder = self._numbers[name], self.folder / name
        behaviour, entry = self.behaviours[number], number + len(self.fleet) * self._entries
        link = Link(self.broker, _rate(behaviour, task), self.clock, seed=entry)
        if name not in self._here:
            link.connected.clear()
        if self._spare and not folder.exists():
            self._spare.pop().rename(folder)
        config = AgentConfig(
            device=name,
            site=self.site,
            state_dir=str(folder),
            data=share(self.plan, self.fleet, number),
            report_s=REPORT_S,
        )
        trainer = ReplayTrainer(behaviour, self.scale, self.jobs, self.clock, self._workspace)
        agent = compose(
            *(config, folder, link, trainer),
            clock=self.clock,
            worker=inline,
            charge=trainer.charge,
            seed=entry,
        )
        agent.delivery.bucket = None  # its link has its share of the bandwidth already
        self.broker.keep(topic(self.site, name, "task"))
        living = self._group.create_task(agent.run(), name=name)
        self._actors[name] = Actor(agent, link, living, folder, (task.run, task.round))
        self.most = max(self.most, len(self._actors))

    def _put_away(self, folder: Path) -> None:
        """Keep a device's states; its other files are for the next to overwrite, at half the cost of making them."""
        (folder / ".params").unlink(missing_ok=True)  # it says which payload is here, and the next one has none yet
        if not any((folder / "state").iterdir()) and not (folder / GRAPHS).exists():
            self._spare.append(folder.rename(self.folder / f".spare-{self._entries}-{len(self._spare)}"))
            return
        shutil.rmtree(folder / "outbox", ignore_errors=True)
        (folder / "params").unlink(missing_ok=True)


def _rate(behaviour: Behaviour, task: Task) -> Rate:
    """Return a device's link in a round: what it gives in all, and up the share that the coordinator gave."""
    up, down = behaviour.of_round(task.round) if behaviour.of_round else (behaviour.up, behaviour.down)
    told = task.assignment.allocated
    share = told.share if told.up_bits_per_s is not None else None  # as live, where that is what paces
    if up and share and 0 < share < 1:
        return Rate(Part(up, share), down, behaviour.delay_s, behaviour.loss)
    return Rate(up, down, behaviour.delay_s, behaviour.loss)


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
        return await run_plan(*us, server, store, LinkConfig(), started="", draw=cast.draw, graph=graph, told=told)

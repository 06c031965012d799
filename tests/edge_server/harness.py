"""Test sites in memory and virtual time: real server, scripted devices.

Several sites of one run: each with a broker in memory, a journal in a list and links to all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.hcef_budget import Place
from edge_server.fleet.flood_control import FloodLimits
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord, RoundClosed, closed_rounds
from edge_server.journal.runs import run_exists
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_plan import load
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.run import run_plan
from edge_server.sites.coordinate import Coordination
from edge_server.sites.gossip import Gossip
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links, SitePresence
from edge_server.sites.site_energy import SiteEnergy
from shared.codecs.dense import dense
from shared.errors import WireError
from shared.models.build import build_initial
from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, TASK_FIELDS, Ack, Message, Status, Task, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background, inline
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.receiver import Policy
from shared.transport.base import Inbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate

T = TypeVar("T")

SITE, RUN = "lab", "run"
PATIENCE_S = 200.0
SECTIONS = {
    "algorithm": 'name = "fedavg"',
    "model": 'name = "mlp"\noptions = { hidden = 4 }',
    "hyper": "batch_size = 16",
    "cohort": "min_devices = 2",
    "round": "deadline_s = 30.0",
    "evaluation": "every = 0",
    "data": 'source = "digits"',
}


def write_plan(folder: Path, *, rounds: int = 2, more: str = "", **sections: str) -> Path:
    """Write a plan; a section given by name replaces the usual one, `more` is added at the end."""
    lines = ['name = "tiny"', f"rounds = {rounds}"]
    lines += [f"[{name}]\n{text}" for name, text in (SECTIONS | sections).items()]
    path = folder / "plan.toml"
    path.write_text("\n".join([*lines, more]))
    return path


def write_examples(folder: Path, count: int = 48) -> str:
    """Write a small data set, quickly read: three classes in eight dimensions; return the plan's section of it."""
    random = np.random.default_rng(5)
    arrays = {}
    for split in ("train", "test"):
        labels = random.integers(0, 3, count)
        arrays[f"x_{split}"] = (random.normal(size=(count, 8)) + 2 * np.eye(8)[labels]).astype(np.float32)
        arrays[f"y_{split}"] = labels
    np.savez(folder / "examples.npz", **arrays)
    return 'source = "npz"\npath = "examples.npz"'


def virtual(routine: Coroutine[Any, Any, T]) -> T:
    """Run on virtual time; a wait for nothing at all is an error, not a hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(routine)


def beginning(plan: Plan) -> Tree:
    """Return the model's first parameters."""
    return build_initial(plan.model, plan.seed).tree()


def moved(plan: Plan, by: float) -> Tree:
    """Return a change of every parameter by the same amount."""
    return {key: torch.full_like(leaf, by) for key, leaf in beginning(plan).items()}


def packed(tree: Tree) -> bytes:
    """Return a tree's bytes as they travel."""
    return b"".join(payload.pack(dense().encode(tree, None)[0]))


def update_for(task: Task, data: bytes, **changes: Any) -> Update:
    """Return an honest update that carries `data`, but for the changes."""
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    honest = Update(run=task.run, round=task.round, device=task.device, params=transfer, weight=1.0, num_examples=1)
    return msgspec.structs.replace(honest, **changes)


@dataclass
class Puppet:
    """A device that does what a test says."""

    name: str
    transport: Transport
    tasks: Inbox
    acks: Inbox

    async def task(self) -> Task:
        """Wait for the next task."""
        async with asyncio.timeout(PATIENCE_S):
            return wire.decode_as(Task, (await anext(self.tasks))[1])

    async def say(self, message: Message | bytes, channel: str = "update") -> None:
        """Publish anything."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        await self.transport.publish(topic(SITE, self.name, channel), data)

    async def heard(self) -> Want | Ack:
        """Wait for the server's next word."""
        async with asyncio.timeout(PATIENCE_S):
            message = wire.decode((await anext(self.acks))[1])
        assert isinstance(message, Want | Ack)
        return message

    async def offer(self, update: Update, data: bytes = b"") -> Ack:
        """Offer an update and send the frames the server asks for, until it settles the matter."""
        await self.say(update)
        while isinstance(message := await self.heard(), Want):
            assert update.params is not None
            for index, _ in frames.pieces(message, update.params, BLOCK_BYTES):
                await self.say(frame(update.params, index, data))
        return message

    async def answer(self, task: Task, tree: Tree, **changes: Any) -> Ack:
        """Do a task as an honest device does."""
        data = packed(tree)
        return await self.offer(update_for(task, data, **changes), data)

    async def status(self, *, online: bool, session: int = 1) -> None:
        """Say that it is here, or let its will say that it is not."""
        presence = Status(device=self.name, session=session, instance=self.name, online=online, knows=TASK_FIELDS)
        await self.transport.publish(topic(SITE, self.name, "status"), wire.encode(presence), retain=True)


def frame(transfer: Transfer, index: int, data: bytes) -> bytes:
    """Return one frame of `data`."""
    start = index * transfer.frame_bytes
    return frames.encode(transfer, index, [memoryview(data)[start : start + transfer.frame_bytes]])


@dataclass
class Site:
    """A server at work on a plan."""

    plan: Plan
    broker: MemoryTransport
    server: Server
    store: SqliteStore
    run: asyncio.Task[State]
    stack: AsyncExitStack

    async def device(self, name: str, *, online: bool = True) -> Puppet:
        """Connect a device."""
        tasks = await self.stack.enter_async_context(self.broker.subscribe(topic(SITE, name, "task")))
        acks = await self.stack.enter_async_context(self.broker.subscribe(topic(SITE, name, "ack")))
        puppet = Puppet(name, self.broker, tasks, acks)
        if online:
            await puppet.status(online=True)
        return puppet

    async def ended(self) -> tuple[State, list[RoundClosed]]:
        """Wait for the run's end; return the final state and its rounds."""
        return await self.run, closed_rounds(self.store.records())


@asynccontextmanager
async def site(
    folder: Path,
    broker: MemoryTransport | None = None,
    *,
    started: str = "",
    link: LinkConfig | None = None,
    neighbours: Neighbours | None = None,
    **plan: Any,
) -> AsyncIterator[Site]:
    """Run the real server on a plan beside the block, on virtual time; what it stored before, it goes on with.

    A run that is not `started` at a calendar time is taken for a replay's. With a `link` of its own, what one device
    may say is bounded as on a real broker.
    With `neighbours` the plan may have sites, of which `SITE` is one.
    """
    loaded = load(write_plan(folder, **plan), folder, several_sites=neighbours is not None)
    broker = broker or MemoryTransport()
    store = SqliteStore(folder / RUN, durable=False)
    limits = FloodLimits(link.window * link.frame_bytes) if link else None
    known = {"was_run": lambda run: run_exists(folder, run), "limits": limits}
    known["broker"] = getattr(broker, "connected", None)
    server = Server(SITE, broker, asyncio.get_running_loop().time, inline, **known)
    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        await stack.enter_async_context(server.listening())
        us = loaded, RUN, server, store, link or LinkConfig(frame_bytes=1024)
        work = run_plan(*us, started=started, neighbours=neighbours)
        run = asyncio.create_task(work, name="run")
        try:
            yield Site(loaded, broker, server, store, run, stack)
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


PLAN = b'{"name":"towns","rounds":4}'
DEADLINE_S = 60.0
NO_LIMIT = Rate()
POLICY = Policy(window=8, patience_s=1.0, limit=64 << 20, frame_bytes=16 << 10)


def model_of(site: str, number: int, size: int = 40_000) -> list[memoryview]:
    """Return a site's model of a round."""
    return [memoryview(Random(f"{site}/{number}").randbytes(size))]


def require_size(_peer: str, data: memoryview, size: int = 40_000) -> None:
    """Refuse what has not the size of a model here."""
    if data.nbytes != size:
        raise WireError(f"{data.nbytes} bytes", reason="shape")


@dataclass
class Town:
    """One site's server, as long as its process lasts."""

    site: str
    links: Links
    gossip: Gossip
    coordination: Coordination
    stack: AsyncExitStack
    ways: dict[str, Link]
    instance: str

    async def exchange(self, number: int, model: Sequence[memoryview] | None = None) -> dict[str, bytes]:
        """Gossip; return what came."""
        found, gossiped = await self.gossip.exchange(number, model or model_of(self.site, number), require_size)
        await self.gossip.conclude(gossiped)
        return {peer: bytes(data) for peer, data in found.items()}


@dataclass
class Country:
    """All sites' brokers and journals, which outlive their servers."""

    folder: Path
    order: tuple[str, ...]
    edges: set[frozenset[str]]
    decide: Callable[[Case], Decision] = lambda _case: Decision()
    place: Callable[[int], Place] = lambda number: Place(number - 1, 4)
    allowance: float = 0.0
    rate: Rate = NO_LIMIT
    note_rounds: Callable[[str], Callable[[Mapping[str, int]], Awaitable[None]] | None] = lambda _site: None
    brokers: dict[str, MemoryTransport] = field(default_factory=dict)
    records: dict[str, list[AnyRecord]] = field(default_factory=dict)
    processes: int = 0

    def __post_init__(self) -> None:
        self.brokers = {site: MemoryTransport() for site in self.order}
        self.records = {site: [] for site in self.order}

    async def start(self, site: str, *, plan: bytes = PLAN, run: str = "") -> Town:
        """Start a site's server, as a process that reads what an earlier one has journaled."""
        clock, self.processes = asyncio.get_running_loop().time, self.processes + 1
        run, instance = run or f"run-of-{site}", str(self.processes)
        others = [one for one in self.order if one != site]
        ways = {one: Link(self.brokers[one], self.rate, clock, self.processes) for one in others}
        born = {one: SitePresence(site, one, run, instance, plan) for one in others}
        links = Links(site, self.brokers[site], ways, plan, born, note_rounds=self.note_rounds(site))
        folder = self.folder / site
        folder.mkdir(exist_ok=True)
        us = SiteIdentity(site, self.order, run, folder, DEADLINE_S)
        near = [one for one in others if frozenset({site, one}) in self.edges]

        async def keep(record: AnyRecord) -> None:
            self.records[site].append(record)

        services = SiteServices(keep, self.decide, POLICY, clock, inline)
        gossip = Gossip(us, near, links, services)
        energy = SiteEnergy(us, services, self.place, self.allowance, self.allowance * len(self.order))
        devices = {one: (f"{one}-1", f"{one}-2") for one in self.order}
        coordination = Coordination(us, links, services, energy, devices)
        gossip.restore(self.records[site])
        coordination.restore(self.records[site])
        stack = AsyncExitStack()
        await stack.enter_async_context(links.listening())
        await stack.enter_async_context(background(*map(gossip.served.serve, near)))
        for one, way in ways.items():
            said = born[one].presence()
            await way.publish(said.topic, said.birth, retain=True)
        await asyncio.sleep(0)
        return Town(site, links, gossip, coordination, stack, ways, instance)

    async def kill(self, town: Town, *, silently: bool = False) -> None:
        """End a server at once; its wills are told unless it dies `silently`."""
        await town.stack.aclose()
        if not silently:
            for one in town.ways:
                born = SitePresence(town.site, one, town.gossip.identity.run, town.instance, PLAN).presence()
                await self.brokers[one].publish(born.topic, born.will, retain=True)

    def of(self, site: str, kind: type[AnyRecord]) -> list[AnyRecord]:
        """Return a site's records of a kind."""
        return [one for one in self.records[site] if isinstance(one, kind)]

    @asynccontextmanager
    async def all(self) -> AsyncIterator[dict[str, Town]]:
        """Start every site, and end all after the block."""
        towns = {site: await self.start(site) for site in self.order}
        try:
            yield towns
        finally:
            for town in towns.values():
                await town.stack.aclose()


def country(folder: Path, order: Iterable[str], edges: Iterable[str], **more: object) -> Country:
    """Return sites of one letter each, and edges of two."""
    return Country(folder, tuple(order), {frozenset(edge) for edge in edges}, **more)  # type: ignore[arg-type]

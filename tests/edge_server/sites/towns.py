"""Sites of one run in one virtual time: each with a broker in memory, a journal in a list and links to all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.hcef_problem import Place
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord
from edge_server.sites.coordinate import Coordination
from edge_server.sites.gossip import Gossip, Ourselves
from edge_server.sites.link import Births, Links
from shared.errors import WireError
from shared.runtime.executor import background, inline
from shared.transfer.receiver import Policy
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate

PLAN = b'{"name":"towns","rounds":4}'
DEADLINE_S = 60.0
NO_LIMIT = Rate()
POLICY = Policy(window=8, patience_s=1.0, limit=64 << 20, frame_bytes=16 << 10)


def model_of(site: str, number: int, size: int = 40_000) -> list[memoryview]:
    """Return a site's model of a round."""
    return [memoryview(Random(f"{site}/{number}").randbytes(size))]


def require_size(data: memoryview, size: int = 40_000) -> None:
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
        born = {one: Births(site, one, run, instance, plan) for one in others}
        links = Links(site, self.brokers[site], ways, plan, born, note_rounds=self.note_rounds(site))
        folder = self.folder / site
        folder.mkdir(exist_ok=True)
        us = Ourselves(site, self.order, run, folder, DEADLINE_S)
        near = [one for one in others if frozenset({site, one}) in self.edges]

        async def keep(record: AnyRecord) -> None:
            self.records[site].append(record)

        gossip = Gossip(us, near, links, keep, POLICY, clock, inline)
        coordination = Coordination(us, links, keep, self.decide, clock, inline, self.place, self.allowance)
        gossip.recall(self.records[site])
        coordination.recall(self.records[site])
        stack = AsyncExitStack()
        await stack.enter_async_context(links.listening())
        await stack.enter_async_context(background(*map(gossip.serve, near)))
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
                born = Births(town.site, one, town.gossip.us.run, town.instance, PLAN).presence()
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

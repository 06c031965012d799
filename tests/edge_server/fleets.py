"""Real agents and the real server in one process, on memory and virtual time or on a real broker.

Small studies for tests: a plan of three devices on a data set that is read in no time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
import torch

from device_agent.agent.build import compose
from device_agent.config import AgentConfig
from device_agent.config import LinkConfig as AgentLink
from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import BlockCost, FixedMeter
from device_agent.trainer.interface import Job
from device_agent.trainer.perform import begin_split_training, perform
from device_agent.trainer.workspace import Workspace
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord
from edge_server.plan.data import device_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.study.grid import Cell, build_cells
from edge_server.replay.study.spec import Study, load
from edge_server.rounds.run import run_plan
from shared.errors import TaskFailed
from shared.protocol.topics import SERVER, topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import inline
from shared.tensors.tree import CPU, State
from shared.transport.base import Broker, Presence, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES

T = TypeVar("T")
End: TypeAlias = tuple[State, list[AnyRecord]]
"""The final state of a run, and its journal."""

RUN = "run"
FRAME_BYTES = 1024
"""Small, so that a small model travels in several frames."""


@dataclass
class Network:
    """What devices and server meet on: a broker, or memory on virtual time."""

    broker: Broker | None = None
    runner: asyncio.Runner | None = None
    memory: MemoryTransport = field(default_factory=MemoryTransport)

    def run(self, routine: Coroutine[Any, Any, T]) -> T:
        """Run a test on the network's own loop."""
        if self.runner:
            return self.runner.run(routine)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(routine)

    @asynccontextmanager
    async def connected(
        self, client_id: str, presence: Callable[[], Presence], *, waits: bool = True
    ) -> AsyncIterator[Transport]:
        """Connect a process of its own name; its birth is heard, and its death.

        An agent does not wait: it has to listen before its birth is heard, or the task that this brings is lost.
        """
        if self.broker:
            async with MqttTransport(self.broker, client_id, presence).running() as transport:
                if waits:
                    await transport.connected.wait()
                yield transport
            return
        born = presence()
        await self.memory.publish(born.topic, born.birth, retain=True)
        try:
            yield self.memory
        finally:
            await self.memory.publish(born.topic, born.will, retain=True)


@dataclass
class Trainer:
    """Trains in this process at once, then takes its time; keeps count, and waits or fails where a test says so."""

    compute_s: float
    held: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    trained: list[tuple[str, int]] = field(default_factory=list)
    stepped: list[tuple[str, int, int]] = field(default_factory=list)
    broken: str = ""
    workspace: Workspace = field(default_factory=Workspace)

    async def ready(self, _task: object, /) -> None:
        """There is nothing to wait for."""

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Do a job, or not; of a split session, step by step."""
        self.trained.append((job.task.device, job.task.round))
        if self.broken:
            raise TaskFailed(self.broken)
        meter = FixedMeter(BlockCost(compute_s=self.compute_s)).task
        if exchange is None:
            perform(job, self.workspace, meter, lambda: False)
            await asyncio.sleep(self.compute_s)
            if held := self.held.get((job.task.device, job.task.round)):
                await held.wait()
            return
        with begin_split_training(job, self.workspace, meter, lambda: False) as training:
            while training.up is not None:
                await asyncio.sleep(self.compute_s)
                answer = await exchange(training.step, training.up)
                self.stepped.append((job.task.device, job.task.round, training.step))
                training.advance(answer)


@dataclass
class Site:
    """A plan, its devices and its server; both may be stopped and started again in the same folders.

    Attributes:
        device: What all of them compute with.
        held: Of a device and a round: its training does not end before this is set.
    """

    network: Network
    plan: Plan
    folder: Path
    name: str = "lab"
    device: torch.device = CPU
    trained: list[tuple[str, int]] = field(default_factory=list)
    stepped: list[tuple[str, int, int]] = field(default_factory=list)
    held: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    _living: dict[str, AsyncExitStack] = field(default_factory=dict)

    @asynccontextmanager
    async def devices(self, *names: str, **trainer: Any) -> AsyncIterator[None]:
        """Run agents while the block lasts."""
        for name in names:
            await self.start(name, **trainer)
        try:
            yield
        finally:
            for name in list(self._living):
                await self.stop(name)

    async def start(self, name: str, *, broken: str = "", compute_s: float = 0.0, trains: bool = True) -> Transport:
        """Run one agent until it is stopped; what it left in its folder, it finds again. Returns its line."""
        fleet: list[DevicePlan] = self.plan.device
        index = [device.name for device in fleet].index(name)
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        session = Session(place / "session", name, self.name, uuid.uuid4().hex, trains=trains)
        stack = AsyncExitStack()
        self.network.memory.keep(topic(self.name, name, "task"))  # a broker does so for a session that is away
        connected = self.network.connected(f"{self.name}.{name}", session.presence, waits=False)
        transport = await stack.enter_async_context(connected)
        data, links = device_data(self.plan, fleet, index), AgentLink(frame_bytes=FRAME_BYTES)
        config = AgentConfig(device=name, site=self.name, state_dir=str(place), data=data, link=links, report_s=3600.0)
        workspace = Workspace(device=self.device)
        kept = {"trained": self.trained, "stepped": self.stepped, "held": self.held}
        trainer = Trainer(compute_s, broken=broken, workspace=workspace, **kept)
        clock = asyncio.get_running_loop().time
        agent = compose(config, place, transport, trainer, clock=clock, worker=inline, seed=index)
        running = asyncio.create_task(agent.run(), name=name)

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if not running.cancelled():
                running.result()

        stack.push_async_callback(end)
        self._living[name] = stack
        return transport

    async def stop(self, name: str) -> None:
        """End an agent; it says goodbye."""
        await self._living.pop(name).aclose()

    def play(self, serve: Callable[[], Awaitable[End]] | None = None, **trainer: Any) -> End:
        """Run the plan with all its devices, on the network's own loop; `serve` takes the place of one server."""

        async def whole() -> End:
            async with self.devices(*(device.name for device in self.plan.device), **trainer):
                return await (serve or self.serve)()

        return self.network.run(whole())

    async def serve(self, store: SqliteStore | None = None) -> End:
        """Run the plan from where the folder says it stands; return the final state and the journal."""
        store = store or SqliteStore(self.folder / RUN, durable=False)
        session = Session(self.folder / "session", SERVER, self.name, uuid.uuid4().hex)
        clock, link = asyncio.get_running_loop().time, LinkConfig(frame_bytes=FRAME_BYTES)
        try:
            async with self.network.connected(f"{self.name}.{SERVER}", session.presence) as transport:
                broker = getattr(transport, "connected", None)  # memory has none that could go away
                server = Server(self.name, transport, clock, inline, was_run=lambda run: run == RUN, broker=broker)
                async with server.listening():
                    about = {"started": "", "device": self.device, "graph": make_evaluation_graph(self.plan)}
                    state = await run_plan(self.plan, RUN, server, store, link, **about)
            return state, store.records()
        finally:
            store.close()

    async def serve_until(self, cut: Callable[[object], bool]) -> None:
        """Run the plan with a server that ends when `cut` says so of what it wrote."""
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(self.serve(Stopping(self.folder / RUN, cut)))

    async def serve_twice(self, cut: Callable[[object], bool]) -> End:
        """Run the plan with a server that ends when `cut` says so of what it wrote, and another that goes on."""
        await self.serve_until(cut)
        return await self.serve()

    async def serve_while_one_dies(self, name: str, number: int) -> End:
        """Run the plan; a device dies while it trains in a round, is started anew, and trains in that round again."""
        self.held[name, number] = asyncio.Event()
        serving = asyncio.create_task(self.serve())
        await until(lambda: (name, number) in self.trained)
        await self.stop(name)
        del self.held[name, number]
        await self.start(name, compute_s=0.1)
        end = await serving
        assert self.trained.count((name, number)) == 2
        return end


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to be so."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of tests
            await asyncio.sleep(0.02)


class Stopping(SqliteStore):
    """A store that ends whoever writes it, as soon as something particular is written."""

    def __init__(self, folder: Path, at: Callable[[object], bool]) -> None:
        super().__init__(folder, durable=False)
        self.at = at
        self.victim = asyncio.current_task()

    def extend(
        self, records: Sequence[AnyRecord], payloads: Mapping[str, bytes] = {}, *, may_wait: bool = False
    ) -> None:
        """Add records; perhaps one was the last."""
        super().extend(records, payloads, may_wait=may_wait)
        for record in records:
            self._stop_at(record)

    def save(self, number: int, state: State) -> None:
        """Keep a state; perhaps it was the last."""
        super().save(number, state)
        self._stop_at(number)

    def _stop_at(self, written: object) -> None:
        if self.victim and self.at(written):
            self.victim.cancel()
            self.victim = None


HEAD = 'name = "study"\nplan = "plan.toml"\n'
TWO_SEEDS = "[grid]\nseed = [1, 2]\n"
VARIANTS = """
[[variant]]
name = "base"
[[variant]]
name = "prox"
set = { algorithm = { name = "fedprox", options = { mu = 0.1 } } }
"""


def write_study(folder: Path, text: str, *, epochs: int = 1, rounds: int = 2) -> Path:
    """Write a study and its plan."""
    write_plan(
        folder,
        rounds=rounds,
        more=DEVICES,
        model='name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }',
        hyper=f"local_epochs = {epochs}\nbatch_size = 8\nlearning_rate = 0.2",
        cohort="min_devices = 3",
        evaluation="every = 1",
        data=write_examples(folder),
        partition='kind = "even"',
    )
    path = folder / "study.toml"
    path.write_text(text)
    return path


def grid_of(folder: Path, text: str, **plan: int) -> tuple[Study, list[Cell]]:
    """Return a study and its cells."""
    path = write_study(folder, text, **plan)
    study, base = load(path)
    return study, build_cells(study, base, path, path.read_text(), folder)

"""A site for tests: a plan in a file, the real server on the memory transport, devices that a test scripts.

Reports such as a board with a power sensor sends, from a seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RoundClosed, closed_rounds
from edge_server.journal.runs import exists
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_plan import load
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.run import run_plan
from shared.codecs.dense import dense
from shared.models.build import initial
from shared.protocol import payload, wire
from shared.protocol.measurements import Absent, Cost, Reading, Spent
from shared.protocol.messages import BLOCK_BYTES, Ack, Message, Report, Status, Task, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import inline
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transport.base import Inbox, Transport
from shared.transport.memory import MemoryTransport

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
    return initial(plan.model, plan.seed).tree()


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
        presence = Status(device=self.name, session=session, instance=self.name, online=online)
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
    most = link.window * link.frame_bytes if link else None
    known = {"was_run": lambda run: exists(folder, run), "window_bytes": most}
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


CONSTANT = {
    "cpu.policy0_max_hertz": 1.728e9,
    "cpu.policy4_max_hertz": 1.728e9,
    "cpu.online_count": 6.0,
    "memory.total_bytes": 7_990_247_424.0,
    "memory.limit_bytes": 4_294_967_296.0,
    "disk.total_bytes": 122_000_000_000.0,
    "throttle.now_flag": 0.0,
    "throttle.since_boot_flag": 1.0,
    "net.eth0_speed_bits_per_s": 1e9,
}
RAILS = ("total", "VDD_CPU_GPU_CV", "VDD_SOC")
ZONES = ("cpu-thermal", "gpu-thermal", "soc0-thermal", "tj-thermal", "hottest")


def report(random: Random, at: float, device: str = "orin", **changes: object) -> Report:
    """Return what a Jetson Orin Nano might say at a moment: 30 figures, of which 21 change."""
    figures: dict[str, float] = dict(CONSTANT)
    figures |= {f"power.{rail}_watts": random.randrange(3000, 15000) / 1000 for rail in RAILS}
    figures |= {f"thermal.{zone}_celsius": random.randrange(45000, 70000) / 1000 for zone in ZONES}
    figures |= {f"cpu.{name}_hertz": float(random.choice((729_600_000, 1_344_000_000))) for name in ("f", "policy0")}
    figures["memory.available_bytes"] = float(random.randrange(1 << 30, 1 << 32, 4096))
    figures["memory.pressure_ratio"] = random.randrange(100) / 10_000
    figures["disk.free_bytes"] = 5e10 - at * 1000
    figures["cputime.busy_seconds"], figures["cputime.total_seconds"] = at * 1.25, at * 6.0
    figures |= {f"net.eth0_{way}_bytes": at * 12_345.0 // 1 for way in ("received", "sent")}
    figures |= {f"link.{way}_bits_per_s": random.uniform(5e6, 2e7) for way in ("up", "down")}
    readings = {name: _reading(name, value, at) for name, value in figures.items()}
    spent = Spent(run="run-1", round=int(at // 600), cost=Cost(compute_s=4.5, compute_joules=31.25, upload_s=0.5))
    known = Report(
        device=device,
        at=at,
        board="nvidia-orin-nano-8gb",
        readings=readings,
        absent={"wifi": Absent(lack="not_present", cause="no wireless interface")},
        facts={"mode": "15W", "governor": "schedutil", "kernel": "5.15.148-tegra", "l4t": "36.4.3"},
        spent=spent,
        instance="0123456789abcdef0123456789abcdef",
    )
    return Report(**{**{name: getattr(known, name) for name in known.__struct_fields__}, **changes})


def _reading(name: str, value: float, at: float) -> Reading:
    group, _, rest = name.partition(".")
    is_power = group == "power"
    return Reading(
        value=value,
        unit=rest.rpartition("_")[2],
        source=f"{group} of sysfs",
        quality="corrected" if is_power else "measured",
        at=at - 3.0 if group == "link" else at,
        uncertainty=value * 0.03 if is_power else None,
    )

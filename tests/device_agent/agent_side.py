"""The agent as a process of its own, and its end.

One agent on the memory transport, with a stub trainer, and what a server would see of it and say to it.

A device's folders and its trainer's workspace, without a process.

A trainer with its real child process, driven as the agent drives it.
"""

from __future__ import annotations

import asyncio
import fcntl
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from device_agent.agent.job_settings import JobSettings
from device_agent.agent.lifecycle import Agent
from device_agent.exchange import outbox
from device_agent.exchange import outbox as files
from device_agent.exchange.download import Download
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.reports import Reporter
from device_agent.exchange.split_session import Exchange, SplitSessions
from device_agent.exchange.upload import Delivery
from device_agent.measurement.task_meter import ProcessMeter
from device_agent.trainer.interface import Job
from device_agent.trainer.perform import perform
from device_agent.trainer.process import TrainerProcess
from device_agent.trainer.workspace import Workspace
from shared.codecs.dense import dense
from shared.data.spec import Data
from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, Assignment, Hyper, Message, Report, Task, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.tensors.tree import Tree
from shared.transfer import frames, to_file
from shared.transfer.receiver import Policy
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport
from tests.naming import names_all

SITE, DEVICE = "lab", "board"
LIMIT_S = 300.0
DIGITS = 'source = "digits"'


def write_config(folder: Path, port: int, data: str = DIGITS, more: str = "") -> Path:
    path = folder / "agent.toml"
    path.write_text(
        f'device = "{DEVICE}"\nsite = "{SITE}"\nstate_dir = "{folder}/state"\n{more}\n'
        f"[broker]\nport = {port}\n[trainer]\nthreads = 1\n[data]\n{data}\n"
    )
    return path


async def start(config: Path, command: str = "run") -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "device_agent", command, "--config", str(config)), stdout=PIPE, stderr=PIPE
    )


@asynccontextmanager
async def living(config: Path) -> AsyncIterator[Process]:
    """Run an agent while the block lasts; nothing of it is left when a test fails."""
    process = await start(config)
    family = []
    try:
        yield process
    finally:
        if process.returncode is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.communicate()
        for child in family:
            with suppress(psutil.NoSuchProcess):  # it ended with its agent
                child.kill()


async def stop(process: Process) -> tuple[float, list[str]]:
    """Send SIGTERM; return the seconds until it was gone with its children, and what it said till then."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = await asyncio.wait_for(process.communicate(), LIMIT_S)
    seconds = time.monotonic() - began
    assert process.returncode == 0, said.decode()
    await until(lambda: not any(is_alive(child.pid) for child in children))
    return seconds, said.decode().splitlines()


async def line_with(process: Process, *words: str) -> str:
    """Return the next line of a process's log that has all of these words."""
    async with asyncio.timeout(LIMIT_S):
        while not names_all(line := (await process.stderr.readline()).decode(), *words):
            assert line, f"it ended without saying {words!r}"
    return line


RESULT = b"moved" * 10


@dataclass
class StubTrainer:
    """Takes virtual seconds instead of computing, and writes an update as the real one does."""

    seconds: float = 1.0
    wait_s: float = 0.0
    failure: Exception | None = None
    jobs: list[Job] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)

    async def ready(self, _task: object, /) -> None:
        await asyncio.sleep(self.wait_s)

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        self.jobs.append(job)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.given_up.append(job.task.round)
            raise
        if self.failure:
            raise self.failure
        draft = Path(job.draft)
        (draft / files.PAYLOAD).write_bytes(RESULT)
        transfer = Transfer(digest=payload.digest([memoryview(RESULT)]), size=len(RESULT), frame_bytes=job.frame_bytes)
        task = job.task
        about = {"run": task.run, "round": task.round, "device": task.device, "start": task.params.digest}
        files.write(draft, Update(**about, params=transfer, cost=job.cost))

    @property
    def rounds(self) -> list[int]:
        return [job.task.round for job in self.jobs]


@dataclass
class Site:
    """One agent, and what a server would see of it and say to it."""

    folder: Path
    parameters: bytes
    cut: Callable[[bytes, Transfer, int], bytes]
    trainer: StubTrainer = field(default_factory=StubTrainer)
    transport: MemoryTransport = field(default_factory=MemoryTransport)
    report_s: float = 30.0
    limit: int = 1 << 20
    frame_s: float = 0.0
    offers: list[Update] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    agent: Agent = field(init=False)

    def compose(self) -> Agent:
        clock = asyncio.get_running_loop().time
        outbox = Outbox(self.folder / "outbox", self.folder / "state")
        return Agent(
            device=DEVICE,
            site=SITE,
            transport=self.transport,
            clock=clock,
            trainer=self.trainer,
            outbox=outbox,
            download=Download(
                *(self.transport, SITE, DEVICE, self.folder, inline, clock), policy=Policy(8, 2.0, self.limit)
            ),
            delivery=Delivery(self.transport, SITE, DEVICE, outbox),
            splitting=SplitSessions(
                *(self.transport, SITE, DEVICE, clock), policy=Policy(8, 2.0, self.limit, frame_bytes=4096)
            ),
            settings=JobSettings(Data(source="digits"), self.folder / "state", 4096),
            reporter=Reporter(
                *(self.transport, SITE, DEVICE, clock, inline),
                sense=lambda: Report(device=DEVICE, at=clock()),
                report_s=self.report_s,
            ),
        )

    @asynccontextmanager
    async def living(self) -> AsyncIterator[Agent]:
        """Let the agent live while the block lasts."""
        self.agent = self.compose()
        channels = (topic(SITE, DEVICE, channel) for channel in ("want", "update", "report"))
        async with (
            self.transport.subscribe(*channels) as inbox,
            background(self._serve(inbox), self.agent.run()),
        ):
            await asyncio.sleep(0.01)
            yield self.agent

    async def _serve(self, inbox: Inbox) -> None:
        """Send parameters as asked, and note what is offered."""
        async for _, data in inbox:
            match wire.decode(data):
                case Want() as want if want.digest != payload.digest([memoryview(self.parameters)]):
                    pass
                case Want() as want:
                    transfer = Transfer(digest=want.digest, size=len(self.parameters), frame_bytes=BLOCK_BYTES)
                    for index, _ in frames.pieces(want, transfer, BLOCK_BYTES):
                        await asyncio.sleep(self.frame_s)
                        frame = self.cut(self.parameters, transfer, index)
                        await self.transport.publish(topic(SITE, DEVICE, "model"), frame)
                case Update() as update:
                    self.offers.append(update)
                case Report() as report:
                    self.reports.append(report)

    async def tell(self, channel: str, message: Message | bytes, pause_s: float = 0.0) -> None:
        data = message if isinstance(message, bytes) else wire.encode(message)
        await self.transport.publish(topic(SITE, DEVICE, channel), data)
        await asyncio.sleep(pause_s)

    @property
    def offered(self) -> list[int]:
        return [update.round for update in self.offers]


METER = ProcessMeter()


@dataclass
class Device:
    """Does tasks one after the other, each into a draft of its own."""

    folder: Path
    make_job: Callable
    outbox: Outbox
    workspace: Workspace = field(default_factory=Workspace)

    def perform(self, task, meter=METER.task, superseded=lambda: False, **fields) -> Path:
        """Do a task on what `fields` of the job say; return its draft."""
        draft = self.outbox.draft(task.run, task.round)
        perform(msgspec.structs.replace(self.make_job(task, draft), **fields), self.workspace, meter, superseded)
        return draft

    def params(self, tree: Tree) -> str:
        """Write parameters as the download leaves them."""
        path = self.folder / "other-params"
        path.write_bytes(b"".join(payload.pack(dense().encode(tree, None)[0])))
        return str(path)


def update_of(draft: Path) -> Update:
    return outbox.read(draft)


def moved(draft: Path) -> Tree:
    return dense().decode(payload.unpack(to_file.view(draft / outbox.PAYLOAD))).tree


ENDLESS = Assignment(seed=1, hyper=Hyper(local_epochs=1_000_000_000, batch_size=8, learning_rate=0.001))
START_S = 300.0
"""To import torch on a busy machine."""


@dataclass
class Host:
    """An event loop that lasts for all tests, and the trainer on it."""

    runner: asyncio.Runner
    trainer: TrainerProcess
    outbox: Outbox
    make_job: Callable

    def do(self, routine, limit_s: float = START_S):
        return self.runner.run(asyncio.wait_for(routine, limit_s))

    async def train(self, task: Task) -> float:
        """Do a task as the agent does; return the seconds it took."""
        began = time.monotonic()
        draft = self.outbox.draft(task.run, task.round)
        await self.trainer(self.make_job(task, draft))
        self.outbox.commit(draft)
        return time.monotonic() - began

    async def begin(self, task: Task) -> asyncio.Task[float]:
        """Begin a task that never ends by itself, in a child that is warm; return while it trains."""
        await self.train(msgspec.structs.replace(task, round=0, assignment=Assignment(seed=1, hyper=Hyper())))
        training = asyncio.create_task(self.train(task))
        await asyncio.sleep(0.3)
        assert not training.done()
        return training

    @property
    def rounds(self) -> list[int]:
        """Rounds whose updates wait in the outbox."""
        return [entry.update.round for entry in self.outbox.entries()]

    @property
    def pid(self) -> int:
        return self.trainer.pid


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_locked(path: Path) -> bool:
    """Tell whether a living trainer holds its lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def until(condition: Callable[[], bool], limit_s: float = START_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what a process does sets no event here
            await asyncio.sleep(0.02)

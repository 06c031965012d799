"""One agent on the memory transport, with a stub trainer, and what a server would see of it and say to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.agent import Agent
from device_agent.exchange import outbox as files
from device_agent.exchange.download import Download
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.reports import Reporter
from device_agent.exchange.split_session import Exchange, Splitting
from device_agent.exchange.upload import Delivery
from device_agent.trainer.interface import Job
from shared.data.spec import Data
from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, Message, Report, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.transfer import frames
from shared.transfer.receiver import Policy
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport

SITE, DEVICE = "lab", "board"
RESULT = b"moved" * 10


@dataclass
class StubTrainer:
    """Takes virtual seconds instead of computing, and writes an update as the real one does."""

    seconds: float = 1.0
    wait_s: float = 0.0
    failure: Exception | None = None
    jobs: list[Job] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)

    async def ready(self) -> None:
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
    reports: list[float] = field(default_factory=list)
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
            splitting=Splitting(
                *(self.transport, SITE, DEVICE, clock), policy=Policy(8, 2.0, self.limit, frame_bytes=4096)
            ),
            data=Data(source="digits"),
            states=self.folder / "state",
            frame_bytes=4096,
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
                    self.reports.append(report.at)

    async def tell(self, channel: str, message: Message | bytes, pause_s: float = 0.0) -> None:
        data = message if isinstance(message, bytes) else wire.encode(message)
        await self.transport.publish(topic(SITE, DEVICE, channel), data)
        await asyncio.sleep(pause_s)

    @property
    def offered(self) -> list[int]:
        return [update.round for update in self.offers]

"""Fetch the parameters of a task, frame by frame, into a file."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.measurement.link_meter import LinkMeter
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Leave, Task, Want
from shared.protocol.topics import EVERYONE, topic
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.transfer import frames
from shared.transfer.pace import Pace
from shared.transfer.to_file import Spool
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

ATTEMPTS = 3


@dataclass
class Download:
    """This device's way of getting payloads; one at a time.

    Attributes:
        transport: Where frames come from.
        site: The site.
        device: This device.
        folder: Where payloads are spooled.
        clock: Time.
        worker: Runs the check of the whole off the loop.
        window: Frames under way at once.
        patience_s: Seconds without a frame of ours after which frames are asked for again, doubled each time.
        limit: Largest payload taken, in bytes.
        link: Measures the link meanwhile.
    """

    transport: Transport
    site: str
    device: str
    folder: Path
    worker: Worker
    clock: Clock
    window: int
    patience_s: float
    limit: int
    link: LinkMeter = field(default_factory=LinkMeter)

    async def fetch(self, task: Task) -> tuple[Path, int]:
        """Return the file that holds the task's parameters, and the bytes that came for it.

        Raises:
            WireError: The task describes a payload that we refuse, or what comes is damaged every time.
        """
        frames.check(task.params, limit=self.limit)
        received = 0
        for _ in range(ATTEMPTS):
            spool, shared = Spool(self.folder / "params", task.params), task.shared
            try:
                with self.link.downloading():
                    while not spool.assembly.complete:
                        shared = await self._receive(spool, shared=shared)
                await self._check(spool)
            except WireError as error:
                log.warning("parameters of round %d were damaged: %s", task.round, error)
            else:
                return spool.path, received + spool.bytes_received
            finally:
                spool.close()
            received += spool.bytes_received
        raise WireError(f"parameters were damaged {ATTEMPTS} times in a row", reason="digest")

    async def _receive(self, spool: Spool, *, shared: bool) -> bool:
        """Take frames until all are here or the server wants us off the shared topic; return whether we may stay."""
        pace = Pace(self.patience_s, self.clock(), spool.assembly.transfer.frame_bytes)
        if not shared:  # a group takes one size of frames; alone, a ping's answer must not wait behind a large one
            pace.begin_small()
        patterns = [topic(self.site, self.device, "model")] + [topic(self.site, EVERYONE, "model")] * shared
        async with self.transport.subscribe(*patterns) as inbox:
            spool.assembly.forget()
            while not spool.assembly.complete:
                await self._ask(spool, pace)
                before = spool.bytes_received
                try:
                    async with asyncio.timeout(pace.left_s(self.clock())):
                        if await self._told_to_leave(spool, inbox):
                            return False
                except TimeoutError:
                    spool.assembly.forget()
                    pace.gave_up(self.clock())
                else:
                    pace.heard(self.clock(), spool.bytes_received - before)
        return shared

    async def _check(self, spool: Spool) -> None:
        """Check the whole off the loop; when cancelled, wait: the check still reads the file the next task writes."""
        checking = asyncio.ensure_future(self.worker(spool.finish))
        try:
            await asyncio.shield(checking)
        except asyncio.CancelledError:
            await asyncio.gather(checking, return_exceptions=True)
            raise

    async def _ask(self, spool: Spool, pace: Pace) -> None:
        ranges = spool.assembly.ask(pace.window(self.window), pace.frame_bytes)
        if not ranges:
            return
        digest = spool.assembly.transfer.digest
        want = wire.encode(Want(digest=digest, frame_bytes=pace.frame_bytes, ranges=ranges))
        while True:
            try:
                await self.transport.publish(topic(self.site, self.device, "want"), want, assured=False)
            except Unreachable:
                await asyncio.sleep(self.patience_s)
            else:
                return

    async def _told_to_leave(self, spool: Spool, inbox: Inbox) -> bool:
        """Take deliveries until one is a frame of ours; tell whether the word to leave the shared topic came first."""
        digest = spool.assembly.transfer.digest
        while True:
            _, data = await anext(inbox)
            try:
                if wire.is_message(data):
                    if wire.decode_as(Leave, data).digest == digest:
                        return True
                    continue
                frame = frames.decode(data)
                if frame.digest == digest:
                    spool.write(frame, len(data))
                    return False
            except WireError as error:
                log.warning("dropped a frame: %s", error)

"""Fetch the parameters of a task, frame by frame, into a file."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from shared import chunks, wire
from shared.errors import Unreachable, WireError
from shared.messages import Leave, Task, Want
from shared.spool import Spool
from shared.topics import EVERYONE, topic
from shared.transport.base import Delivery, Transport
from shared.worker import Worker

log = logging.getLogger(__name__)

LAST_PATIENCE_S = 30.0


@dataclass
class Download:
    """This device's way of getting payloads; one at a time.

    Attributes:
        transport: Where frames come from.
        site: The site.
        device: This device.
        folder: Where payloads are spooled.
        worker: Runs the check of the whole off the loop.
        window: Frames under way at once.
        patience_s: Seconds without a frame after which frames are asked for again, doubled each time.
        limit: Largest payload taken, in bytes.
    """

    transport: Transport
    site: str
    device: str
    folder: Path
    worker: Worker
    window: int
    patience_s: float
    limit: int

    async def fetch(self, task: Task) -> tuple[Path, int]:
        """Return the file that holds the task's parameters, and the bytes that came for it.

        Raises:
            WireError: The task describes a payload that we refuse.
        """
        chunks.check(task.params, limit=self.limit)
        path = self.folder / "params"
        spool, shared = Spool(path, task.params), task.shared
        try:
            while not spool.assembly.complete:
                shared = await self._receive(spool, shared=shared)
            await self.worker(spool.finish, durable=False)
        except WireError as error:
            log.warning("parameters of round %d were damaged, fetching them again: %s", task.round, error)
            again, received = await self.fetch(task)
            return again, received + spool.bytes_received
        finally:
            spool.close()
        return path, spool.bytes_received

    async def _receive(self, spool: Spool, *, shared: bool) -> bool:
        """Take frames until all are here or the server wants us off the shared topic; return whether we may stay."""
        patience = self.patience_s
        patterns = [topic(self.site, self.device, "model")] + [topic(self.site, EVERYONE, "model")] * shared
        async with self.transport.subscribe(*patterns) as inbox:
            spool.assembly.forget()
            while not spool.assembly.complete:
                await self._ask(spool)
                try:
                    async with asyncio.timeout(patience):
                        delivery = await anext(inbox)
                except TimeoutError:
                    spool.assembly.forget()
                    patience = min(2 * patience, LAST_PATIENCE_S)
                    continue
                if self._told_to_leave(spool, delivery):
                    return False
                patience = self.patience_s
        return shared

    async def _ask(self, spool: Spool) -> None:
        ranges = spool.assembly.ask(self.window)
        if not ranges:
            return
        want = Want(digest=spool.assembly.transfer.digest, ranges=ranges)
        try:
            await self.transport.publish(topic(self.site, self.device, "want"), wire.encode(want))
        except Unreachable:
            spool.assembly.forget()
            await asyncio.sleep(self.patience_s)

    def _told_to_leave(self, spool: Spool, delivery: Delivery) -> bool:
        """Take one delivery; tell whether it was the word to leave the shared topic."""
        _, data = delivery
        digest = spool.assembly.transfer.digest
        try:
            if wire.is_message(data):
                return wire.decode_as(Leave, data).digest == digest
            frame = chunks.decode(data)
            if frame.digest == digest:
                spool.write(frame, len(data))
        except WireError as error:
            log.warning("dropped a frame: %s", error)
        return False

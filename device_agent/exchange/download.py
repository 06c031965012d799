"""Download of payloads, such as a task's parameters, into files."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from device_agent.measurement.link_meter import LinkMeter
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Leave, Task, Transfer
from shared.protocol.payload import digest
from shared.protocol.topics import EVERYONE, topic
from shared.runtime import backports
from shared.runtime.clock import Clock
from shared.runtime.durable import drop_oldest
from shared.runtime.executor import Worker
from shared.transfer import frames
from shared.transfer.pace import Pace, describe_ceiling
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.to_file import FileSink, view
from shared.transport.base import Delivery, Inbox, Transport

log = logging.getLogger(__name__)

GRAPHS, BASES = "graphs", "bases"
"""Folders of payloads that several tasks use, named by digest: evaluation graphs, and frozen leaves of networks."""
TASK_REPEATED: Delivery = ("", b"")
"""Inserted between frames when the server repeats the task: it is online and may have lost the requests."""


@dataclass
class Download:
    """Downloads payloads, one at a time.

    Attributes:
        transport: Source of the frames.
        folder: Folder of the spool file.
        spool: Name of the spool file.
        worker: Verifies complete payloads off the event loop.
        policy: Limits of reception; the server sets the frame size of a group.
        link: Measures the link meanwhile.
        frames_on, wants_on: Channels of the frames and of the requests for them.
    """

    transport: Transport
    site: str
    device: str
    folder: Path
    worker: Worker
    clock: Clock
    policy: Policy
    link: LinkMeter = field(default_factory=LinkMeter)
    spool: str = "params"
    frames_on: str = "model"
    wants_on: str = "want"
    _last_pace: Pace | None = None
    _inbox: Inbox | None = None

    def request_again(self) -> None:
        """Request missing frames again after the server repeated the task."""
        if self._inbox:
            self._inbox.put(TASK_REPEATED)

    async def fetch(self, task: Task) -> tuple[Path, int]:
        """Return the file of the task's parameters, and the bytes received for it.

        Raises:
            WireError: As `receive`.
        """
        content = memoryview(task.payload)
        if content.nbytes == task.params.size and digest([content]) == task.params.digest:
            with closing(FileSink(self.folder / self.spool, task.params)) as sink:
                sink.put(0, content)
            return sink.path, content.nbytes + frames.HEADER_BYTES  # as in one frame
        return await self.receive(task.params, f"parameters of round {task.round}", shared=task.shared)

    async def fetch_stored(
        self, transfer: Transfer | None, folder: str, *, shared: bool = False
    ) -> tuple[Path | None, int]:
        """Return the file of a payload that is stored for later tasks; and the bytes received, 0 if it was stored.

        Args:
            transfer: None for no payload.
            folder: `GRAPHS` or `BASES`.
            shared: Whether its frames may arrive on the topic common to all devices.

        Raises:
            WireError: As `receive`.
        """
        if transfer is None:
            return None, 0
        frames.check_transfer(transfer, limit=self.policy.limit)  # its digest becomes the name of a file
        stored = self.folder / folder / transfer.digest.hex()
        if await self.worker(_is_complete, stored, transfer):
            return stored, 0
        path, received = await self.receive(transfer, f"frames for {folder}", shared=shared)
        await self.worker(_store, path, stored)
        return stored, received

    async def receive(self, transfer: Transfer, what: str, *, shared: bool) -> tuple[Path, int]:
        """Return the file of a payload, and the bytes received for it.

        Args:
            what: Description for the log.
            shared: Whether its frames arrive on the topic common to all devices.

        Raises:
            WireError: The payload exceeds the limits, or every attempt was damaged.
        """
        sink = partial(FileSink, self.folder / self.spool)
        receiver = Receiver(transfer, sink, self.policy, self._pace(transfer, shared=shared), self.clock())
        try:
            while True:
                with self.link.measure_download():
                    while not receiver.complete:
                        shared = await self._receive(receiver, shared=shared)
                if await self._verify(receiver):
                    return receiver.sink.path, receiver.bytes_received
                log.warning("%s were damaged", what)
        finally:
            self._inbox = None
            receiver.sink.close()

    def _pace(self, transfer: Transfer, *, shared: bool) -> Pace:
        """Return the expected pace of frames: group-sized on the shared topic, small at first on the device's own.

        On the device's own topic a ping's answer must not wait behind a large frame.
        """
        pace = replace(self.policy, frame_bytes=transfer.frame_bytes).pace(self.clock(), small=not shared)
        if self._last_pace:
            pace.remember(self._last_pace)
        return pace

    async def _receive(self, receiver: Receiver[FileSink], *, shared: bool) -> bool:
        """Receive frames until complete; return False if the server asked to leave the shared topic."""
        receiver.reroute(self._pace(receiver.transfer, shared=shared))
        patterns = [topic(self.site, self.device, self.frames_on)] + [
            topic(self.site, EVERYONE, self.frames_on)
        ] * shared
        async with self.transport.subscribe(*patterns) as inbox:
            self._inbox = inbox
            while not receiver.complete:
                await self._ask(receiver)
                try:
                    async with backports.timeout(receiver.remaining_s(self.clock())):
                        if await self._receive_until_leave(receiver, inbox):
                            return False
                except TimeoutError:
                    receiver.time_out(self.clock())
        ceiling = receiver.pace.ceiling
        if ceiling is not None and ceiling != (self._last_pace and self._last_pace.ceiling):
            log.warning("%s", describe_ceiling("the server", ceiling))
        self._last_pace = receiver.pace
        return shared

    async def _verify(self, receiver: Receiver[FileSink]) -> bool:
        """Verify the payload off the event loop; when cancelled, wait, as the next task overwrites the file.

        Raises:
            WireError: The last attempt was damaged, too.
        """
        checking = asyncio.ensure_future(self.worker(receiver.finish))
        try:
            await asyncio.shield(checking)
        except asyncio.CancelledError:
            await asyncio.gather(checking, return_exceptions=True)
            raise
        except WireError as error:
            if receiver.is_hopeless:
                times = self.policy.attempts
                raise WireError(f"parameters were damaged {times} times in a row", reason="digest") from error
            return False
        return True

    async def _ask(self, receiver: Receiver[FileSink]) -> None:
        want = receiver.want()
        while want:
            try:
                name = topic(self.site, self.device, self.wants_on)
                await self.transport.publish(name, wire.encode(want), assured=False)
            except Unreachable:
                await asyncio.sleep(self.policy.patience_s)
            else:
                return

    async def _receive_until_leave(self, receiver: Receiver[FileSink], inbox: Inbox) -> bool:
        """Process deliveries until one makes progress; return True if the server asked to leave the shared topic."""
        while True:
            arrival = await anext(inbox)
            if arrival is TASK_REPEATED:
                receiver.note_waiting_sender(self.clock())
                return False
            data = arrival[1]
            try:
                if wire.is_message(data):
                    if wire.decode_as(Leave, data).digest == receiver.transfer.digest:
                        return True
                elif receiver.take(frames.decode(data), self.clock()):
                    return False
            except WireError as error:
                log.warning("dropped a frame: %s", error)


def _is_complete(path: Path, transfer: Transfer) -> bool:
    """Return True for a file that matches a transfer's size and digest."""
    return path.exists() and path.stat().st_size == transfer.size and digest([view(path)]) == transfer.digest


def _store(path: Path, stored: Path) -> None:
    """Move a received payload to the stored ones, of which the last few are retained."""
    stored.parent.mkdir(exist_ok=True)
    path.replace(stored)
    drop_oldest(stored.parent.iterdir())

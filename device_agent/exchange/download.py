"""Fetch a payload, such as the parameters of a task, frame by frame into a file."""

from __future__ import annotations

import asyncio
import logging
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

GRAPHS = "graphs"
"""Folder of the graphs that tasks were evaluated by, under their digests."""
AGAIN: Delivery = ("", b"")
"""Comes between frames when the server has given the task once more: it is there, and may have lost what we asked."""


@dataclass
class Download:
    """This device's way of getting payloads; one at a time.

    Attributes:
        transport: Where frames come from.
        folder: Where payloads are spooled, in a file `spool`.
        worker: Runs the check of the whole off the loop.
        policy: How payloads are received, but for the size of frames, which the server decides for a group.
        link: Measures the link meanwhile.
        frames_on, wants_on: Channels on which frames come and are asked for.
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
    _before: Pace | None = None
    _inbox: Inbox | None = None

    def told_again(self) -> None:
        """Note that the server has given the task once more: what does not come is asked for anew."""
        if self._inbox:
            self._inbox.put(AGAIN)

    async def fetch(self, task: Task) -> tuple[Path, int]:
        """Return the file that holds the task's parameters, and the bytes that came for it.

        Raises:
            WireError: As `receive`.
        """
        return await self.receive(task.params, f"parameters of round {task.round}", shared=task.shared)

    async def fetch_graph(self, graph: Transfer) -> tuple[Path, int]:
        """Return the file of a graph, and the bytes that came for it: none of one that is kept here whole.

        Raises:
            WireError: As `receive`.
        """
        frames.check(graph, limit=self.policy.limit)  # its digest becomes the name of a file
        kept = self.folder / GRAPHS / graph.digest.hex()
        if await self.worker(_is_whole, kept, graph):
            return kept, 0
        path, received = await self.receive(graph, "a graph's frames", shared=False)
        await self.worker(_keep, path, kept)
        return kept, received

    async def receive(self, transfer: Transfer, what: str, *, shared: bool) -> tuple[Path, int]:
        """Return the file that holds a payload, and the bytes that came for it.

        Args:
            what: What it is, for people.
            shared: Whether its frames come on the topic common to all devices.

        Raises:
            WireError: It is one that we refuse, or what comes is damaged every time.
        """
        sink = partial(FileSink, self.folder / self.spool)
        receiver = Receiver(transfer, sink, self.policy, self._pace(transfer, shared=shared), self.clock())
        try:
            while True:
                with self.link.downloading():
                    while not receiver.complete:
                        shared = await self._receive(receiver, shared=shared)
                if await self._is_right(receiver):
                    return receiver.sink.path, receiver.bytes_received
                log.warning("%s were damaged", what)
        finally:
            self._inbox = None
            receiver.sink.close()

    def _pace(self, transfer: Transfer, *, shared: bool) -> Pace:
        """Return how fast frames come: of the group's size on the shared topic, small ones first alone.

        Alone, a ping's answer must not wait behind a large frame.
        """
        pace = replace(self.policy, frame_bytes=transfer.frame_bytes).pace(self.clock(), small=not shared)
        if self._before:
            pace.remember(self._before)
        return pace

    async def _receive(self, receiver: Receiver[FileSink], *, shared: bool) -> bool:
        """Take frames until all are here or the server wants us off the shared topic; return whether we may stay."""
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
                        if await self._told_to_leave(receiver, inbox):
                            return False
                except TimeoutError:
                    receiver.time_out(self.clock())
        ceiling = receiver.pace.ceiling
        if ceiling is not None and ceiling != (self._before and self._before.ceiling):
            log.warning("%s", describe_ceiling("the server", ceiling))
        self._before = receiver.pace
        return shared

    async def _is_right(self, receiver: Receiver[FileSink]) -> bool:
        """Check the whole off the loop; when cancelled, wait: the check still reads the file the next task writes.

        Raises:
            WireError: It is damaged as often as before, and is given up.
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

    async def _told_to_leave(self, receiver: Receiver[FileSink], inbox: Inbox) -> bool:
        """Take deliveries until one brings something; tell whether the word to leave the shared topic came first."""
        while True:
            arrival = await anext(inbox)
            if arrival is AGAIN:
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


def _is_whole(path: Path, transfer: Transfer) -> bool:
    """Tell whether a file is there and holds what a transfer describes."""
    return path.exists() and path.stat().st_size == transfer.size and digest([view(path)]) == transfer.digest


def _keep(path: Path, kept: Path) -> None:
    """Put a graph that came beside those of other runs, of which the last few stay."""
    kept.parent.mkdir(exist_ok=True)
    path.replace(kept)
    drop_oldest(kept.parent.iterdir())

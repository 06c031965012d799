"""Route device messages to the open rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from edge_server.fleet.admission import FRAMED
from edge_server.fleet.answers import Answers
from edge_server.fleet.flood_control import FloodControl, FloodLimits
from edge_server.fleet.handlers import Broadcast, Collector, StepServer
from edge_server.fleet.open_rounds import OpenRounds
from edge_server.fleet.presence import DuplicateIds, PresenceTracker, is_same_session
from edge_server.fleet.state import Fleet
from edge_server.fleet.status_queries import StatusQueries
from edge_server.fleet.task_sender import TaskSender
from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.messages import Features, Report, Status, Task, Update, Want
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker, background
from shared.transfer import frames
from shared.transfer.pace import Pace
from shared.transport.base import Transport


@dataclass(frozen=True)
class DeviceLinks:
    """Experience with the devices' links, from round to round.

    Attributes:
        paces: Pace of each device's split-session features.
        ceilings: Largest frame in bytes that passes, for devices whose larger frames were lost.
    """

    paces: dict[str, Pace] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)


class Server:
    """Message hub of one site. Holds no learning state.

    Args:
        was_run: Returns true for names of this site's earlier runs.
        broker: Set while the broker is connected; None where it cannot disconnect.
        limits: Bounds of what devices may send; None in replay.
    """

    def __init__(  # noqa: PLR0913 - the ends that it connects
        self,
        site: str,
        transport: Transport,
        clock: Clock,
        worker: Worker,
        *,
        fleet: Fleet | None = None,
        was_run: Callable[[str], bool] = lambda _run: False,
        broker: asyncio.Event | None = None,
        limits: FloodLimits | None = None,
    ) -> None:
        self.site, self.transport, self.clock, self.worker = site, transport, clock, worker
        self.fleet = fleet = fleet or Fleet()
        self.links = DeviceLinks()
        self.rounds = OpenRounds(Answers(site, transport, clock), was_run)
        self.sender = TaskSender(site, transport, self.rounds, broker)
        self.flood = FloodControl(
            *(site, transport, clock),
            awaits=self.rounds.awaits,
            list_devices=lambda: fleet.statuses,
            limits=limits,
            takes=self._takes,
        )
        duplicates = DuplicateIds(fleet, lambda: self.flood.refused.update(["id-in-use"]))
        self._queries = StatusQueries(site, transport, clock, self._receive_retained)
        self.presence = PresenceTracker(fleet, duplicates, self._query, self._follow)
        self._handlers: Mapping[type, Callable[[str, Any], Awaitable[None]]] = {
            Status: self.presence.handle_status,
            Report: self.presence.handle_report,
            Want: self.rounds.handle_want,
            Features: self.rounds.handle_features,
            Update: self.rounds.handle_update,
        }

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receive device messages during the block."""
        async with self.flood.subscribe() as source:
            try:
                async with background(self.flood.dispatch(source, self._handle)):
                    yield
            finally:
                for tasks in (self.sender.sending, self._queries.tasks, self.rounds.answers.under_way):
                    await tasks.close()

    @asynccontextmanager
    async def round(
        self,
        gather: Collector,
        tasks: dict[str, Task],
        outgoing: Sequence[Broadcast],
        splitting: StepServer | None = None,
    ) -> AsyncIterator[None]:
        """Keep a round open: send its payloads and tasks, serve its steps if it is split, collect its updates.

        Args:
            outgoing: Payloads, each with its audience.
            splitting: Serves the steps of a split round; None for any other.
        """
        serving = [splitting.serve(self.reachable)] if splitting else []
        with self.rounds.open(gather, tasks, outgoing, splitting):
            async with background(*(payload.run() for payload in outgoing), gather.watch(), *serving):
                await self.sender.send_all(list(tasks))
                yield

    async def reachable(self) -> bool:
        """Wait for the broker; return true if it was connected already."""
        return await self.sender.reachable()

    async def _handle(self, device: str, channel: str, data: bytes) -> bool:
        if device in self.presence.denied or not data:
            return True  # in flight when the device was revoked
        if channel in FRAMED and frames.is_frame(data):
            taker = self.rounds.find_taker(device, channel)
            self.fleet.life_signs[device] += taker is not None
            return taker is not None and await taker.frame(device, data)
        message = clip(wire.decode(data))
        if not isinstance(message, Status | Report):
            await self.presence.note_message(device)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise WireError(f"{type(message).__name__} is not for the server", reason="unexpected")
        await handler(device, message)
        return True

    def _takes(self, device: str) -> bool:
        return self.rounds.takes(device)

    def _query(self, device: str) -> None:
        if self._takes(device):
            self._queries.ask(device)

    async def _receive_retained(self, device: str, status: Status) -> None:
        if device not in self.fleet.online:
            await self._handlers[Status](device, clip(status))

    async def _follow(self, after: Status, before: Status | None) -> None:
        """Give a device its task once it is online; stop serving it once it is offline."""
        device = after.device
        open_round = self.rounds.find(device)
        if after.online:
            if before and not is_same_session(before, after) and open_round:
                await open_round.handle_reconnect(device)
            self.sender.schedule(device)
        elif before and before.online and open_round:
            open_round.dismiss(device)
            open_round.gather.handle_disconnect(device)

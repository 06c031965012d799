"""Receive messages of a rollout's boards; pass each to its handler."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edge_server.fleet.admission import Admission
from edge_server.fleet.subscriptions import Subscriptions
from edge_server.release.rollout.board_reports import BoardReports
from edge_server.release.rollout.bundle_distributor import BundleDistributor
from edge_server.release.rollout.link import RolloutLink
from edge_server.release.rollout.send import BoardSender
from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.inference.bundle import parse_lacks
from shared.protocol.inference.rollout import Lacks, Releases
from shared.protocol.messages import Report, Status, Want
from shared.protocol.topics import parse_channel, parse_device
from shared.runtime.executor import background
from shared.transport.base import Delivery

log = logging.getLogger(__name__)

CHANNELS: Mapping[str, int] = {"status": 4 << 10, "report": 256 << 10, "lacks": 64 << 10}
"""Channels from boards, with the size limit of a message in bytes."""
STATUS_BYTES = 64 << 10
"""Size limit of a message on the status channel of releases or agent versions."""


@dataclass
class BoardReceiver:
    """Receives messages from boards."""

    link: RolloutLink
    reports: BoardReports
    parts: BundleDistributor
    sender: BoardSender
    _refused: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Receive messages while the block runs."""
        link, reports = self.link, self.reports
        channels = {**CHANNELS, link.status_channel: STATUS_BYTES}
        admission = Admission(link.clock, self._refuse, window_bytes=0, channels=channels)
        subscriptions = Subscriptions(
            *(link.transport, link.site, admission),
            list_devices=lambda: {*reports.fleet.statuses, *reports.models},
            closed_topics=link.closed_topics,
        )
        async with subscriptions.open(), background(self._receive(admission)):
            yield

    async def _receive(self, admission: Admission) -> None:
        async for delivery in admission.queue:
            try:
                self._take(delivery)
            except WireError as error:
                device = parse_device(delivery[0])
                self._refuse(device, error)
                admission.penalize(device)
                admission.count_useless(device, parse_channel(delivery[0]), len(delivery[1]))

    def _refuse(self, device: str, error: WireError) -> None:
        """Log the first refused message of each board."""
        if device not in self._refused:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self._refused.add(device)

    def _take(self, delivery: Delivery) -> None:
        device, data = parse_device(delivery[0]), delivery[1]
        if not data:
            return
        message = clip(wire.decode(data))
        if isinstance(message, Want):
            self.parts.want(device, message)
            return
        if not isinstance(message, Status | Report | Releases | Lacks):
            raise WireError(f"a rollout accepts no {type(message).__name__}", reason="unexpected")
        if message.device != device:
            raise WireError(f"{type(message).__name__} in the name of {message.device[:64]!r}", reason="identity")
        self._handle(message)
        self.reports.log.changed.set()

    def _handle(self, message: Status | Report | Releases | Lacks) -> None:
        match message:
            case Status():
                if self.reports.observe_status(message):
                    self.sender.note_connection(message.device)
            case Report():
                self.reports.observe_report(message)
            case Releases():
                self.reports.observe_releases(message)
            case Lacks() if message.deployment == self.parts.deployment:
                if message.device in self.reports.find_fetching():
                    self.parts.ask(message.device, parse_lacks(message))

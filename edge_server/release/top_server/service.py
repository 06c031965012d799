"""Serves the upper halves of a site's releases to its devices: hears them all, computes for one at a time, in turn.

It is a client of the site's broker of its own, beside the server that runs plans, and needs none of it: what it says of
itself stands under `_tops`. It keeps nothing: a device whose answer is lost offers its request again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edge_server.fleet.admission import MOST_BYTES, Admission, longest_packet
from edge_server.fleet.subscriptions import Subscriptions
from edge_server.plan.data_folder import claim_data_folder
from edge_server.plan.server_config import ServerConfig
from edge_server.release.top_server.figures import TopFigures
from edge_server.release.top_server.halves import Halves
from edge_server.release.top_server.intake import Held, Intake
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.collaborative import (
    FROM_DEVICE,
    MAX_DETAIL,
    TO_DEVICE,
    TopAnswer,
    TopRequest,
    TopTiming,
    check_request,
)
from shared.protocol.messages import Room
from shared.protocol.topics import TOPS, is_name, parse_channel, parse_device, topic
from shared.runtime.clock import Clock, monotonic
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import Worker, background, in_thread
from shared.runtime.folder_lock import hold_lock, keep_lock
from shared.transfer import frames
from shared.transport.base import Transport
from shared.transport.mqtt import MqttTransport
from shared.transport.packet_limit import MOST_RECEIVED_BYTES
from shared.transport.presence import Session
from shared.transport.session_probe import SessionProbe

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Between two looks at requests whose features do not come."""
TOLD_S = 60.0
"""Between two lines of figures in the log."""
UNDER_WAY = 64
"""Answers that are being published at once."""
CHANNELS = {FROM_DEVICE: MOST_BYTES["features"]}
FOLDER = "tops"
"""In the folder of runs: the number of this process's session, and its lock."""


@dataclass
class TopServer:
    """One site's.

    Attributes:
        halves: What runs on it.
        worker: Runs what blocks: a look at a release, and ONNX Runtime.
        window_bytes: Most bytes of frames that one device is asked for at once.
        closed_topics: Where to note, for the transport, what is closed now to devices that flood it.
        longest_bytes: Of a packet; a longer one is never awaited.
        figures: What was served, and how fast.
    """

    site: str
    transport: Transport
    clock: Clock
    worker: Worker
    intake: Intake
    halves: Halves
    window_bytes: int
    closed_topics: set[bytes] = field(default_factory=set)
    longest_bytes: int = MOST_RECEIVED_BYTES
    figures: TopFigures = field(default_factory=TopFigures)
    _ready: asyncio.Queue[tuple[str, Held]] = field(default_factory=asyncio.Queue)
    _known: set[str] = field(default_factory=set)
    _refused: Counter[str] = field(default_factory=Counter)
    _telling: set[asyncio.Task[None]] = field(default_factory=set)
    _admission: Admission | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        refuse, bound = self._refuse, self.window_bytes
        self._admission = Admission(self.clock, refuse, window_bytes=bound, channels=CHANNELS)
        place = self.transport, self.site, self._admission
        try:
            async with (
                Subscriptions(*place, lambda: self._known, self.closed_topics).open(),
                background(self._hear(self._admission), self._look(), self._say_figures()),
            ):
                await self._serve()
        finally:
            under_way = list(self._telling)
            for telling in under_way:
                telling.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def admits(self, name: str, size: int) -> bool:
        """Tell whether a payload of so many bytes may come in on a topic: a longer one must be a frame that is awaited.

        Args:
            size: About how many bytes.
        """
        device, channel = parse_device(name), parse_channel(name)
        if self._admission is None or size <= CHANNELS.get(channel, MOST_BYTES["status"]):
            return True
        is_awaited = size <= self.longest_bytes and self.intake.awaits(device)
        is_awaited = is_awaited and self._admission.has_room(device, channel, size)
        if not is_awaited:
            self._admission.count_useless(device, channel, size)
        return is_awaited

    async def _hear(self, admission: Admission) -> None:
        async for name, data in admission:
            device, is_of_use = parse_device(name), True
            if not is_name(device):
                continue
            self._known.add(device)
            try:
                if frames.is_frame(data):
                    is_of_use = await self._take(device, data)
                elif data:
                    await self._offered(device, wire.decode(data))
            except WireError as error:
                self._refuse(device, error)
                admission.penalize(device)
                is_of_use = False
            if not is_of_use:
                admission.count_useless(device, FROM_DEVICE, len(data))

    async def _offered(self, device: str, message: object) -> None:
        """Begin to take a request, or tell its device why not.

        Raises:
            WireError: It is no request, or not of this device.
        """
        if not isinstance(message, TopRequest):
            raise WireError(f"{type(message).__name__} is not for the server's half", reason="unexpected")
        if message.device != device:
            raise WireError(f"request in the name of {message.device[:64]!r}", reason="identity")
        check_request(message)
        try:
            await self.worker(self.halves.require, message)
            await self.intake.offer(device, message)
        except WireError as error:
            self._answer(device, message, error=error)
            if error.reason != "busy":  # that is nobody's fault
                raise

    async def _take(self, device: str, data: bytes) -> bool:
        pending = self.intake.held.get(device)
        try:
            is_of_use, complete = await self.intake.take(device, data)
        except WireError as error:
            if pending and device not in self.intake.held:
                self._answer(device, pending.request, error=error)
            raise
        if complete:
            self._ready.put_nowait((device, complete))
        return is_of_use

    async def _serve(self) -> None:
        """Run halves on features, one request after the other, in the order in which they were whole."""
        while True:
            device, pending = await self._ready.get()
            if self.intake.held.get(device) is not pending:
                continue  # a newer one has taken its place
            began = self.clock()
            if pending.due <= began:
                self.intake.drop(device)
                self._answer(device, pending.request, error=WireError("its time was over", reason="late"))
                continue
            assert pending.features is not None
            run = partial(self.halves.run, pending.request, pending.features)
            try:
                outputs, error = await self.worker(run), None
            except WireError as problem:
                outputs, error = b"", problem
            timing = TopTiming(waited_s=began - pending.whole_at, compute_s=self.clock() - began)
            self._finish(device, pending, timing, outputs, error)

    def _finish(self, device: str, pending: Held, timing: TopTiming, outputs: bytes, error: WireError | None) -> None:
        """Answer a request, unless a newer one of its device has come meanwhile."""
        if self.intake.held.get(device) is not pending:
            return
        self.intake.drop(device)
        if error:
            self._refuse(device, error)
            if self._admission:
                self._admission.penalize(device)
        else:
            self.figures.served(timing, pending.request.params.size, len(outputs))
        self._answer(device, pending.request, timing=timing, outputs=outputs, error=error)

    def _answer(
        self,
        device: str,
        request: TopRequest,
        *,
        timing: TopTiming = TopTiming(),  # noqa: B008 - a constant
        outputs: bytes = b"",
        error: WireError | None = None,
    ) -> None:
        """Tell a device what its request came to, without waiting until the broker has it."""
        if error:
            self.figures.refused[error.reason] += 1
        if len(self._telling) >= UNDER_WAY:
            return  # its device offers it again
        answer = TopAnswer(
            device=device,
            instance=request.instance,
            number=request.number,
            answers=request.params.digest,
            outputs=outputs,
            reason=error.reason if error else "",
            detail=str(error)[:MAX_DETAIL] if error else "",
            timing=timing,
            room=Room() if error else self.intake.room(device),
        )
        telling = asyncio.create_task(self._publish(device, answer), name="answer")
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _publish(self, device: str, answer: TopAnswer) -> None:
        try:
            await self.transport.publish(topic(self.site, device, TO_DEVICE), wire.encode(answer))
        except Unreachable as error:
            log.debug("not told, %s will offer its request again: %s", device, error)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for device in await self.intake.look():
                log.debug("device %s waits no longer for a request whose features did not come", device)
                self.figures.refused["late"] += 1

    async def _say_figures(self) -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            if line := self.figures.line():
                log.info("%s", line)
            self._refused.clear()

    def _refuse(self, device: str, error: WireError) -> None:
        """Count what is not taken; say so once a reason and minute, however much of it comes."""
        if not self._refused[error.reason]:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self._refused[error.reason] += 1


def compose(config: ServerConfig, transport: Transport, *, clock: Clock = monotonic) -> TopServer:
    """Return the service that a server's file describes.

    Args:
        config: The site, its folders, and how much is taken.
        transport: Its way to the broker.
        clock: Monotonic seconds.
    """
    tops, link = config.tops, config.link
    limit = tops.max_features_mb << 20
    intake = Intake(config.site, transport, clock, link.policy(limit), tops.held_mb << 20, tops.waiting)
    halves = Halves(Path(config.data_dir), tops.threads, tops.releases, limit)
    return TopServer(config.site, transport, clock, in_thread, intake, halves, link.window * link.frame_bytes)


async def serve_site(config: ServerConfig) -> None:
    """Serve the upper halves of a site's releases until cancelled.

    Args:
        config: As its file has it.

    Raises:
        ConfigError: Another process serves them, or a newer version wrote in the folder of runs.
        Unwritable: The disk takes nothing more.
    """
    folder = Path(config.data_dir) / FOLDER
    claim_data_folder(folder.parent)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder) as lock:
        session = Session(folder / "session", TOPS, config.site, uuid.uuid4().hex)
        most = longest_packet(config.link.frame_bytes)
        known_as = f"{config.site}.{TOPS}", session.presence
        probe = SessionProbe.of_server(config.site)
        transport = MqttTransport(config.broker, *known_as, most_packet_bytes=most, probe=probe)
        server = compose(config, transport)
        server.closed_topics, transport.admits = transport.closed, server.admits
        server.longest_bytes = most
        async with transport.running(), background(keep_lock(lock)):
            log.info("serves the upper halves of the releases in %s", config.data_dir)
            await server.run()

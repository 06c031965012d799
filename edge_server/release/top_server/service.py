"""Split inference service: run the upper halves of releases for a site's devices.

It computes one request at a time. It is a separate MQTT client, named `_tops`, and independent of the server that runs
plans. It stores no requests: a device whose answer is lost offers its request again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from pathlib import Path

from edge_server.fleet.admission import MOST_BYTES, longest_packet
from edge_server.fleet.flood_control import FloodControl, FloodLimits
from edge_server.plan.data_folder import claim_data_folder
from edge_server.plan.server_config import ServerConfig
from edge_server.release.top_server.intake import PendingRequest, RequestBuffer
from edge_server.release.top_server.metrics import TopServerMetrics
from edge_server.release.top_server.upper_halves import UpperHalves
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
from shared.protocol.topics import TOPS, topic
from shared.runtime.clock import Clock, monotonic
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import BackgroundTasks, Worker, background, in_thread
from shared.runtime.folder_lock import hold_lock, keep_lock
from shared.transfer import frames
from shared.transport.base import Transport
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from shared.transport.session_probe import SessionProbe

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Interval between checks for overdue frames and expired requests."""
METRICS_LOG_S = 60.0
"""Interval between log lines with metrics."""
MAX_ANSWERS = 64
"""Limit of answers being published concurrently."""
CHANNELS = {FROM_DEVICE: MOST_BYTES["features"]}
FOLDER = "tops"
"""Subfolder of the folder of runs with the service's lock and MQTT session number."""


class TopServer:
    """The split inference service of a site.

    Args:
        worker: Runs blocking calls: reads of the release store, and ONNX Runtime.
        limits: Bounds of what devices may send.
    """

    def __init__(  # noqa: PLR0913 - the ends that it connects
        self,
        site: str,
        transport: Transport,
        clock: Clock,
        worker: Worker,
        *,
        intake: RequestBuffer,
        halves: UpperHalves,
        limits: FloodLimits,
    ) -> None:
        self.site, self.transport, self.clock, self.worker = site, transport, clock, worker
        self.intake, self.halves, self.metrics = intake, halves, TopServerMetrics()
        self._known = known = set[str]()
        self.flood = FloodControl(
            *(site, transport, clock),
            awaits=lambda device, _channel: intake.awaits(device),
            list_devices=lambda: known,
            limits=limits,
        )
        self._ready = asyncio.Queue[tuple[str, PendingRequest]]()
        self._answer_tasks = BackgroundTasks()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with (
                self.flood.subscribe() as source,
                background(self.flood.dispatch(source, self._handle), self._check_requests(), self._log_metrics()),
            ):
                await self._serve()
        finally:
            await self._answer_tasks.close()

    async def _handle(self, device: str, _channel: str, data: bytes) -> bool:
        self._known.add(device)
        if frames.is_frame(data):
            return await self._take(device, data)
        if data:
            await self._accept_offer(device, wire.decode(data))
        return True

    async def _accept_offer(self, device: str, message: object) -> None:
        """Accept a request, or answer its device with the reason for refusal.

        Raises:
            WireError: The message is not a valid request of this device.
        """
        if not isinstance(message, TopRequest):
            raise WireError(f"the service accepts no {type(message).__name__}", reason="unexpected")
        if message.device != device:
            raise WireError(f"request in the name of {message.device[:64]!r}", reason="identity")
        check_request(message)
        try:
            await self.worker(self.halves.require_release, message)
            await self.intake.offer(device, message)
        except WireError as error:
            self._answer(device, message, error=error)
            if error.reason != "busy":  # the device is not to be penalized
                raise

    async def _take(self, device: str, data: bytes) -> bool:
        pending = self.intake.pending.get(device)
        try:
            is_of_use, complete = await self.intake.take(device, data)
        except WireError as error:
            if pending and device not in self.intake.pending:
                self._answer(device, pending.request, error=error)
            raise
        if complete:
            self._ready.put_nowait((device, complete))
        return is_of_use

    async def _serve(self) -> None:
        """Process complete requests one at a time, in order of completion."""
        while True:
            device, pending = await self._ready.get()
            if self.intake.pending.get(device) is not pending:
                continue  # replaced by a newer request
            began = self.clock()
            if pending.due <= began:
                self.intake.drop(device)
                self._answer(device, pending.request, error=WireError("the request's deadline passed", reason="late"))
                continue
            assert pending.features is not None
            run = partial(self.halves.run, pending.request, pending.features)
            try:
                outputs, error = await self.worker(run), None
            except WireError as problem:
                outputs, error = b"", problem
            timing = TopTiming(waited_s=began - pending.complete_at, compute_s=self.clock() - began)
            self._finish(device, pending, timing, outputs, error)

    def _finish(
        self, device: str, pending: PendingRequest, timing: TopTiming, outputs: bytes, error: WireError | None
    ) -> None:
        """Answer a request unless a newer one of its device has replaced it."""
        if self.intake.pending.get(device) is not pending:
            return
        self.intake.drop(device)
        if error:
            self.flood.refuse(device, error)
        else:
            self.metrics.count_request(timing, pending.request.params.size, len(outputs))
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
        """Publish the answer to a request in the background."""
        if error:
            self.metrics.refused[error.reason] += 1
        if len(self._answer_tasks) >= MAX_ANSWERS:
            return  # the device will offer the request again
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
        self._answer_tasks.start(self._publish(device, answer), "answer")

    async def _publish(self, device: str, answer: TopAnswer) -> None:
        try:
            await self.transport.publish(topic(self.site, device, TO_DEVICE), wire.encode(answer))
        except Unreachable as error:
            log.debug("answer not sent, %s will offer its request again: %s", device, error)

    async def _check_requests(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for device in await self.intake.check_requests():
                log.debug("request of %s expired before its features arrived", device)
                self.metrics.refused["late"] += 1

    async def _log_metrics(self) -> None:
        while True:
            await asyncio.sleep(METRICS_LOG_S)
            if line := self.metrics.line():
                log.info("%s", line)
            self.flood.take_refused()


def compose(
    config: ServerConfig, transport: Transport, *, clock: Clock = monotonic, closed_topics: set[bytes] | None = None
) -> TopServer:
    """Create the service from its configuration."""
    tops, link = config.tops, config.link
    limit = tops.max_features_mb << 20
    intake = RequestBuffer(config.site, transport, clock, link.policy(limit), tops.held_mb << 20, tops.waiting)
    halves = UpperHalves(Path(config.data_dir), tops.threads, tops.releases, limit)
    closed_topics = set() if closed_topics is None else closed_topics
    limits = FloodLimits(
        link.window * link.frame_bytes, closed_topics, longest_packet(link.frame_bytes), channels=CHANNELS
    )
    return TopServer(config.site, transport, clock, in_thread, intake=intake, halves=halves, limits=limits)


async def serve_site(config: ServerConfig) -> None:
    """Run the split inference service until cancelled.

    Raises:
        ConfigError: Another process runs the service, or a newer fieldfleet wrote in the folder of runs.
        Unwritable: The disk is full.
    """
    folder = Path(config.data_dir) / FOLDER
    claim_data_folder(folder.parent)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder) as lock:
        session = Session(folder / "session", TOPS, config.site, uuid.uuid4().hex)
        longest_bytes = longest_packet(config.link.frame_bytes)
        transport = MqttTransport(
            config.broker,
            f"{config.site}.{TOPS}",
            session.presence,
            most_packet_bytes=longest_bytes,
            probe=SessionProbe.of_server(config.site),
        )
        server = compose(config, transport, closed_topics=transport.closed)
        transport.admits = server.flood.admits
        async with transport.running(), background(keep_lock(lock)):
            log.info("serving the upper halves of the releases in %s", config.data_dir)
            await server.run()

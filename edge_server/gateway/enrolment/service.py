"""Enrolment service: a minimal HTTPS server, one request per connection, with bounded resources.

Its own hundred lines instead of a framework's thousands: only the few paths needed exist. Bounds: connections in all
and per address, the handshake, the time of a request, its head and body; for files, downloads in all and per address,
memory per download, and the minimum transfer rate. When all slots are occupied, a newcomer displaces the address that
holds the most (`fair_slots`). A client certificate is requested but not required: a joining board has none yet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.gateway.enrolment.fair_slots import FairSlots, Slot, protect_slot
from edge_server.gateway.enrolment.registrar import Answer, Registrar, Request, refusal
from edge_server.gateway.packages.download import AGAIN_S, STALL_S, Download, DownloadSlots, PackageCatalogue
from shared.errors import ConfigError, FieldFleetError, WireError
from shared.protocol.enrolment import MOST_HEAD, body_length, http_date, parse_head
from shared.runtime.executor import BackgroundTasks, background, in_thread

log = logging.getLogger(__name__)

MOST_OPEN, MOST_OPEN_EACH, MOST_HANDSHAKES = 128, 16, 256
"""Connections with a request, in all and per source; and connections in the handshake, which have separate slots, so
that handshakes that never end do not block requests."""
HANDSHAKE_S, REQUEST_S = 3.0, 10.0
HANDSHAKE_TURN_S, TURN_S = 1.0, 3.0
"""A connection stays open this long even if others wait; a handshake or a request takes a fraction of it."""
BACKLOG = 64
RETRY_S = 0.1
"""Pause after the system was out of resources for another connection."""
PHRASES = {
    200: "OK",
    206: "Partial Content",
    416: "Range Not Satisfiable",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    429: "Too Many Requests",
}


def service_context(certificate: Path, key: Path, root: Path) -> ssl.SSLContext:
    """Return the TLS settings of the service: TLS 1.2 or later, client certificate optional but verified.

    Args:
        certificate: Service's certificate followed by its CA's, PEM.
        key: Private key of the service, PEM.
        root: Root of boards' certificates.

    Raises:
        ConfigError: A file is missing or malformed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    try:
        context.load_verify_locations(root)
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"{certificate}, {key}, {root}: {error}; run `edge-server site init`") from error
    return context


@dataclass
class _Connection:
    """An accepted connection.

    Attributes:
        timeout: Time limit; None before the connection is served.
        is_evicted: It had to make room for another.
    """

    sock: socket.socket
    source: str
    timeout: asyncio.Timeout | None = None
    is_evicted: bool = False

    def evict(self) -> None:
        """End the connection as if its time limit had passed."""
        self.is_evicted = True
        if self.timeout and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())


@dataclass
class EnrolmentService:
    """HTTPS server for boards.

    Attributes:
        context: Return the TLS settings for the next connection.
        request_s: Time limit of a request, seconds.
        packages: Files for boards; None if there are none.
        handshake_slots: Connections in the handshake.
        request_slots: Connections with a request.
    """

    registrar: Registrar
    context: Callable[[], ssl.SSLContext]
    request_s: float = REQUEST_S
    packages: PackageCatalogue | None = None
    downloads: DownloadSlots = field(default_factory=DownloadSlots)
    handshake_slots: FairSlots = field(
        default_factory=lambda: FairSlots(MOST_HANDSHAKES, MOST_OPEN_EACH, HANDSHAKE_TURN_S)
    )
    request_slots: FairSlots = field(default_factory=lambda: FairSlots(MOST_OPEN, MOST_OPEN_EACH, TURN_S))
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    _answer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        """Share the memory of stalled sources between both kinds of slots."""
        self.request_slots.stalled = self.handshake_slots.stalled

    @asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve during the block; yield the port.

        Args:
            host: Address to listen on; empty for all of this machine.
            port: 0 for any free one.

        Raises:
            ConfigError: The address is not one of this machine's, or is in use.
        """
        with listen(host, port) as listener:
            try:
                async with background(self._accept(listener)):
                    yield listener.getsockname()[1]
            finally:
                await self._tasks.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("cannot accept another connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            connection = _Connection(sock, str(address[0]))
            slot = self.handshake_slots.acquire(connection.source, connection.evict)
            if slot is None:
                sock.close()
                continue
            self._tasks.start(self._serve(connection, slot), "request")

    async def _serve(self, connection: _Connection, slot: Slot) -> None:
        """Answer one connection, and contain its errors."""
        try:
            if connection.is_evicted:
                connection.sock.close()
                return
            async with asyncio.timeout(self.request_s) as connection.timeout:
                reader, writer = await self._secure(connection.sock)
                self.handshake_slots.release(slot)
                try:
                    await self._serve_request(connection, reader, writer)
                finally:
                    writer.transport.abort()
                    with suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError, FieldFleetError) as error:  # ssl.SSLError is an OSError
            log.debug("connection from %s: %s", connection.source, error)
            self.handshake_slots.stalled.add(connection.source)
        finally:
            self.handshake_slots.release(slot)

    async def _serve_request(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the request of a connection, if there is a slot for it."""
        slot = self.request_slots.acquire(connection.source, connection.evict)
        if slot is None:
            return
        try:
            result = await self._answer(reader, writer, slot)
            answer = await self._send(writer, result, connection, slot) if isinstance(result, Download) else result
            if answer:
                writer.write(_encode(answer, self.registrar.utc_s()))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            self.handshake_slots.stalled.forget(connection.source)
        finally:
            self.request_slots.release(slot)

    async def _send(
        self, writer: asyncio.StreamWriter, download: Download, connection: _Connection, slot: Slot
    ) -> Answer | None:
        """Send a file; return a refusal instead if too many downloads are in progress."""
        with self.downloads.slot(connection.source, connection.evict) as has_room:
            if not has_room:
                return refusal("busy", status=503, retry_s=AGAIN_S)
            assert connection.timeout
            connection.timeout.reschedule(asyncio.get_running_loop().time() + self.downloads.time_limit_s(download))
            with protect_slot(slot):  # as a download it may be evicted, as a connection not
                writer.write(_head(download.status, download.lines(), self.registrar.utc_s()))
                await self.downloads.send(writer, download)
        return None

    async def _secure(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            context = self.context()
        except BaseException:
            sock.close()  # later asyncio closes it
            raise
        reader = asyncio.StreamReader(limit=MOST_HEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=STALL_S
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slot: Slot
    ) -> Answer | Download:
        secured = writer.get_extra_info("ssl_object")
        try:
            request = await read_http_request(reader, slot.address, secured.getpeercert(binary_form=True) or b"")
        except (WireError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return refusal("malformed")
        try:
            with protect_slot(slot):
                if self.packages and (result := await in_thread(self.packages.find, request)):
                    return result
                async with self._answer_lock:
                    return await in_thread(self.registrar.answer, request)
        except (FieldFleetError, OSError) as error:
            log.error("%s cannot be answered: %s", request.path, error)  # noqa: TRY400 - the remedy is in the message
            return refusal("site")


async def read_http_request(reader: asyncio.StreamReader, source: str, peer: bytes) -> Request:
    """Read a request.

    Args:
        peer: Client certificate, DER; empty if there is none.

    Raises:
        WireError: It is malformed, or longer than allowed.
        asyncio.IncompleteReadError: The connection ended early.
        asyncio.LimitOverrunError: Its head is too long.
    """
    first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
    method, path, version = [*first.split(" "), "", "", ""][:3]
    if first.count(" ") != 2 or version not in ("HTTP/1.1", "HTTP/1.0"):  # noqa: PLR2004 - three words
        raise WireError("not an HTTP/1.1 request", reason="malformed")
    part = "" if "if-range" in headers else headers.get("range", "")
    return Request(method, path, await reader.readexactly(body_length(headers)), source, peer, part)


def _encode(answer: Answer, utc_s: float) -> bytes:
    lines = [f"Content-Type: {answer.kind}", f"Content-Length: {len(answer.body)}"]
    if answer.retry_s:
        lines.append(f"Retry-After: {int(answer.retry_s) + 1}")
    return _head(answer.status, lines, utc_s) + answer.body


def _head(status: int, lines: list[str], utc_s: float) -> bytes:
    first = f"HTTP/1.1 {status} {PHRASES.get(status, 'Service Unavailable')}"
    return "\r\n".join([first, f"Date: {http_date(utc_s)}", *lines, "Connection: close", "", ""]).encode("ascii")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; without a host on all addresses, also of IPv6 where it exists.

    Args:
        host: Address or name of this machine.
        port: 0 for any free one.

    Raises:
        ConfigError: The address is not one of this machine's, or is in use.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: choose 1 to {(1 << 16) - 1}")
    try:
        if not host and socket.has_dualstack_ipv6():
            with suppress(OSError):  # a kernel without IPv6
                listener = socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
                )
                listener.setblocking(False)
                return listener
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]  # noqa: S104 - all addresses, as documented
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host or '*'}:{port}: {what}; choose another --port or --host") from error
    listener.setblocking(False)
    return listener

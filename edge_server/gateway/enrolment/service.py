"""The enrolment service: HTTPS on the gateway, one request a connection, everything bounded.

Its own hundred lines in place of a framework's thousands: a few paths, and nothing that is not needed can be asked.
What is bounded: connections in all and of one address, the handshake, the time of a request as a whole, its head and
its body; of files, downloads in all and to one address, what of each is in memory, and how slowly it may be read. Where
all connections or downloads are taken, whoever comes is let in at the cost of who has the most (`fair_places`). A
certificate of the client is asked for and not required: a board that joins has none yet.
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

from edge_server.gateway.enrolment.fair_places import FairPlaces, TakenPlace, busy
from edge_server.gateway.enrolment.registrar import Answer, Registrar, Request, refusal
from edge_server.gateway.packages.download import AGAIN_S, STALL_S, Download, PackageShelf, Streams
from shared.errors import ConfigError, FieldFleetError, WireError
from shared.protocol.enrolment import MOST_HEAD, body_length, http_date, parse_head
from shared.runtime.executor import in_thread

log = logging.getLogger(__name__)

MOST_OPEN, MOST_OPEN_EACH, MOST_HANDSHAKES = 128, 16, 256
"""Connections with a request, of these of one source, and those whose handshake is not over: these have places of their
own, so that handshakes that never end take none of those of requests."""
HANDSHAKE_S, REQUEST_S = 3.0, 10.0
HANDSHAKE_TURN_S, TURN_S = 1.0, 3.0
"""For so long a connection stays open even where others wait: a handshake or a request takes a fraction of it."""
BACKLOG = 64
REST_S = 0.1
"""After the system had no room for another connection."""
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
    """Return the TLS settings of the service: TLS 1.2 at least, a client's certificate welcome and checked.

    Args:
        certificate: The service's, PEM, with the CA's that signed it.
        key: Its private key, PEM.
        root: The root that boards' certificates must lead to.

    Raises:
        ConfigError: A file is missing, or not what it should be.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_OPTIONAL
    try:
        made.load_verify_locations(root)
        made.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"{certificate}, {key}, {root}: {error}; `edge-server site init` makes them anew") from error
    return made


@dataclass
class _Connection:
    """Who is connected.

    Attributes:
        patience: How long it may take; None before it has begun.
        is_over: Whether it had to make room.
    """

    sock: socket.socket
    source: str
    patience: asyncio.Timeout | None = None
    is_over: bool = False

    def hang_up(self) -> None:
        """End it, as if its time were up."""
        self.is_over = True
        if self.patience and not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time())


@dataclass
class EnrolmentService:
    """Answers boards over HTTPS.

    Attributes:
        registrar: Knows what to answer.
        context: Returns the TLS settings for the next connection.
        request_s: Seconds that a request may take.
        shelf: What boards may fetch; None where there is nothing.
        handshakes: Connections whose handshake is not over.
        places: Those with a request.
    """

    registrar: Registrar
    context: Callable[[], ssl.SSLContext]
    request_s: float = REQUEST_S
    shelf: PackageShelf | None = None
    streams: Streams = field(default_factory=Streams)
    handshakes: FairPlaces = field(
        default_factory=lambda: FairPlaces(MOST_HANDSHAKES, MOST_OPEN_EACH, HANDSHAKE_TURN_S)
    )
    places: FairPlaces = field(default_factory=lambda: FairPlaces(MOST_OPEN, MOST_OPEN_EACH, TURN_S))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        """Have both kinds of places know who came to no end in the other."""
        self.places.dawdlers = self.handshakes.dawdlers

    @asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve while the block lasts; yields the port.

        Args:
            host: Address to listen on; empty for all of this machine.
            port: 0 for any that is free.

        Raises:
            ConfigError: The address is not this machine's, or taken.
        """
        with listening(host, port) as listener:
            accepting = asyncio.create_task(self._accept(listener), name="accept")
            try:
                yield listener.getsockname()[1]
            finally:
                for task in (accepting, *self._tasks):
                    task.cancel()
                await asyncio.gather(accepting, *self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("no room for another connection: %s", error)
                await asyncio.sleep(REST_S)
                continue
            connection = _Connection(sock, str(address[0]))
            place = self.handshakes.take(connection.source, connection.hang_up)
            if place is None:
                sock.close()
                continue
            task = loop.create_task(self._serve(connection, place), name="request")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection, place: TakenPlace) -> None:
        """Answer one connection, whatever comes on it."""
        try:
            if connection.is_over:
                connection.sock.close()
                return
            async with asyncio.timeout(self.request_s) as connection.patience:
                reader, writer = await self._secure(connection.sock)
                self.handshakes.free(place)
                try:
                    await self._serve_request(connection, reader, writer)
                finally:
                    writer.transport.abort()
                    with suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError, FieldFleetError) as error:  # ssl.SSLError is an OSError
            log.debug("connection from %s: %s", connection.source, error)
            self.handshakes.dawdlers.add(connection.source)
        finally:
            self.handshakes.free(place)

    async def _serve_request(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the one request of a connection, where there is a place for it."""
        place = self.places.take(connection.source, connection.hang_up)
        if place is None:
            return
        try:
            found = await self._answer(reader, writer, place)
            answer = await self._send(writer, found, connection, place) if isinstance(found, Download) else found
            if answer:
                writer.write(_encode(answer, self.registrar.utc_s()))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            self.handshakes.dawdlers.forget(connection.source)
        finally:
            self.places.free(place)

    async def _send(
        self, writer: asyncio.StreamWriter, download: Download, connection: _Connection, place: TakenPlace
    ) -> Answer | None:
        """Send a file; return what is answered instead where too many are fetched already."""
        with self.streams.place(connection.source, connection.hang_up) as has_room:
            if not has_room:
                return refusal("busy", status=503, retry_s=AGAIN_S)
            assert connection.patience
            connection.patience.reschedule(asyncio.get_running_loop().time() + self.streams.patience_s(download))
            with busy(place):  # among downloads it gives way, and not among connections
                writer.write(_head(download.status, download.lines(), self.registrar.utc_s()))
                await self.streams.send(writer, download)
        return None

    async def _secure(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            context = self.context()
        except BaseException:
            sock.close()  # from here on asyncio does
            raise
        reader = asyncio.StreamReader(limit=MOST_HEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=STALL_S
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: TakenPlace
    ) -> Answer | Download:
        secured = writer.get_extra_info("ssl_object")
        try:
            request = await read_request_of(reader, place.address, secured.getpeercert(binary_form=True) or b"")
        except (WireError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return refusal("malformed")
        try:
            with busy(place):
                if self.shelf and (found := await in_thread(self.shelf.find, request)):
                    return found
                async with self._turn:
                    return await in_thread(self.registrar.answer, request)
        except (FieldFleetError, OSError) as error:
            log.error("%s cannot be answered: %s", request.path, error)  # noqa: TRY400 - the remedy is in the message
            return refusal("site")


async def read_request_of(reader: asyncio.StreamReader, source: str, peer: bytes) -> Request:
    """Read a request.

    Args:
        reader: What comes on a connection.
        peer: The certificate that authenticates it, DER; empty for none.

    Raises:
        WireError: It is none, or longer than any that is answered.
        asyncio.IncompleteReadError: It ends before its end.
        asyncio.LimitOverrunError: Its head has none.
    """
    first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
    method, path, version = [*first.split(" "), "", "", ""][:3]
    if first.count(" ") != 2 or version not in ("HTTP/1.1", "HTTP/1.0"):  # noqa: PLR2004 - three words
        raise WireError("not a request of HTTP/1.1", reason="malformed")
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


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; on all addresses, of IPv6 too where there is such, if none is named.

    Args:
        host: Address of this machine, or its name.
        port: 0 for any that is free.

    Raises:
        ConfigError: The address is not this machine's, or taken.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: give 1 to {(1 << 16) - 1}")
    try:
        if not host and socket.has_dualstack_ipv6():
            with suppress(OSError):  # a kernel without IPv6
                listener = socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
                )
                listener.setblocking(False)
                return listener
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]  # noqa: S104 - all, as said
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host or '*'}:{port}: {what}; name another --port or --host") from error
    listener.setblocking(False)
    return listener

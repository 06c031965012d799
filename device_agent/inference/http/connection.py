"""HTTP/1.1 server connection with limits on size and time.

A request's announced size is checked before memory is reserved. A peer that sends slowly or does not read holds only
its connection, until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import httptools

from device_agent.inference.http.message import Request, Response, make_refusal
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
IDLE_S, LINGER_S = 75.0, 2.0
"""Limits between requests, and for a refused peer to read the refusal while its data is dropped."""
NEVER = math.inf
BLANK = b"\r\n\r\n"
"""Separator of head and body."""


def _describe_failure(error: Exception) -> Response:
    """Return the response to an internal error."""
    if isinstance(error, MemoryError):
        log.warning("out of memory in a request: raise serve.memory_mb or lower serve.max_body_mb")
        return make_refusal(503, "out of memory; send smaller batches, or raise serve.memory_mb")
    log.error("a request failed", exc_info=error)
    return make_refusal(500, f"internal error: {type(error).__name__}")


class ConnectionHost(Protocol):
    """Shared limits and request handling of a server's connections.

    Attributes:
        patience_s: Seconds within which a request must arrive, and a response be read.
    """

    max_body_bytes: int
    patience_s: float
    clock: Clock

    def answer(self, request: Request) -> Response | Awaitable[Response]:
        """Return the response or an awaitable of it; never raises because of a peer's data."""

    def admit(self, connection: Connection) -> bool:
        """Register a connection; return whether there is room for it."""

    def forget(self, connection: Connection) -> None:
        """Unregister a closed connection."""

    def reserve(self, size: int) -> bool:
        """Reserve bytes for a body; return whether there is room."""

    def release(self, size: int) -> None:
        """Return reserved bytes."""


@dataclass
class _Arriving:
    """A partly received request.

    Attributes:
        url: Received part of the URL.
        reserved: Bytes reserved for its body.
        has_head: Whether the head is complete.
        last_size: Bytes of the body when it last grew.
    """

    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    reserved: int = 0
    has_head: bool = False
    last_size: int = 0


class _RepeatHead(NamedTuple):
    """Head of a request that came in one piece. A request of equal size and head differs only in its body.

    Attributes:
        head: Bytes up to and including the blank line.
        size: Bytes of the entire request.
        request: The parsed request without its body.
    """

    head: bytes
    size: int
    request: Request

    @classmethod
    def of(cls, data: bytes, request: Request) -> _RepeatHead | None:
        """Return the head of a request; None if a repetition would have to be parsed again.

        Args:
            data: Bytes of exactly this request.
        """
        head, blank, body = data.partition(BLANK)
        is_plain = "content-length" in request.headers and "expect" not in request.headers
        if not (is_plain and request.keep and len(body) == len(request.body)):
            return None
        return cls(head + blank, len(data), request._replace(body=b""))


class Connection(asyncio.Protocol):
    """Parses requests with httptools and writes the server's responses.

    Attributes:
        deadline: Time on the server's clock after which `expire` is due.
        is_blocked: Whether the peer leaves responses unread; reading is paused meanwhile.
    """

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._arriving: _Arriving | None = None
        self._head_bytes = 0
        self._queue: deque[tuple[Request, int]] = deque()
        self._repeat: _RepeatHead | None = None
        self._parsed_requests: list[Request] = []
        self._computing: asyncio.Task[None] | None = None
        self._refused = self.is_blocked = self._completed = False
        self.deadline = NEVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.deadline = self._server.clock() + IDLE_S
        if not self._server.admit(self):
            self._refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._server.forget(self)
        self._drop()
        for _, reserved in self._queue:
            self._server.release(reserved)
        self._queue.clear()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        begins = self._arriving is None
        if begins and self._accept_repeat(data):
            return
        self._completed = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._refused:
                self._refuse(400, f"not an HTTP/1.1 request: {str(error)[:80]}")
            return
        self._limit_head(len(data))
        if begins and self._arriving is None and len(self._parsed_requests) == 1:
            self._repeat = _RepeatHead.of(data, self._parsed_requests[0])
        self._parsed_requests.clear()
        if self._is_between_requests():  # the parser skips empty lines, of which a peer may send any number
            self.deadline = min(self.deadline, self._server.clock() + self._server.patience_s)

    def _is_between_requests(self) -> bool:
        """True if no request has begun and none is being answered."""
        return not (self._arriving or self._completed or self._computing or self._queue or self._refused)

    def _accept_repeat(self, data: bytes) -> bool:
        """Queue a request whose head equals the previous one byte for byte, without parsing it."""
        repeat = self._repeat
        if repeat is None or len(data) != repeat.size or not data.startswith(repeat.head):
            return False
        size = repeat.size - len(repeat.head)
        if not self._server.reserve(size):
            return False  # parsing it reports the refusal
        self._completed = True
        self._queue.append((repeat.request._replace(body=data[len(repeat.head) :]), size))
        self._answer_queued()
        return True

    def _limit_head(self, size: int) -> None:
        """Refuse a request whose head, chunk extensions or trailers grow too large."""
        arriving = self._arriving
        if arriving is None or self._refused or self._completed:  # most of these bytes may be the previous request's
            return
        if arriving.has_head and len(arriving.body) > arriving.last_size:
            arriving.last_size, self._head_bytes = len(arriving.body), 0
            return
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            what = "chunk extensions or trailers exceed" if arriving.has_head else "the head exceeds"
            self._refuse(431, f"{what} {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> bool:
        return self._computing is not None  # the peer may close its half and wait for the response

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read its responses."""
        self.is_blocked = True
        self.deadline = self._server.clock() + self._server.patience_s
        self._live_transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_blocked = False
        self.deadline = self._server.clock() + IDLE_S
        self._answer_queued()

    # Callbacks of httptools, in the order of a request.

    def on_message_begin(self) -> None:
        self._arriving, self._head_bytes = _Arriving(), 0
        if not self._computing:
            self.deadline = self._server.clock() + self._server.patience_s

    def on_url(self, url: bytes) -> None:
        if self._arriving and not self._refused:
            self._arriving.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving and not self._arriving.has_head and not self._refused:  # else it is a trailer
            self._arriving.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        arriving = self._arriving
        if arriving is None or self._refused:
            return
        arriving.has_head, self._head_bytes = True, 0
        if self._parser.should_upgrade():
            self._refuse(400, "protocol upgrades are not supported; use HTTP/1.1")
            return
        length = arriving.headers.get("content-length", "0")
        size = int(length) if length.isascii() and length.isdecimal() else 0  # the parser has refused an invalid length
        if self._reserve(arriving, size) and arriving.headers.get("expect", "").lower() == "100-continue":
            self._live_transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        if arriving is None or self._refused:
            return
        beyond = len(arriving.body) + len(body) - arriving.reserved
        if beyond <= 0 or self._reserve(arriving, beyond):  # a chunked body announces no size
            arriving.body += body

    def on_message_complete(self) -> None:
        arriving, self._arriving, self._completed = self._arriving, None, True
        if arriving is None or self._refused:
            return
        request = Request(
            self._parser.get_method().decode("ascii"),
            arriving.url.decode("latin-1").partition("?")[0],
            arriving.headers,
            bytes(arriving.body),
            self._parser.should_keep_alive(),
        )
        self._parsed_requests.append(request)
        self._queue.append((request, arriving.reserved))
        self._answer_queued()

    @property
    def _live_transport(self) -> asyncio.Transport:
        assert self._transport
        return self._transport

    def _reserve(self, arriving: _Arriving, size: int) -> bool:
        """Reserve bytes for a body, or refuse the request."""
        if arriving.reserved + size > self._server.max_body_bytes:
            self._refuse(413, f"the body exceeds {self._server.max_body_bytes} bytes; see serve.max_body_mb")
            return False
        if not self._server.reserve(size):
            self._refuse(503, "too many large requests at once; try again")
            return False
        arriving.reserved += size
        return True

    def _answer_queued(self) -> None:
        """Answer queued requests in order; resume reading when the queue is empty."""
        while self._queue and not (self._computing or self.is_blocked or self._refused):
            request, reserved = self._queue.popleft()
            self.deadline = NEVER
            try:
                answer = self._server.answer(request)
            except Exception as error:  # noqa: BLE001 - any error must leave this peer and the others answered
                answer = _describe_failure(error)
            if isinstance(answer, Response):
                self._server.release(reserved)
                self._send(answer, request)
            else:
                self._computing = asyncio.ensure_future(self._compute(answer, request, reserved))
        if self._live_transport.is_closing():
            return
        if self._computing or self.is_blocked:
            self._live_transport.pause_reading()
        else:
            self._live_transport.resume_reading()

    async def _compute(self, answer: Awaitable[Response], request: Request, reserved: int) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - as above
            response = _describe_failure(error)
        finally:
            self._computing = None
            self._server.release(reserved)
        if not self._refused:
            self._send(response, request)
            self._answer_queued()

    def _send(self, response: Response, request: Request) -> None:
        if self._live_transport.is_closing():
            return
        self.deadline = self._server.clock() + (self._server.patience_s if self._arriving else IDLE_S)
        self._live_transport.write(response.encode(keep=request.keep, is_head=request.method == "HEAD"))
        if not request.keep:
            self._refused = True
            self._live_transport.close()

    @property
    def is_idle(self) -> bool:
        """True while no request has begun and no response is due."""
        return not (self._arriving or self._computing or self._queue or self._refused or self.is_blocked)

    def expire(self) -> None:
        """Close a peer past its deadline, with status 408 if it had begun a request."""
        if self._arriving and not self._refused and not self.is_blocked:
            self._refuse(408, f"the request was incomplete after {self._server.patience_s:g} s")
        else:
            self._live_transport.abort()

    def _refuse(self, status: int, reason: str) -> None:
        """Send a refusal, then drop further data until the peer has read it and closes."""
        self._refused = True
        self._drop()
        self._live_transport.write(make_refusal(status, reason).encode(keep=False))
        if self._live_transport.can_write_eof():
            self._live_transport.write_eof()
        self.deadline = self._server.clock() + LINGER_S

    def _drop(self) -> None:
        """Return the bytes reserved for an unfinished request."""
        if self._arriving:
            self._server.release(self._arriving.reserved)
        self._arriving = None

"""One connection of an application: requests come in and are answered in their order, within limits.

What a request says of its size is judged before any memory is taken for it. A peer that sends slowly, or does not read,
holds nothing but its connection, and that until its time is up.
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

from device_agent.inference.http.message import Request, Response, refusal
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
IDLE_S, LINGER_S = 75.0, 2.0
"""Between requests; and for a peer to read why it was refused while what it still sends is dropped."""
NEVER = math.inf
BLANK = b"\r\n\r\n"
"""Between head and body."""


def _failure(error: Exception) -> Response:
    """Return the answer where giving one failed by no fault of the peer."""
    if isinstance(error, MemoryError):
        log.warning("a request found no memory: raise serve.memory_mb, or make serve.max_body_mb smaller")
        return refusal(503, "out of memory; ask for less at once, or raise serve.memory_mb")
    log.error("a request failed", exc_info=error)
    return refusal(500, f"a fault of the server: {type(error).__name__}")


class Shared(Protocol):
    """What all connections of a server have in common.

    Attributes:
        patience_s: In which a request must have come, and an answer been taken.
    """

    max_body_bytes: int
    patience_s: float
    clock: Clock

    def answer(self, request: Request) -> Response | Awaitable[Response]:
        """Return the answer to a request, or what will give it; never raises for what a peer sent."""

    def admit(self, connection: Connection) -> bool:
        """Note a connection; tell whether there is room for it."""

    def forget(self, connection: Connection) -> None:
        """Strike out a connection that is gone."""

    def reserve(self, size: int) -> bool:
        """Take room for so many bytes of a body, if there is as much."""

    def release(self, size: int) -> None:
        """Give room back."""


@dataclass
class _Arriving:
    """A request of which a part is here.

    Attributes:
        url: As far as it came.
        headers: Of those that came.
        reserved: Bytes that were taken for it.
        has_head: Whether its head is whole.
        seen: Bytes of its body when some last came.
    """

    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    reserved: int = 0
    has_head: bool = False
    seen: int = 0


class _Known(NamedTuple):
    """A request that came as one piece: one of as many bytes with this head says the same, but for its body.

    Attributes:
        head: To the blank line, and with it.
        size: Of all of it.
        request: As it was read, without its body.
    """

    head: bytes
    size: int
    request: Request

    @classmethod
    def of(cls, data: bytes, request: Request) -> _Known | None:
        """Return what is known by a request; None where another with its head would have to be read again.

        Args:
            data: As it came, and nothing else.
            request: As it was read.
        """
        head, blank, body = data.partition(BLANK)
        is_plain = "content-length" in request.headers and "expect" not in request.headers
        if not (is_plain and request.keep and len(body) == len(request.body)):
            return None
        return cls(head + blank, len(data), request._replace(body=b""))


class Connection(asyncio.Protocol):
    """Reads requests with httptools, and has the server answer them.

    Attributes:
        deadline: When `expire` is to be called, by the server's clock.
        is_blocked: Whether its peer leaves answers unread; nothing is read from it meanwhile.
    """

    def __init__(self, server: Shared) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._arriving: _Arriving | None = None
        self._head_bytes = 0
        self._waiting: deque[tuple[Request, int]] = deque()
        self._known: _Known | None = None
        self._read: list[Request] = []
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
        for _, reserved in self._waiting:
            self._server.release(reserved)
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        begins = self._arriving is None
        if begins and self._is_known(data):
            return
        self._completed = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._refused:
                self._refuse(400, f"this is no HTTP/1.1 request: {str(error)[:80]}")
            return
        self._bound_what_is_no_body(len(data))
        if begins and self._arriving is None and len(self._read) == 1:
            self._known = _Known.of(data, self._read[0])
        self._read.clear()
        if self._begins_nothing():  # such as empty lines without end, which the parser passes over
            self.deadline = min(self.deadline, self._server.clock() + self._server.patience_s)

    def _begins_nothing(self) -> bool:
        """Tell whether all that came is no begin of a request, and none is being answered."""
        return not (self._arriving or self._completed or self._computing or self._waiting or self._refused)

    def _is_known(self, data: bytes) -> bool:
        """Take a request whose head is that of the one before, to the byte, without reading it again."""
        known = self._known
        if known is None or len(data) != known.size or not data.startswith(known.head):
            return False
        size = known.size - len(known.head)
        if not self._server.reserve(size):
            return False  # and the usual way says so
        self._completed = True
        self._waiting.append((known.request._replace(body=data[len(known.head) :]), size))
        self._go_on()
        return True

    def _bound_what_is_no_body(self, size: int) -> None:
        """Refuse a request whose head goes on and on, or what stands between and behind its chunks."""
        arriving = self._arriving
        if arriving is None or self._refused or self._completed:  # most of these bytes may be another request's
            return
        if arriving.has_head and len(arriving.body) > arriving.seen:
            arriving.seen, self._head_bytes = len(arriving.body), 0
            return
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            what = "extensions of chunks, or trailers," if arriving.has_head else "a head"
            self._refuse(431, f"{what} of more than {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> bool:
        return self._computing is not None  # it may have closed its half and wait for the answer

    def pause_writing(self) -> None:
        """Take nothing more from a peer that does not read its answers."""
        self.is_blocked = True
        self.deadline = self._server.clock() + self._server.patience_s
        self._open.pause_reading()

    def resume_writing(self) -> None:
        self.is_blocked = False
        self.deadline = self._server.clock() + IDLE_S
        self._go_on()

    # What httptools calls, in this order.

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
            self._refuse(400, "no other protocol than HTTP/1.1 is spoken here")
            return
        told = arriving.headers.get("content-length", "0")
        size = int(told) if told.isascii() and told.isdecimal() else 0  # the parser refused what is none
        if self._take(arriving, size) and arriving.headers.get("expect", "").lower() == "100-continue":
            self._open.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        if arriving is None or self._refused:
            return
        beyond = len(arriving.body) + len(body) - arriving.reserved
        if beyond <= 0 or self._take(arriving, beyond):  # it comes in chunks, and said nothing of its size
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
        self._read.append(request)
        self._waiting.append((request, arriving.reserved))
        self._go_on()

    @property
    def _open(self) -> asyncio.Transport:
        assert self._transport
        return self._transport

    def _take(self, arriving: _Arriving, size: int) -> bool:
        """Reserve room for so many bytes more, or refuse the request."""
        if arriving.reserved + size > self._server.max_body_bytes:
            self._refuse(413, f"a body of more than {self._server.max_body_bytes} bytes; see serve.max_body_mb")
            return False
        if not self._server.reserve(size):
            self._refuse(503, "too many large requests at once; try again")
            return False
        arriving.reserved += size
        return True

    def _go_on(self) -> None:
        """Answer what waits, one after the other; read on where nothing does."""
        while self._waiting and not (self._computing or self.is_blocked or self._refused):
            request, reserved = self._waiting.popleft()
            self.deadline = NEVER
            try:
                answer = self._server.answer(request)
            except Exception as error:  # noqa: BLE001 - whatever it is, this peer and the others are answered
                answer = _failure(error)
            if isinstance(answer, Response):
                self._server.release(reserved)
                self._send(answer, request)
            else:
                self._computing = asyncio.ensure_future(self._compute(answer, request, reserved))
        if self._open.is_closing():
            return
        if self._computing or self.is_blocked:
            self._open.pause_reading()
        else:
            self._open.resume_reading()

    async def _compute(self, answer: Awaitable[Response], request: Request, reserved: int) -> None:
        try:
            response = await answer
        except Exception as error:  # noqa: BLE001 - as above
            response = _failure(error)
        finally:
            self._computing = None
            self._server.release(reserved)
        if not self._refused:
            self._send(response, request)
            self._go_on()

    def _send(self, response: Response, request: Request) -> None:
        if self._open.is_closing():
            return
        self.deadline = self._server.clock() + (self._server.patience_s if self._arriving else IDLE_S)
        self._open.write(response.encode(keep=request.keep, is_head=request.method == "HEAD"))
        if not request.keep:
            self._refused = True
            self._open.close()

    @property
    def is_idle(self) -> bool:
        """True while no request has begun and no answer is due."""
        return not (self._arriving or self._computing or self._waiting or self._refused or self.is_blocked)

    def expire(self) -> None:
        """Part with a peer whose time is up: with a word where it began a request, else without."""
        if self._arriving and not self._refused and not self.is_blocked:
            self._refuse(408, f"the request did not come whole within {self._server.patience_s:g} s")
        else:
            self._open.abort()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer that there will be no answer, then drop what still comes until the peer has read it and closes."""
        self._refused = True
        self._drop()
        self._open.write(refusal(status, reason).encode(keep=False))
        if self._open.can_write_eof():
            self._open.write_eof()
        self.deadline = self._server.clock() + LINGER_S

    def _drop(self) -> None:
        """Give back the room of a request that will not be answered."""
        if self._arriving:
            self._server.release(self._arriving.reserved)
        self._arriving = None

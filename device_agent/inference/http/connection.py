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
from typing import Protocol

from device_agent.inference.http.message import Request, Response, make_refusal
from device_agent.inference.http.parser import RequestParser
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

IDLE_S, LINGER_S = 75.0, 2.0
"""Limits between requests, and for a refused peer to read the refusal while its data is dropped."""
NEVER = math.inf


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


class Connection(asyncio.Protocol):
    """Answers a peer's requests in order.

    Attributes:
        deadline: Time on the server's clock after which `expire` is due.
        is_blocked: Whether the peer leaves responses unread; reading is paused meanwhile.
    """

    def __init__(self, server: ConnectionHost) -> None:
        self._server = server
        self._parser = RequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[tuple[Request, int]] = deque()
        self._computing: asyncio.Task[None] | None = None
        self.is_refused = self.is_blocked = False
        self.deadline = NEVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.deadline = self._server.clock() + IDLE_S
        if not self._server.admit(self):
            self.refuse(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._server.forget(self)
        self._parser.drop()
        for _, reserved in self._queue:
            self._server.release(reserved)
        self._queue.clear()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        self._parser.feed(data)
        if self.is_idle and not self._parser.has_completed:  # the parser skips empty lines, of which there may be many
            self.deadline = min(self.deadline, self._server.clock() + self._server.patience_s)

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

    def begin_request(self) -> None:
        if not self._computing:
            self.deadline = self._server.clock() + self._server.patience_s

    def reserve_body(self, size: int, reserved: int, *, is_awaited: bool = False) -> bool:
        if reserved + size > self._server.max_body_bytes:
            self.refuse(413, f"the body exceeds {self._server.max_body_bytes} bytes; see serve.max_body_mb")
            return False
        if not self._server.reserve(size):
            self.refuse(503, "too many large requests at once; try again")
            return False
        if is_awaited:
            self._live_transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def release_body(self, size: int) -> None:
        self._server.release(size)

    def add_request(self, request: Request, reserved: int) -> None:
        self._queue.append((request, reserved))
        self._answer_queued()

    @property
    def _live_transport(self) -> asyncio.Transport:
        assert self._transport
        return self._transport

    def _answer_queued(self) -> None:
        """Answer queued requests in order; resume reading when the queue is empty."""
        while self._queue and not (self._computing or self.is_blocked or self.is_refused):
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
        if not self.is_refused:
            self._send(response, request)
            self._answer_queued()

    def _send(self, response: Response, request: Request) -> None:
        if self._live_transport.is_closing():
            return
        self.deadline = self._server.clock() + (self._server.patience_s if self._parser.has_begun else IDLE_S)
        self._live_transport.write(response.encode(keep=request.keep, is_head=request.method == "HEAD"))
        if not request.keep:
            self.is_refused = True
            self._live_transport.close()

    @property
    def is_idle(self) -> bool:
        """True while no request has begun and no response is due."""
        return not (self._parser.has_begun or self._computing or self._queue or self.is_refused or self.is_blocked)

    def expire(self) -> None:
        """Close a peer past its deadline, with status 408 if it had begun a request."""
        if self._parser.has_begun and not self.is_refused and not self.is_blocked:
            self.refuse(408, f"the request was incomplete after {self._server.patience_s:g} s")
        else:
            self._live_transport.abort()

    def refuse(self, status: int, reason: str) -> None:
        """Send a refusal, then drop further data until the peer has read it and closes."""
        self.is_refused = True
        self._parser.drop()
        self._live_transport.write(make_refusal(status, reason).encode(keep=False))
        if self._live_transport.can_write_eof():
            self._live_transport.write_eof()
        self.deadline = self._server.clock() + LINGER_S

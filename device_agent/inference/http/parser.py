"""HTTP/1.1 request parser with limits on the size of heads and bodies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import httptools

from device_agent.inference.http.message import Request

MAX_HEAD_BYTES = 16 << 10
BLANK = b"\r\n\r\n"
"""Separator of head and body."""


class RequestSink(Protocol):
    """Receiver of parsed requests: a connection."""

    @property
    def is_refused(self) -> bool:
        """True once the peer was refused; nothing more is parsed."""

    def begin_request(self) -> None:
        """Note that a request has begun."""

    def reserve_body(self, size: int, reserved: int, *, is_awaited: bool = False) -> bool:
        """Reserve bytes of a body, or refuse the request.

        Args:
            reserved: Bytes reserved for it before.
            is_awaited: Whether the peer sends the body only once it is told to.
        """

    def release_body(self, size: int) -> None:
        """Return reserved bytes."""

    def add_request(self, request: Request, reserved: int) -> None:
        """Answer a complete request, in order."""

    def refuse(self, status: int, reason: str) -> None:
        """Send a refusal, then drop further data until the peer has read it and closes."""


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


class RequestParser:
    """Parses requests with httptools, whose callbacks are its methods `on_...`.

    Attributes:
        has_completed: Whether the last data completed a request.
    """

    def __init__(self, sink: RequestSink) -> None:
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._arriving: _Arriving | None = None
        self._head_bytes = 0
        self._repeat: _RepeatHead | None = None
        self._parsed_requests: list[Request] = []
        self.has_completed = False

    @property
    def has_begun(self) -> bool:
        """True while a request is incomplete."""
        return self._arriving is not None

    def feed(self, data: bytes) -> None:
        """Parse received data."""
        begins = not self.has_begun
        if begins and self._accept_repeat(data):
            return
        self.has_completed = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._sink.is_refused:
                self._sink.refuse(400, f"not an HTTP/1.1 request: {str(error)[:80]}")
            return
        self._limit_head(len(data))
        if begins and not self.has_begun and len(self._parsed_requests) == 1:
            self._repeat = _RepeatHead.of(data, self._parsed_requests[0])
        self._parsed_requests.clear()

    def drop(self) -> None:
        """Drop an incomplete request, and return the bytes reserved for it."""
        if self._arriving:
            self._sink.release_body(self._arriving.reserved)
        self._arriving = None

    def _accept_repeat(self, data: bytes) -> bool:
        """Queue a request whose head equals the previous one byte for byte, without parsing it."""
        repeat = self._repeat
        if repeat is None or len(data) != repeat.size or not data.startswith(repeat.head):
            return False
        size = repeat.size - len(repeat.head)
        if not self._sink.reserve_body(size, 0):
            return True
        self.has_completed = True
        self._sink.add_request(repeat.request._replace(body=data[len(repeat.head) :]), size)
        return True

    def _limit_head(self, size: int) -> None:
        """Refuse a request whose head, chunk extensions or trailers grow too large."""
        arriving = self._arriving
        if (
            arriving is None or self._sink.is_refused or self.has_completed
        ):  # most of these bytes may be the previous request's
            return
        if arriving.has_head and len(arriving.body) > arriving.last_size:
            arriving.last_size, self._head_bytes = len(arriving.body), 0
            return
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            what = "chunk extensions or trailers exceed" if arriving.has_head else "the head exceeds"
            self._sink.refuse(431, f"{what} {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._arriving, self._head_bytes = _Arriving(), 0
        self._sink.begin_request()

    def on_url(self, url: bytes) -> None:
        if self._arriving and not self._sink.is_refused:
            self._arriving.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving and not self._arriving.has_head and not self._sink.is_refused:  # else it is a trailer
            self._arriving.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        arriving = self._arriving
        if arriving is None or self._sink.is_refused:
            return
        arriving.has_head, self._head_bytes = True, 0
        if self._parser.should_upgrade():
            self._sink.refuse(400, "protocol upgrades are not supported; use HTTP/1.1")
            return
        length = arriving.headers.get("content-length", "0")
        size = int(length) if length.isascii() and length.isdecimal() else 0  # the parser has refused an invalid length
        self._reserve(arriving, size, is_awaited=arriving.headers.get("expect", "").lower() == "100-continue")

    def on_body(self, body: bytes) -> None:
        arriving = self._arriving
        if arriving is None or self._sink.is_refused:
            return
        beyond = len(arriving.body) + len(body) - arriving.reserved
        if beyond <= 0 or self._reserve(arriving, beyond):  # a chunked body announces no size
            arriving.body += body

    def on_message_complete(self) -> None:
        arriving, self._arriving, self.has_completed = self._arriving, None, True
        if arriving is None or self._sink.is_refused:
            return
        request = Request(
            self._parser.get_method().decode("ascii"),
            arriving.url.decode("latin-1").partition("?")[0],
            arriving.headers,
            bytes(arriving.body),
            self._parser.should_keep_alive(),
        )
        self._parsed_requests.append(request)
        self._sink.add_request(request, arriving.reserved)

    def _reserve(self, arriving: _Arriving, size: int, *, is_awaited: bool = False) -> bool:
        if not self._sink.reserve_body(size, arriving.reserved, is_awaited=is_awaited):
            return False
        arriving.reserved += size
        return True

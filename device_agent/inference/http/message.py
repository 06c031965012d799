"""HTTP request and response of the inference server."""

from __future__ import annotations

import http
from functools import lru_cache
from typing import NamedTuple

import msgspec

CACHED_HEADS = 64
"""Response heads cached: repeated requests of an application get the same head."""


class Request(NamedTuple):
    """A complete request.

    Attributes:
        headers: By lower-case name; the last value of a repeated header.
        keep: Whether the connection stays open.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep: bool = True


class Response(NamedTuple):
    """Response to a request.

    Attributes:
        body: JSON, followed by `len(body) - json_bytes` bytes of tensors if `json_bytes` is not 0.
        json_bytes: Length of the JSON; 0 if all of the body is JSON.
    """

    status: int
    body: bytes
    json_bytes: int = 0

    def encode(self, *, keep: bool, is_head: bool = False) -> bytes:
        """Return the bytes to send.

        Args:
            keep: Whether the connection stays open.
            is_head: Whether the method was HEAD: a body would be parsed as the next response.
        """
        head = _encode_head(self.status, self.json_bytes, len(self.body), keep=keep)
        return head if is_head else head + self.body


@lru_cache(maxsize=CACHED_HEADS)
def _encode_head(status: int, json_bytes: int, size: int, *, keep: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
    if json_bytes:
        lines += ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {json_bytes}"]
    elif size:
        lines.append("Content-Type: application/json")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode("ascii")


def make_refusal(status: int, reason: str) -> Response:
    """Return an error response with a reason."""
    return Response(status, msgspec.json.encode({"error": reason}))

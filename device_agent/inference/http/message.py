"""A request that is whole, and what it is answered with."""

from __future__ import annotations

import http
from functools import lru_cache
from typing import NamedTuple

import msgspec

KNOWN_HEADS = 64
"""Heads of answers that are not written anew: an application that asks again and again gets the same."""


class Request(NamedTuple):
    """A whole request.

    Attributes:
        method: Such as `GET`.
        headers: By names in lower case; of one that comes twice the last.
        body: Its bytes.
        keep: Whether the connection stays after it.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep: bool = True


class Response(NamedTuple):
    """What a request is answered with.

    Attributes:
        body: JSON, and tensors behind it where `json_bytes` says so.
        json_bytes: How many of the bytes are JSON; 0 for all.
    """

    status: int
    body: bytes
    json_bytes: int = 0

    def encode(self, *, keep: bool, is_head: bool = False) -> bytes:
        """Return it as it goes out.

        Args:
            keep: Whether the connection stays.
            is_head: Whether a head alone was asked for: a body would be taken for the begin of the next answer.
        """
        head = _encode_head(self.status, self.json_bytes, len(self.body), keep=keep)
        return head if is_head else head + self.body


@lru_cache(maxsize=KNOWN_HEADS)
def _encode_head(status: int, json_bytes: int, size: int, *, keep: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
    if json_bytes:
        lines += ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {json_bytes}"]
    elif size:
        lines.append("Content-Type: application/json")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode("ascii")


def refusal(status: int, reason: str) -> Response:
    """Return an answer that says why there is none."""
    return Response(status, msgspec.json.encode({"error": reason}))

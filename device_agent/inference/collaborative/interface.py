"""Interface to the upper layers of a split network, which the server runs."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

import msgspec

from shared.protocol.inference.collaborative import TopTiming


class Half(msgspec.Struct, frozen=True):
    """Identity of an upper half.

    Attributes:
        parameters: SHA-256 of its parameters, 32 bytes.
    """

    name: str
    version: int
    parameters: bytes


class TopReply(msgspec.Struct, frozen=True):
    """Reply of the server's upper half.

    Attributes:
        outputs: Payload of codec `dense`.
        timing: Seconds spent on the server.
        round_trip_s: Seconds from the first offer to the reply.
        bytes_up: Messages and frames of this request.
    """

    outputs: bytes
    timing: TopTiming
    round_trip_s: float
    bytes_up: int
    bytes_down: int


class AskTop(Protocol):
    """Client for the server's upper half: `RemoteTop`, or a pipe to the process that has it."""

    def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> Awaitable[TopReply]:
        """Run the upper half on a payload of features. Errors are those of `RemoteTop`."""

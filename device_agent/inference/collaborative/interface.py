"""Interface to the upper layers of a split network, which the server runs."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.protocol.inference.collaborative import TopTiming


@dataclass(frozen=True)
class Half:
    """Identity of an upper half.

    Attributes:
        parameters: SHA-256 of its parameters, 32 bytes.
    """

    name: str
    version: int
    parameters: bytes


@dataclass(frozen=True)
class TopReply:
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

    @property
    def link_s(self) -> float:
        """Seconds of the round trip that were not spent on the server."""
        return max(0.0, self.round_trip_s - self.timing.waited_s - self.timing.compute_s)


class AskTop(Protocol):
    """Client for the server's upper half: `RemoteTop`, or a pipe to the process that has it."""

    def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> Awaitable[TopReply]:
        """Run the upper half on a payload of features. Errors are those of `RemoteTop`."""

"""What is asked of the server's half of a network, and what it gives: between whoever asks and whoever has the link."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.protocol.inference.collaborative import TopTiming


@dataclass(frozen=True)
class Half:
    """Which half of which network is asked.

    Attributes:
        parameters: SHA-256 of its parameters, 32 bytes.
    """

    name: str
    version: int
    parameters: bytes


@dataclass(frozen=True)
class TopReply:
    """What the server's half gave.

    Attributes:
        outputs: A payload of codec `dense`.
        timing: Where the server's seconds went.
        round_trip_s: From the first offer to the answer; without the server's seconds that is the link's.
        bytes_up: Of messages and frames of this request.
    """

    outputs: bytes
    timing: TopTiming
    round_trip_s: float
    bytes_up: int
    bytes_down: int

    @property
    def link_s(self) -> float:
        """Seconds that it was neither here nor worked on there."""
        return max(0.0, self.round_trip_s - self.timing.waited_s - self.timing.compute_s)


class AskTop(Protocol):
    """A way to the server's half: `RemoteTop`, or that of another process of this device, through a pipe."""

    def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> Awaitable[TopReply]:
        """Have the server's half run on the payload of some features; raise as `RemoteTop`."""

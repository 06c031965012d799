"""Define the messages of agent and inference process on two pipes: u32 length, MessagePack.

Every message of the agent is answered by one of the process, in their order; `Ready` alone comes unasked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from shared.tensors.counts import ceil_share

EXIT_TAKEN = 71
"""Of an inference process that cannot listen where it is to."""
HEAD_BYTES = 4


class Load(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: open a model beside those that are served; `Loaded` or `LoadRefused` answers it.

    Attributes:
        manifest: Its release's, as `shared.protocol.inference.release.write_manifest` makes it.
        parts: Paths of its files, by the names that they have in a folder.
        own: File of the device's own parameters, which answer in place of the release's; empty for these.
    """

    name: str
    version: int
    manifest: bytes
    parts: dict[str, str]
    own: str = ""


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: this version answers from now on who names none; `Switched` or `LoadRefused` answers it."""

    name: str
    version: int


class Unload(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: forget a version, after the requests that it is computing; `Unloaded` answers it."""

    name: str
    version: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: how does a version do? `Figures` answers it, or `LoadRefused` where it is not loaded."""

    name: str
    version: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: it listens, and has ONNX Runtime imported."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: the model is open and warm.

    Attributes:
        provider: What computes it, as ONNX Runtime calls that.
    """

    name: str
    version: int
    seconds: float
    provider: str


class LoadRefused(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: it is not served, and why; what was served before goes on."""

    name: str
    version: int
    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: requests that come from now on are answered by this version."""

    name: str
    version: int


class Unloaded(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: the version is forgotten, or was not there."""

    name: str
    version: int


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: how a version does, since it was loaded.

    Attributes:
        requests: That it was given, answered or not; those that were no requests do not count.
        errors: Of them, those that it failed: ONNX Runtime gave an error, or outputs that are no numbers.
        non_finite: Of the errors, those of finite inputs with an output that is NaN or infinite.
        p50_s: Seconds of ONNX Runtime alone for one request, the median of the last 1024; 0 before the first.
        p95_s: Their 95th percentile.
        p99_s: Their 99th.
    """

    name: str
    version: int
    requests: int = 0
    errors: int = 0
    non_finite: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


def percentiles(seconds: Iterable[float], shares: Sequence[float]) -> list[float]:
    """Return the smallest of some numbers that so large a share of them does not exceed; zeros where there are none.

    Args:
        seconds: The numbers, in any order.
        shares: In (0, 1].
    """
    ordered = sorted(seconds)
    return [ordered[max(0, ceil_share(share, len(ordered)) - 1)] if ordered else 0.0 for share in shares]


ToInference: TypeAlias = Load | Switch | Unload | Ask
FromInference: TypeAlias = Ready | Loaded | LoadRefused | Switched | Unloaded | Figures


def frame(message: ToInference | FromInference) -> bytes:
    """Return a message as it goes through the pipe: u32 length, MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD_BYTES, "little") + data

"""Messages between agent and inference process, over two pipes: u32 length, MessagePack.

The process answers the agent's messages in order; only `Ready` is unsolicited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from shared.tensors.counts import ceil_share

EXIT_TAKEN = 71
"""Exit code of an inference process whose port or socket is taken."""
HEAD_BYTES = 4
T = TypeVar("T")


class Load(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: open a model beside those served; reply `Loaded` or `Refused`.

    Attributes:
        manifest: Manifest as serialised by `shared.protocol.inference.release.write_manifest`.
        parts: Paths of the release's files by their names in an exported folder.
        own: File of the device's own parameters to use in place of the release's; empty for the release's.
    """

    name: str
    version: int
    manifest: bytes
    parts: dict[str, str]
    own: str = ""


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: activate a version for requests that name none; reply `Applied` or `Refused`."""

    name: str
    version: int


class Unload(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: unload a version after its running requests; reply `Applied`."""

    name: str
    version: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: get a version's statistics; reply `Figures`, or `Refused` if it is not loaded."""

    name: str
    version: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: listening, with ONNX Runtime imported."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: the model is open and warm.

    Attributes:
        provider: Execution provider in use, by ONNX Runtime's name.
    """

    seconds: float
    provider: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: the command failed; what was served before continues."""

    reason: str


class Applied(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: new requests are answered by the version, or it is no longer loaded."""


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: statistics of a version since it was loaded.

    Attributes:
        requests: Valid requests received, failed ones included.
        errors: Requests that failed in ONNX Runtime or gave NaN or infinite outputs.
        non_finite: Errors with NaN or infinite outputs for finite inputs.
        p50_s: Median of ONNX Runtime's seconds per request, over the latest 1024; 0 before the first.
        p95_s: 95th percentile of the same durations.
        p99_s: 99th percentile of the same durations.
    """

    name: str
    version: int
    requests: int = 0
    errors: int = 0
    non_finite: int = 0
    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0


def compute_percentiles(seconds: Iterable[float], shares: Sequence[float]) -> list[float]:
    """Return nearest-rank percentiles; zeros without samples.

    Args:
        seconds: Samples in any order.
        shares: Ranks as fractions in (0, 1].
    """
    ordered = sorted(seconds)
    return [ordered[max(0, ceil_share(share, len(ordered)) - 1)] if ordered else 0.0 for share in shares]


ToInference: TypeAlias = Load | Switch | Unload | Ask
FromInference: TypeAlias = Ready | Loaded | Refused | Applied | Figures
to_inference: msgspec.msgpack.Decoder[ToInference] = msgspec.msgpack.Decoder(ToInference)
from_inference: msgspec.msgpack.Decoder[FromInference] = msgspec.msgpack.Decoder(FromInference)


def encode_frame(message: msgspec.Struct) -> bytes:
    """Encode a message for a pipe: u32 length, MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD_BYTES, "little") + data


async def read_frame(reader: asyncio.StreamReader | None, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Return the next message of a pipe; None once the other side has closed it, even within a message."""
    assert reader
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        return decoder.decode(await reader.readexactly(size))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None

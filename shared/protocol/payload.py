"""Payload bytes: a small header, then every tensor's bytes, aligned.

    F P <major> 0 | u32 header length | MessagePack [codec, [[name, dtype, shape], ...]] | blobs

Every blob starts at a multiple of `ALIGN`, so that reading it is a view of the buffer and never a copy.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec
import xxhash

from shared.errors import WireError
from shared.protocol.messages import Blob, Payload

MAJOR = 1
ALIGN = 64
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 8
ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1}

_PREFIX = struct.Struct("<2sBBI")
_Header = tuple[str, list[tuple[str, str, tuple[int, ...]]]]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)


def pack(payload: Payload) -> list[memoryview]:
    """Encode a payload as byte parts in order, without copying tensors."""
    entries = [(name, blob.dtype, blob.shape) for name, blob in payload.blobs.items()]
    header = _encoder.encode((payload.codec, entries))
    parts = [memoryview(_PREFIX.pack(b"FP", MAJOR, 0, len(header)) + header)]
    size = parts[0].nbytes
    for blob in payload.blobs.values():
        if gap := -size % ALIGN:
            parts.append(memoryview(bytes(gap)))
        parts.append(blob.data)
        size += gap + blob.data.nbytes
    return parts


def unpack(data: memoryview) -> Payload:
    """Decode a payload whose blobs are views of `data`.

    Raises:
        WireError: The bytes are not a payload, or shapes and sizes do not add up to exactly `data`.
    """
    codec, entries, position = _header(data)
    blobs: dict[str, Blob] = {}
    for name, dtype, shape in entries:
        if dtype not in ITEM_BYTES:
            raise WireError(f"tensor {name!r} has unknown dtype {dtype!r}", reason="dtype")
        if len(shape) > MAX_DIMENSIONS or any(extent < 0 for extent in shape) or name in blobs:
            raise WireError(f"tensor {name!r} is listed twice or has shape {shape}", reason="shape")
        position += -position % ALIGN
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        if end > data.nbytes:
            raise WireError(f"tensor {name!r} ends at {end}, the payload at {data.nbytes}", reason="truncated")
        blobs[name] = Blob(dtype, shape, data[position:end])
        position = end
    if position != data.nbytes:
        raise WireError(f"payload of {data.nbytes} bytes, its tensors end at {position}", reason="truncated")
    return Payload(codec=codec, blobs=blobs)


def _header(data: memoryview) -> tuple[str, list[tuple[str, str, tuple[int, ...]]], int]:
    if data.nbytes < _PREFIX.size:
        raise WireError(f"payload of {data.nbytes} bytes", reason="truncated")
    magic, major, _, length = _PREFIX.unpack_from(data)
    if magic != b"FP":
        raise WireError("not a payload")
    if major != MAJOR:
        raise WireError(f"payload version {major}, this side reads {MAJOR}", reason="version")
    if length > MAX_HEADER_BYTES or _PREFIX.size + length > data.nbytes:
        raise WireError(f"payload header of {length} bytes in {data.nbytes}", reason="truncated")
    try:
        codec, entries = _decoder.decode(data[_PREFIX.size : _PREFIX.size + length])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"undecodable payload header: {error}") from error
    return codec, entries, _PREFIX.size + length


def digest(parts: Iterable[memoryview]) -> bytes:
    """Compute the XXH3-128 of the parts' bytes, 16 bytes."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class Scattered:
    """Byte parts that are read as if they were contiguous."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part.cast("B") for part in parts if part.nbytes]
        self._ends = list(accumulate(part.nbytes for part in self._parts))
        self.size = self._ends[-1] if self._ends else 0

    def read(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield views of `length` bytes from `offset` in all, fewer at the end."""
        end = min(offset + length, self.size)
        place = bisect_right(self._ends, offset)
        while offset < end:
            part, start = self._parts[place], self._ends[place] - self._parts[place].nbytes
            view = part[offset - start : end - start]
            yield view
            offset += view.nbytes
            place += 1

    def join(self, into: bytearray | None = None) -> memoryview:
        """Copy all parts into one buffer, reusing `into` if it is long enough."""
        if into is None or len(into) < self.size:
            into = bytearray(self.size)
        run = memoryview(into)[: self.size]
        offset = 0
        for part in self._parts:
            run[offset : offset + part.nbytes] = part
            offset += part.nbytes
        return run

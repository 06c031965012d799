"""A payload as bytes: written without copying tensors, read as views, and never believed."""

from __future__ import annotations

import math
import struct
import tracemalloc
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import Blob, Payload
from shared.protocol.payload import ALIGN, ITEM_BYTES, MAX_HEADER_BYTES, Scattered

MANY = settings(max_examples=150, derandomize=True, deadline=None)
PREFIX = struct.Struct("<2sBBI")


@st.composite
def blobs(draw) -> Blob:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return Blob(dtype, shape, memoryview(draw(st.binary(min_size=size, max_size=size))))


PAYLOADS = st.builds(
    Payload, codec=st.text(max_size=8), blobs=st.dictionaries(st.text(max_size=8), blobs(), max_size=5)
)


def raw(entries: object, body: bytes = b"", *, codec: object = "dense", prefix: bytes = b"FP\x01\x00") -> memoryview:
    """Return a payload with a header of our choice."""
    header = msgspec.msgpack.encode((codec, entries))
    data = prefix + struct.pack("<I", len(header)) + header
    return memoryview(data + bytes(-len(data) % ALIGN) * bool(body) + body)


def refused(data: memoryview) -> str:
    with pytest.raises(WireError) as caught:
        payload.unpack(data)
    return caught.value.reason


@MANY
@given(PAYLOADS)
def test_comes_back_as_it_was(original):
    """Names, dtypes, shapes, bytes and order; the tensors' bytes start at multiples of 64."""
    whole = memoryview(b"".join(payload.pack(original)))
    back = payload.unpack(whole)
    assert back == original
    assert list(back.blobs) == list(original.blobs)
    assert back.num_bytes == original.num_bytes


def test_no_tensor_is_copied_either_way():
    """Packing hands out the given buffer itself; what is unpacked changes when the buffer changes."""
    tensor = bytearray(b"\1" * 400)
    parts = payload.pack(Payload(codec="dense", blobs={"w": Blob("u8", (400,), memoryview(tensor))}))
    assert parts[-1].obj is tensor
    run = bytearray(b"".join(parts))
    blob = payload.unpack(memoryview(run)).blobs["w"]
    assert blob.data.obj is run
    run[-1] = 77
    assert blob.data[-1] == 77


def test_blobs_are_aligned():
    """Every start is a multiple of 64 also behind blobs of odd lengths, which are not padded at the end."""
    given_blobs = {str(size): Blob("u8", (size,), memoryview(bytes([size]) * size)) for size in (1, 63, 64, 65, 3)}
    whole = b"".join(payload.pack(Payload(codec="dense", blobs=given_blobs)))
    for size in (1, 63, 64, 65, 3):
        assert whole.find(bytes([size]) * size, ALIGN) % ALIGN == 0
    assert whole.endswith(b"\3\3\3")


def test_digest_is_of_the_bytes_not_of_the_parts():
    assert payload.digest([memoryview(b"ab"), memoryview(b"c")]) == payload.digest([memoryview(b"abc")])
    assert payload.digest([memoryview(b"abc")]).hex() == "06b05ab6733a618578af5f94892f3950"  # XXH3-128 of "abc"
    assert len(payload.digest([])) == 16


@pytest.mark.parametrize(
    ("entries", "body", "reason"),
    [
        ([("w", "f32", (2,))], b"\0" * 7, "truncated"),
        ([("w", "f32", (2,))], b"\0" * 9, "truncated"),
        ([("w", "f32", ())], b"", "truncated"),
        ([], b"\0", "truncated"),
        ([("w", "c64", (1,))], b"\0" * 8, "dtype"),
        ([("w", "", (1,))], b"\0" * 8, "dtype"),
        ([("w", "u8", (-1,))], b"", "shape"),
        ([("w", "u8", (-2, -2))], b"\0" * 4, "shape"),
        ([("w", "u8", (1,) * 9)], b"\0", "shape"),
        ([("w", "u8", (1,)), ("w", "u8", (1,))], b"\0" * 65, "shape"),
        ([("w", "u8", (1 << 63, 1 << 63, 1 << 63))], b"\0", "truncated"),
        ([("w", "u8", (1.0,))], b"\0", "malformed"),
        ([("w", "u8")], b"\0", "malformed"),
        ([["w", "u8", None]], b"\0", "malformed"),
        ({"w": 1}, b"", "malformed"),
    ],
)
def test_a_header_that_does_not_add_up(entries, body, reason):
    assert refused(raw(entries, body)) == reason


def test_prefix():
    """Another kind of bytes, another version, a header longer than the payload or than we read."""
    assert refused(raw([], prefix=b"FC\x01\x00")) == "malformed"
    assert refused(raw([], prefix=b"FP\x02\x00")) == "version"
    assert refused(memoryview(b"FP\x01")) == "truncated"
    assert refused(memoryview(b"")) == "truncated"
    assert refused(memoryview(PREFIX.pack(b"FP", 1, 0, 100) + bytes(99))) == "truncated"
    assert (
        refused(memoryview(PREFIX.pack(b"FP", 1, 0, MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1))) == "truncated"
    )


def test_truncated_anywhere():
    whole = b"".join(payload.pack(Payload(codec="dense", blobs={"w": Blob("f32", (3,), memoryview(bytes(12)))})))
    reasons = {refused(memoryview(whole[:length])) for length in range(len(whole))}
    assert reasons == {"truncated"}


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.binary(max_size=120))
def test_random_header(header):
    """Whatever the header's bytes are, the answer is a payload or a WireError."""
    data = PREFIX.pack(b"FP", 1, 0, len(header)) + header
    with suppress(WireError):
        assert isinstance(payload.unpack(memoryview(data)), Payload)


@pytest.mark.parametrize(
    "entries",
    [
        [("w", "f64", (1 << 40,))],
        [("w", "f64", ((1 << 64) - 1,) * 8)],
        [(str(index), "f32", (1 << 31, 1 << 31)) for index in range(100)],
    ],
    ids=["tebibytes", "overflow", "many"],
)
def test_a_claimed_size_allocates_nothing(entries):
    data = raw(entries)
    tracemalloc.start()
    try:
        assert refused(data) == "truncated"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff"])
def test_a_claimed_count_allocates_nothing(length):
    """Of tensors, and of dimensions of one tensor."""
    entry = msgspec.msgpack.encode(("w", "f32", ()))
    for header in (b"\x92\xa5dense" + length, b"\x92\xa5dense\x91" + entry[:-1] + length):
        tracemalloc.start()
        try:
            assert refused(memoryview(PREFIX.pack(b"FP", 1, 0, len(header)) + header)) == "malformed"
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@MANY
@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 200), st.integers(0, 200))
def test_scattered_reads_like_the_concatenation(parts, offset, length):
    """Any slice, also across parts, over empty ones, and beyond the end."""
    whole = b"".join(parts)
    scattered = Scattered([memoryview(part) for part in parts])
    assert scattered.size == len(whole)
    views = list(scattered.read(offset, length))
    assert b"".join(views) == whole[offset : offset + length]
    assert all(view.nbytes for view in views)
    assert scattered.join() == whole


def test_scattered_hands_out_views_and_reuses_a_buffer():
    """Reading copies nothing; joining writes into a long enough buffer and leaves what is behind it."""
    source, buffer = bytearray(b"abcdef"), bytearray(b"........")
    scattered = Scattered([memoryview(source)[:2], memoryview(source)[2:].cast("h")])
    assert all(view.obj is source for view in scattered.read(1, 4))
    joined = scattered.join(buffer)
    assert joined.obj is buffer
    assert buffer == b"abcdef.."
    assert scattered.join(bytearray(3)) == b"abcdef"

"""A payload as bytes: written without copying tensors, read as views, and never believed."""

from __future__ import annotations

import math
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol import payload
from shared.protocol.messages import Blob, Payload
from shared.protocol.payload import ALIGN, ITEM_BYTES, Scattered

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

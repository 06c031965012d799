"""What holds of every reader of foreign bytes, whatever they are; `make fuzz` asks the same a million times each."""

from __future__ import annotations

import struct
import tracemalloc
from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.journal.records import AnyRecord
from shared.errors import WireError
from shared.protocol import payload, wire
from tests.fuzz.readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_accepted(name):
    """Else the damage would be done to what nobody reads anyhow."""
    words = [READERS[name].read(data) for data in READERS[name].seeds()]
    assert len(words) > 1
    assert all("accepted" in one for one in words), words


def test_every_record_of_a_journal_is_a_seed():
    """Messages are seeds from the golden file, which names every one of them."""
    words = {READERS["journal"].read(data) for data in READERS["journal"].seeds()}
    assert words == {f"accepted: {kind.__name__}" for kind in get_args(AnyRecord)}


@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_by_name_or_leaves_something_that_can_be_read(name):
    """No crash, and no error but the one that means it; what is accepted can be given back. See tests/fuzz."""
    reader = READERS[name]
    seeds = reader.seeds()

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(seed=st.sampled_from(range(len(seeds))), way=st.integers(0, (1 << 32) - 1), rounds=st.integers(1, 3))
    def check(seed, way, rounds):
        data, random = seeds[seed], Random(way)
        for _ in range(rounds):
            data = reader.mutate(data, random)
        assert reader.read(data)

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(data=st.binary(max_size=200), seed=st.sampled_from(seeds), kept=st.integers(0, 60))
    def check_noise(data, seed, kept):
        assert reader.read(seed[:kept] + data)

    check()
    check_noise()


def map_of(count, value):
    return {f"{index:x}": value for index in range(count)}


READING = {"value": 0.0, "unit": "", "source": "", "quality": "measured", "at": 0.0}
STATED = {"device": "a", "at": 0.0}
UPDATE = {"run": "a", "round": 1, "device": "a", "params": None}
LARGEST = {
    "ranges": {"type": "Want", "digest": bytes(16), "frame_bytes": 1024, "ranges": [(0, 1)] * 340_000},
    "readings": {"type": "Report", **STATED, "readings": map_of(16_000, READING)},
    "absences": {"type": "Report", **STATED, "absent": map_of(60_000, {"lack": "busy"})},
    "facts": {"type": "Report", **STATED, "facts": map_of(150_000, "")},
    "metrics": {"type": "Update", **UPDATE, "metrics": map_of(150_000, 0)},
    "unknown": {"type": "Leave", "digest": bytes(16), "news": [[]] * 1_000_000},
}


@pytest.mark.parametrize("name", LARGEST)
def test_a_message_takes_no_more_memory_than_stated(name):
    """The largest ones that there may be, of the smallest parts: at most 32 bytes for each of theirs, so 32 MiB."""
    data = wire.encode(msgspec.Raw(msgspec.msgpack.encode(LARGEST[name])))
    assert 900_000 < len(data) <= wire.MAX_MESSAGE_BYTES
    assert allocated(wire.decode, data) < READERS["wire"].bytes_per_byte * len(data)


def test_a_payload_takes_no_more_memory_than_stated():
    """Of tensors as many as a header may name: at most 64 bytes for each of the header's, none for the tensors' own."""
    count = 85_000
    header = msgspec.msgpack.encode(("dense", [(f"{index:x}", "u8", ()) for index in range(count)]))
    assert 850_000 < len(header) <= payload.MAX_HEADER_BYTES
    data = bytearray(struct.pack("<2sBBI", b"FP", 1, 0, len(header)) + header)
    data += bytes(-len(data) % payload.ALIGN + payload.ALIGN * (count - 1) + 1)
    assert allocated(payload.unpack, memoryview(data)) < READERS["payload"].bytes_per_byte * len(header)


def allocated(read, data) -> int:
    """Return the most bytes that reading has in use at once."""
    tracemalloc.start()
    try:
        read(data)
    except WireError:
        pytest.fail("this was to be read")
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak

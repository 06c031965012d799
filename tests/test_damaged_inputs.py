"""Damaged inputs for every parser of foreign bytes, from one table.

The table is `tests.fuzz.readers.READERS`; `make fuzz` asks the same a million times each. Every reader gives something
that can be used, or the one error that means it, by which its caller knows what to do.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from random import Random
from typing import get_args

import msgspec
import pytest

from edge_server.journal.records import AnyRecord
from shared.protocol import payload, wire
from tests.fuzz.readers import READERS, Reader

FOREIGN = {
    "nothing": b"",
    "a zero": b"\0",
    "zeros": bytes(500),
    "ones": b"\xff" * 500,
    "text": b"hello\n",
    "a page": b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>\n",
    "an archive": b"PK\3\4" + bytes(60),
    "a compressed file": b"\x1f\x8b\x08" + bytes(60),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "deep": b"[" * 50_000,
}


def tried(reader: Reader) -> Iterator[tuple[bytes, int]]:
    """Yield good inputs, each with places of it: all of them, or many at even distances."""
    seeds = reader.seeds()
    for seed in seeds[:: -(-len(seeds) // 4)]:
        for place in range(0, len(seed), -(-len(seed) // reader.places)):
            yield seed, place


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_accepted(name):
    """Else the damage would be done to what nobody reads anyhow."""
    words = [READERS[name].read(data) for data in READERS[name].seeds()]
    assert words
    assert all("accepted" in one for one in words), words


def test_every_record_of_a_journal_is_a_seed():
    """Messages are seeds from the golden file, which names every one of them."""
    words = {READERS["journal"].read(data) for data in READERS["journal"].seeds()}
    assert words == {f"accepted: {kind.__name__}" for kind in get_args(AnyRecord)}


@pytest.mark.parametrize("name", READERS)
def test_a_cut_anywhere_is_noticed(name):
    """As a torn write or a peer that died leaves it; also with zeros in the place of what is lost, and a byte more."""
    reader = READERS[name]
    for seed, length in tried(reader):
        cut, filled = reader.read(seed[:length]), reader.read(seed[:length].ljust(len(seed), b"\0"))
        assert "accepted" not in cut or not reader.notices, (length, cut)
        assert "accepted" not in filled or reader.notices != "all" or not any(seed[length:]), (length, filled)
    for seed in reader.seeds():
        longer = reader.read(seed + b"\0")
        assert "accepted" not in longer or reader.notices in ("", "cut"), longer


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_in_every_byte_is_noticed_or_leaves_something_that_can_be_read(name):
    reader = READERS[name]
    for seed, place in tried(reader):
        rotten = bytearray(seed)
        rotten[place] ^= 1 << place % 8
        words = reader.read(bytes(rotten))
        assert "accepted" not in words or reader.notices != "all", (place, words)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.is_choosy])
def test_what_is_of_another_kind_is_refused(name):
    """Also what every other reader takes."""
    reader = READERS[name]
    others = {other: one.seeds()[-1] for other, one in READERS.items() if other != name}
    for kind, data in (FOREIGN | others).items():
        words = reader.read(data)
        assert "accepted" not in words or data in reader.seeds(), (kind, words)


CASES = [(name, damage) for name, reader in READERS.items() for damage in reader.damages]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=[f"{name}: {damage}"[:60] for name, damage in CASES])
def test_damage_is_refused_by_its_name_and_takes_no_memory(name, damage):
    """Whatever lengths, counts and sizes it claims."""
    reader = READERS[name]
    data, expected = reader.damages[damage]
    words, peak = measured(reader.read, data)
    assert words.startswith(expected)
    assert peak <= reader.bytes_besides + reader.bytes_per_byte * len(data)


@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_by_name_or_leaves_something_that_can_be_read(name):
    """No crash, and no error but the one that means it; what is accepted can be given back. See tests/fuzz."""
    reader, random = READERS[name], Random(name)
    seeds = reader.seeds()
    for _ in range(60):
        data = random.choice(seeds)
        for _ in range(random.randint(1, 3)):
            data = reader.mutate(data, random)
        assert reader.read(data)
    for _ in range(60):
        noise = random.randbytes(random.randint(0, 200))
        assert reader.read(random.choice(seeds)[: random.randint(0, 60)] + noise)


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
    assert measured(wire.decode, data)[1] < READERS["wire"].bytes_per_byte * len(data)


def test_a_payload_takes_no_more_memory_than_stated():
    """Of tensors as many as a header may name: at most 64 bytes for each of the header's, none for the tensors' own."""
    count = 85_000
    header = msgspec.msgpack.encode(("dense", [(f"{index:x}", "u8", ()) for index in range(count)]))
    assert 850_000 < len(header) <= payload.MAX_HEADER_BYTES
    data = bytearray(struct.pack("<2sBBI", b"FP", 1, 0, len(header)) + header)
    data += bytes(-len(data) % payload.ALIGN + payload.ALIGN * (count - 1) + 1)
    assert measured(payload.unpack, memoryview(data))[1] < READERS["payload"].bytes_per_byte * len(header)


def measured(read: Callable[[bytes], object], data: bytes | memoryview) -> tuple[str, int]:
    """Return what came of it, and the most bytes that reading has in use at once."""
    tracemalloc.start()
    try:
        words = read(data)
        return str(words), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

"""Payloads of the codecs that send leaves in a form of their own: damage to entries, and to what they say."""

from __future__ import annotations

import struct
from random import Random

import msgspec
import torch

from shared.codecs import CODECS
from shared.errors import WireError
from shared.protocol import payload
from shared.tensors.tree import Tree
from tests.fuzz import payloads
from tests.fuzz.payloads import PREFIX, whole
from tests.fuzz.trees import cut_and_spliced

READERS = {name: CODECS[name]() for name in ("quantize", "masked", "chain")}
TREES: list[Tree] = [
    {},
    {"w": torch.tensor([[0.5, 0.0, -2.0], [0.0, 0.0, 1.0]]), "b": torch.ones(3), "n": torch.tensor(5)},
    {
        "h": torch.arange(8, dtype=torch.float16).view(2, 2, 2),
        "e": torch.empty(0, 4),
        "d": torch.eye(3, dtype=torch.float64),
    },
]
SENDERS = [
    *(CODECS["quantize"](bits=bits, scope=scope) for bits, scope in ((8, "leaf"), (3, "tree"), (1, "leaf"))),
    *(CODECS["masked"](), CODECS["chain"](quantize_bits=4), CODECS["chain"](quantize_scope="tree")),
]
BYTES_PER_BYTE = 80
"""What of tensors may come of a payload, for every byte of it: a bit can stand for a float64."""


def seeds() -> list[bytes]:
    """Return every tree as every codec sends it."""
    return [whole(codec.encode(tree, None)[0]) for codec in SENDERS for tree in TREES]


def read(data: bytes) -> str:
    """Leaves or a WireError; leaves are no more than the bytes may stand for, and can be sent again by any codec."""
    try:
        packed = payload.unpack(memoryview(bytearray(data)))
        if packed.codec not in READERS:
            return f"codec: {packed.codec}"
        coded = READERS[packed.codec].decode(packed)
    except WireError as error:
        return f"{error.reason}: {error.__cause__ or error}"
    assert sum(leaf.nbytes for leaf in coded.tree.values()) <= BYTES_PER_BYTE * len(data)
    assert payload.unpack(memoryview(whole(packed))) == packed
    again = READERS["masked"].decode(READERS["masked"].encode(coded.tree, None)[0]).tree
    assert list(again) == list(coded.tree)
    assert all(torch.equal(again[key].nan_to_num(), leaf.nan_to_num()) for key, leaf in coded.tree.items())
    return f"accepted: {len(coded.tree)} tensors"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the header, or what an entry says of itself, while its bytes still fit; or the bytes behind the header."""
    if random.random() < 0.3:
        return payloads.mutate(data, random)
    try:
        _, length = PREFIX.unpack_from(data)
        codec, entries = msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + length])
        packed = payload.unpack(memoryview(bytearray(data)))
        bodies = {name: bytes(blob.data) for name, blob in packed.blobs.items()}
        if random.random() < 0.4:
            name = random.choice(list(bodies))
            bodies[name] = cut_and_spliced(bodies[name], random)
        for _ in range(random.choice((0, 1, 1, 2))):
            _reshape(random.choice(entries), random)
        return _packed(codec, entries, bodies)
    except (WireError, LookupError, ValueError, TypeError, OverflowError, struct.error):
        return cut_and_spliced(data, random)


def _reshape(entry: list, random: Random) -> None:
    """Rename an entry, or say something else of its dtype or its shape."""
    name, _, shape = entry
    match random.randrange(4):
        case 0:
            entry[0] = random.choice(["=", "~", "", "dense/", "quantize/", "quantize/~"]) + name[1:]
        case 1:
            entry[1] = random.choice(list(payload.ITEM_BYTES))
        case _:
            place = random.randrange(len(shape) + 1)
            extent = random.choice([0, 1, 2, 3, 4, 8, 17, 1 << 31, 1 << 62, (1 << 64) - 1])
            entry[2] = [*shape[:place], extent, *shape[place + random.randrange(2) :]]


def _packed(codec: str, entries: list, bodies: dict[str, bytes]) -> bytes:
    """Return a payload of these entries, each with its body, cut or filled up to what its shape says."""
    header = msgspec.msgpack.encode([codec, entries])
    data = PREFIX.pack(b"FP\x01\0", len(header)) + header
    for (_, dtype, shape), body in zip(entries, bodies.values(), strict=False):
        size = payload.ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        data += bytes(-len(data) % payload.ALIGN) + body[:size].ljust(min(size, 4096), b"\0")
    return data

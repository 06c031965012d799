"""Fuzz inputs: codec payloads with damaged entries and contents."""

from __future__ import annotations

import math
import struct
from random import Random

import msgspec
import torch

from shared.codecs import CODECS
from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import Blob, Payload
from shared.tensors.tree import Tree
from tests.fuzz import payloads
from tests.fuzz.payloads import PREFIX, whole
from tests.fuzz.trees import cut_and_spliced

READERS = {name: CODECS[name]() for name in ("quantize", "float16", "masked", "topk", "chain")}
HALVED = CODECS["chain"](codecs="masked,float16")
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
    *(CODECS["float16"](), HALVED),
    *(CODECS["topk"](share=share) for share in (0.1, 0.3, 1.0)),
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
        is_halved = packed.codec == "chain" and any(name.startswith("float16/") for name in packed.blobs)
        codec = HALVED if is_halved else READERS[packed.codec]
        if packed.codec == "topk":  # whoever decodes it asks first
            most = BYTES_PER_BYTE * len(data)
            if (stands_for := sum(leaf.nbytes for leaf in codec.outline(packed).values())) > most:
                return f"oversized: {stands_for} bytes"
        coded = codec.decode(packed)
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
            entry[0] = random.choice(["=", "~", "", "dense/", "quantize/", "quantize/~", "float16/~"]) + name[1:]
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


def _blob(dtype: str, shape: tuple[int, ...], data: bytes = b"") -> Blob:
    return Blob(dtype, shape, memoryview(bytearray(data)))


def _floats(*numbers: float) -> bytes:
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


def _places(*numbers: int) -> bytes:
    return torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()


QUANTIZED = [  # a leaf of 3 x 5 values and 4 bits, 10 bytes of codes
    ({"bits": _blob("u8", (0, 0))}, "malformed"),
    ({"bits": _blob("u8", (0, 17))}, "malformed"),
    ({"bits": _blob("u8", (0, (1 << 64) - 1))}, "shape"),
    ({"bits": _blob("u8", (2, 4), bytes(8))}, "malformed"),
    ({"bits": _blob("u8", (0, 5))}, "shape"),
    ({"bits": _blob("u8", (0,))}, "malformed"),
    ({"bits": None}, "malformed"),
    ({"codes": _blob("u8", (9,), bytes(9))}, "shape"),
    ({"codes": _blob("u8", (11,), bytes(11))}, "shape"),
    ({"codes": _blob("i8", (10,), bytes(10))}, "malformed"),
    ({"codes": _blob("u8", (10,), bytes(9) + b"\xff")}, "malformed"),
    ({"codes": None}, "malformed"),
    ({"range": _blob("f32", (1, 2), _floats(0, math.inf))}, "not-finite"),
    ({"range": _blob("f32", (1, 2), _floats(math.nan, 1))}, "not-finite"),
    ({"range": _blob("f32", (1, 2), _floats(0, math.nan))}, "not-finite"),
    ({"range": _blob("f32", (1, 2), _floats(-1, 1))}, "malformed"),
    ({"range": _blob("f32", (1, 2), _floats(2, 1))}, "malformed"),
    ({"range": _blob("f32", (2, 2), _floats(0, 1, 0, 1))}, "shape"),
    ({"range": _blob("f32", (0, 2))}, "shape"),
    ({"range": _blob("f32", (2, 1), _floats(0, 1))}, "shape"),
    ({"~w": None}, "shape"),
    ({"~w": _blob("i32", (0, 3, 5))}, "dtype"),
    ({"~w": _blob("c64", (0, 3, 5))}, "dtype"),
    ({"~w": _blob("f32", (0, 3, 6))}, "shape"),
    ({"~w": _blob("f32", (1, 3, 5), bytes(60))}, "shape"),
    ({"~w": _blob("f32", (), bytes(4))}, "shape"),
    ({"~w": _blob("f32", (0, 1 << 62, 1 << 62))}, "shape"),
    ({"~v": _blob("f32", (0, (1 << 64) - 1, 0))}, "shape"),
    ({"=w": _blob("f32", (1,), bytes(4))}, "shape"),
    ({"more": _blob("u8", (0,))}, "malformed"),
    ({"": _blob("u8", (0,))}, "malformed"),
]
MASKED = [  # a leaf of 2 x 5 values, of which 3 are not zero
    ({"bitmap": None}, "malformed"),
    ({"bitmap": _blob("u8", (1,), b"\x09")}, "shape"),
    ({"bitmap": _blob("u8", (3,), b"\x09\x02\0")}, "shape"),
    ({"bitmap": _blob("u8", (2, 1), b"\x09\x02")}, "malformed"),
    ({"bitmap": _blob("u8", (2,), b"\x09\x06")}, "malformed"),  # a bit behind the tenth
    ({"bitmap": _blob("u8", (2,), b"\x0b\x02")}, "shape"),  # four bits
    ({"bitmap": _blob("u8", (2,), b"\x01\x02")}, "shape"),  # two
    ({"dense/w": None}, "unknown-tensor"),
    ({"dense/w": _blob("f32", (4,), bytes(16))}, "shape"),
    ({"dense/w": _blob("f32", (3, 1), bytes(12))}, "shape"),
    ({"dense/w": _blob("f16", (3,), bytes(6))}, "dtype"),
    ({"dense/w": _blob("i32", (3,), bytes(12))}, "dtype"),
    ({"dense/v": _blob("f32", (3,), bytes(12))}, "unknown-tensor"),
    ({"dense/~w": _blob("f32", (0, 3))}, "unknown-tensor"),
    ({"sparse/w": _blob("f32", (3,), bytes(12))}, "malformed"),
    ({"~w": None}, "shape"),
    ({"~w": _blob("f32", (0, 2, 9))}, "shape"),
    ({"~w": _blob("f32", (0, 1 << 62, 1 << 62))}, "shape"),
    ({"~w": _blob("f64", (0, 2, 5))}, "dtype"),
    ({"~w": _blob("bool", (0, 2, 5))}, "dtype"),
    ({"=w": _blob("f32", (2, 5), bytes(40))}, "shape"),
]
TOPK = [  # a leaf of 20 x 10 values, of which those at 5, 40 and 199 are there: by 5 low bits and an end of each gap
    ({"values": None}, "malformed"),
    ({"values": _blob("f32", (2,), bytes(8))}, "shape"),
    ({"values": _blob("f32", (3, 1), bytes(12))}, "malformed"),
    ({"values": _blob("f16", (3,), bytes(6))}, "malformed"),
    ({"gaps": None}, "shape"),
    ({"gaps": _blob("u8", (0,))}, "malformed"),
    ({"gaps": _blob("u8", (1,), b"\x05")}, "shape"),
    ({"gaps": _blob("u8", (4,), b"\x20\0\0\x07")}, "malformed"),  # 32 low bits
    ({"gaps": _blob("u8", (4,), b"\x05\0\x80\x07")}, "malformed"),  # a bit behind the low ones
    ({"gaps": _blob("u8", (4,), b"\x05\0\0\x0f")}, "shape"),  # four ends
    ({"gaps": _blob("u8", (4,), b"\x05\0\0\x03")}, "shape"),  # two
    ({"gaps": _blob("u8", (5,), b"\x05\0\0\x07\0")}, "shape"),
    ({"gaps": _blob("u8", (5,), b"\x07\xff\xff\x1f\x07")}, "shape"),  # beyond the last
    ({"gaps": _blob("u8", (14,), b"\x1f" + bytes(12) + b"\x0e")}, "shape"),
    ({"gaps": _blob("i8", (4,), b"\x05\0\0\x07")}, "malformed"),
    ({"bitmap": _blob("u8", (25,), bytes(25))}, "malformed"),
    ({"gaps": None, "bitmap": _blob("u8", (25,), bytes(25))}, "shape"),
    ({"gaps": None, "bitmap": _blob("u8", (24,), b"\x07" + bytes(23))}, "shape"),
    ({"gaps": None, "positions": _blob("i32", (3,), _places(5, 40, 200))}, "shape"),
    ({"gaps": None, "positions": _blob("i32", (3,), _places(5, 5, 199))}, "shape"),
    ({"gaps": None, "positions": _blob("i32", (3,), _places(-1, 5, 199))}, "shape"),
    ({"gaps": None, "positions": _blob("i32", (2,), _places(5, 199))}, "shape"),
    ({"gaps": None, "positions": _blob("f32", (3,), bytes(12))}, "malformed"),
    ({"more": _blob("u8", (0,))}, "malformed"),
    ({"~w": None}, "shape"),
    ({"~w": _blob("f32", (0, 20, 9))}, "shape"),
    ({"~w": _blob("f64", (0, 20, 10))}, "malformed"),
    ({"~w": _blob("f32", (0, 1 << 40))}, "oversized"),
    ({"~w": _blob("f32", (0, 1 << 62, 1 << 62))}, "shape"),
    ({"=w": _blob("f32", (20, 10), bytes(800))}, "shape"),
]
"""What of a payload is replaced, or taken away, and why it is refused."""


def damages() -> dict[str, tuple[bytes, str]]:
    """Return payloads whose sizes, counts, dtypes, bits or ranges do not fit one another."""
    sparse = torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 3.0]])
    spread = torch.zeros(20, 10).index_put_((torch.tensor([0, 4, 19]), torch.tensor([5, 0, 9])), torch.ones(3))
    sent = {
        "quantize": (CODECS["quantize"](bits=4).encode({"w": torch.ones(3, 5)}, None)[0], QUANTIZED),
        "masked": (CODECS["masked"]().encode({"w": sparse}, None)[0], MASKED),
        "topk": (CODECS["topk"](share=0.02).encode({"w": spread}, None)[0], TOPK),
    }
    found = {}
    for codec, (good, cases) in sent.items():
        for blobs, reason in cases:
            both = good.blobs | {name: blob for name, blob in blobs.items() if blob}
            left = {name: blob for name, blob in both.items() if blobs.get(name, True)}
            what = ", ".join(
                f"{name}: {blob and (blob.dtype, blob.shape, bytes(blob.data))}" for name, blob in blobs.items()
            )
            found[f"{codec}, {what}"] = whole(Payload(codec=codec, blobs=left)), reason
    ones, float16 = CODECS["masked"]().encode({"w": torch.ones(3)}, None)[0].blobs, torch.ones(2, dtype=torch.float16)
    twice = Payload(codec="masked", blobs={"~w": _blob("f32", (0, 0, 2)), **ones})
    small = CODECS["quantize"]().encode({"w": float16}, None)[0].blobs
    large = Payload(codec="quantize", blobs=small | {"range": _blob("f32", (1, 2), _floats(0, 1e5))})
    found["a leaf as it is and in an outline of no value"] = whole(twice), "shape"
    found["a range that the dtype cannot hold"] = whole(large), "not-finite"
    return found

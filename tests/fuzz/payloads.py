"""Payloads: the header and what it says of the bytes behind it, up to tensors of the dense codec."""

from __future__ import annotations

import math
import struct
from random import Random

import msgspec
import torch

from shared.codecs.dense import dense
from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import Payload
from tests.fuzz.trees import cut_and_spliced, damaged
from tests.fuzz.wires import golden

DENSE = dense()
PREFIX = struct.Struct("<4sI")
BODY_BYTES = 4096
TREES = [
    {},
    {"w": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.zeros(3)},
    {"n": torch.tensor(5), "mask": torch.tensor([True, False]), "empty": torch.empty(0, 4)},
    {str(dtype): torch.ones(2, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.uint8)},
]


def whole(packed: Payload) -> bytes:
    """Return a payload as one run of bytes."""
    return b"".join(payload.pack(packed))


def seeds() -> list[bytes]:
    """Return payloads of several dtypes, of nothing, and the golden one."""
    return [golden()["payload"], *(whole(DENSE.encode(tree, None)[0]) for tree in TREES)]


def read(data: bytes) -> str:
    """Tensors or a WireError; tensors are views of the bytes, and written they are read the same."""
    run = bytearray(data)
    try:
        packed = payload.unpack(memoryview(run))
        tree = DENSE.decode(packed).tree
    except WireError as error:
        return f"{error.reason}: {error.__cause__ or error}"
    assert payload.unpack(memoryview(whole(packed))) == packed
    assert whole(DENSE.encode(tree, None)[0]) == whole(packed)
    start = torch.frombuffer(run, dtype=torch.uint8).data_ptr()
    assert all(start <= leaf.data_ptr() < start + len(run) for leaf in tree.values() if leaf.numel())
    return f"accepted: {len(tree)} tensors"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the header, and fit the bytes behind it to what it now says; or damage the bytes."""
    try:
        magic, length = PREFIX.unpack_from(data)
        header = msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + length])
        if random.random() < 0.3:
            return cut_and_spliced(data, random)
        header = damaged(header, random)
        encoded = msgspec.msgpack.encode(header)
        body = data[PREFIX.size + length :]
        if random.random() < 0.7:
            body = random.randbytes(_body_bytes(header, PREFIX.size + len(encoded)))
        return PREFIX.pack(magic, len(encoded)) + encoded + body
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error):
        return cut_and_spliced(data, random)


def _body_bytes(header: object, position: int) -> int:
    """Return how many bytes a header promises behind itself, some of them at most; raises TypeError if it is none."""
    start = position
    for _, dtype, shape in header[1]:  # type: ignore[index]
        position += -position % payload.ALIGN + math.prod(shape) * payload.ITEM_BYTES.get(dtype, 1)
    return max(0, min(position - start, BODY_BYTES))

"""Encode and decode everything that travels, as a process of either side: `exchange.py encode|decode FROM TO`.

The only file of these tests that imports what lies inside the packages, by the name it has on whichever side runs it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec.inspect as shape
import torch

PLACES = {
    "chunks": ("shared.transfer.frames", "shared.chunks"),
    "codecs": ("shared.codecs",),
    "messages": ("shared.protocol.messages", "shared.messages"),
    "payload": ("shared.protocol.payload", "shared.payload"),
    "registry": ("shared.registry",),
    "wire": ("shared.protocol.wire", "shared.wire"),
}
"""Where a module may be, the newest place first."""

CODECS: dict[str, dict[str, Any]] = {
    "dense": {},
    "masked": {},
    "quantize": {"bits": 4, "scope": "tree"},
    "chain": {"quantize_bits": 8, "quantize_scope": "tree"},
}
VALUES = {
    shape.NoneType: None,
    shape.BoolType: True,
    shape.IntType: 3,
    shape.FloatType: 0.5,
    shape.StrType: "text",
    shape.BytesType: bytes(range(16)),
}
"""Allowed wherever a field has that type: 0.5 is a momentum and a learning rate."""


TOGETHER: dict[str, dict[str, Any]] = {"ObjectiveSpec": {"kind": "segmentation", "loss": ""}}
"""Fields of structs whose values must suit each other."""


def module(name: str) -> ModuleType:
    """Import a module from where it is on this side."""
    for place in PLACES[name]:
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"{name}: at none of {PLACES[name]}; add its new place")


def filled(kind: shape.Type) -> Any:
    """Return a value of a type with every field given."""
    match kind:
        case shape.StructType():
            given = {one.name: filled(one.type) for one in kind.fields}
            value = kind.cls(**given | TOGETHER.get(kind.cls.__name__, {}))
        case shape.UnionType():
            value = filled(next(one for one in kind.types if not isinstance(one, shape.NoneType)))
        case shape.LiteralType():
            value = kind.values[-1]
        case shape.ListType():
            value = [filled(kind.item_type)]
        case shape.VarTupleType():
            value = (filled(kind.item_type),)
        case shape.TupleType():
            value = tuple(filled(one) for one in kind.item_types)
        case shape.DictType():
            kinds = kind.value_type.types if isinstance(kind.value_type, shape.UnionType) else (kind.value_type,)
            value = {f"key{index}": filled(one) for index, one in enumerate(kinds)}
        case _:
            value = VALUES[type(kind)]
    return value


def bare(cls: type) -> Any:
    """Return a message with nothing but what it needs."""
    described = shape.type_info(cls)
    assert isinstance(described, shape.StructType)
    return cls(**{one.name: filled(one.type) for one in described.fields if one.required})


def tree() -> dict[str, torch.Tensor]:
    """Return tensors of several types and shapes, one with zeros, one without values, one without dimensions."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.rand((6, 5), generator=generator) - 0.5
    return {
        "0.weight": torch.where(weight.abs() < 0.2, torch.zeros(()), weight),
        "0.bias": torch.rand(6, generator=generator),
        "1.weight": torch.rand((3, 2, 3, 3), generator=generator),
        "1.steps": torch.tensor(12),
        "2.empty": torch.empty((0, 4)),
    }


def built(codec: str) -> Any:
    """Build a codec with the options of these tests."""
    spec = module("messages").Spec(name=codec, options=CODECS[codec])
    return module("registry").build(module("codecs").CODECS, spec, "codec")


def encode(to: Path) -> None:
    """Write every message, full and bare, every codec's payload, and the frames of one."""
    wire, payload, chunks = module("wire"), module("payload"), module("chunks")
    for kind in get_args(wire.AnyMessage):
        for name, message in (("full", filled(shape.type_info(kind))), ("bare", bare(kind))):
            (to / f"{kind.__name__}.{name}.message").write_bytes(wire.encode(message))
    for codec in CODECS:
        parts = payload.pack(built(codec).encode(tree(), None)[0])
        (to / f"{codec}.payload").write_bytes(b"".join(parts))
    data = b"".join(payload.pack(built("dense").encode({"w": torch.arange(600.0)}, None)[0]))
    digest = payload.digest([memoryview(data)])
    transfer = module("messages").Transfer(digest=digest, size=len(data), frame_bytes=1024)
    for block in range(transfer.blocks):
        piece = memoryview(data)[1024 * block : 1024 * (block + 1)]
        (to / f"{block}.frame").write_bytes(chunks.encode(transfer, block, [piece]))


def decode(from_: Path, to: Path) -> None:
    """Read what lies in a folder; write messages encoded again, and what payloads and frames hold as JSON.

    A kind of message that this side does not know yet is passed over: nobody sends it one.
    """
    wire, payload, chunks = module("wire"), module("payload"), module("chunks")
    kinds = {kind.__name__ for kind in get_args(wire.AnyMessage)}
    for path in from_.iterdir():
        data = path.read_bytes()
        match path.suffix:
            case ".message" if path.name.partition(".")[0] not in kinds:
                continue
            case ".message":
                (to / path.name).write_bytes(wire.encode(wire.decode(data)))
            case ".payload":
                coded = built(path.stem).decode(payload.unpack(memoryview(data)))
                found = {"tree": shown(coded.tree), "coverage": shown(coded.coverage)}
                (to / path.name).write_text(json.dumps(found))
            case ".frame":
                frame = chunks.decode(data)
                found = {"digest": frame.digest.hex(), "start": frame.start, "count": frame.count}
                (to / path.name).write_text(json.dumps({**found, "data": bytes(frame.data).hex()}))


def shown(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as JSON takes them, bit for bit."""
    return {
        key: [str(leaf.dtype), list(leaf.shape), leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes().hex()]
        for key, leaf in tensors.items()
    }


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    {"encode": encode, "decode": decode}[what](*map(Path, folders))

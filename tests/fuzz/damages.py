"""Damage with a name, by parser: bytes, and the reason that they are refused for."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import msgspec
import torch
import xxhash
from safetensors.torch import save as as_safetensors

from shared.protocol import wire
from shared.protocol.measurements import Absent, Reading
from shared.protocol.messages import Ack, Report, Transfer, Want
from shared.protocol.payload import ALIGN, MAX_HEADER_BYTES
from shared.transfer import frames
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES

Damages = Mapping[str, tuple[bytes, str]]

REPORT = wire.encode(
    Report(
        device="pi-4",
        at=1.0,
        readings={"cpu": Reading(value=1.8e9, unit="Hz", source="cpufreq", quality="measured", at=0.5)},
        absent={"power": Absent(lack="not_present", cause="no such rail")},
    )
)
WANT = wire.encode(Want(digest=bytes(16), frame_bytes=1024, ranges=[]))
ACK = wire.encode(Ack(run="r", round=1, device="d", verdict="late"))
LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdd\x10\x00\x00\x00", b"\xdc\xff\xff")
"""Of arrays: four thousand million items, 268 million, 65,535."""


def _deep(opening: bytes) -> bytes:
    return opening * ((wire.MAX_MESSAGE_BYTES - 200) // len(opening)) + b"\xc0"


def _status(**fields: object) -> bytes:
    known = {"type": "Status", "device": "pi-4", "session": 1, "instance": "x", "online": True} | fields
    return b"FM\x01" + msgspec.msgpack.encode({key: value for key, value in known.items() if value is not ...})


def _report_at(at: float) -> bytes:
    place = REPORT.index(msgspec.msgpack.encode(1.0))
    return REPORT[:place] + msgspec.msgpack.encode(at) + REPORT[place + 9 :]


def of_messages() -> Damages:
    """Return messages that are none."""
    list_at = WANT.index(b"\x90")
    wrong = [{"session": one} for one in ("three", 1.5, None, True)]
    wrong += [{"device": b"pi"}, {"online": 1}, {"type": "Nobody"}, {"type": 7}]
    nested = {"arrays": _deep(b"\x91"), "maps": _deep(b"\x81\xa1a")}
    malformed = {
        **{f"of no time at all: {at}": _report_at(at) for at in (math.inf, -math.inf, math.nan)},
        **{f"nested {kind}": b"FM\x01" + deep for kind, deep in nested.items()},
        **{
            f"nested {kind} in a field that nobody knows": ACK[:3] + bytes([ACK[3] + 1]) + ACK[4:] + b"\xa4news" + deep
            for kind, deep in nested.items()
        },
        **{f"a length of {one.hex()}": WANT[:list_at] + one + WANT[list_at + 1 :] for one in LENGTHS},
        **{f"a field of a wrong type: {fields}": _status(**fields) for fields in wrong},
        "a missing field": _status(instance=...),
        "bad text": REPORT.replace(b"pi-4", b"p\xff\xfe4"),
    }
    return {name: (data, "malformed") for name, data in malformed.items()} | {
        **{f"version {major}": (b"FM" + bytes([major]) + b"\xff" * 10, "version") for major in (0, 2, 255)},
        "a byte behind it": (WANT + b"\0", "malformed"),
        "a byte above the limit": (ACK[:3] + bytes(wire.MAX_MESSAGE_BYTES - 2), "oversized"),
    }


def of_frames() -> Damages:
    """Return frames that are none."""
    head = struct.pack("<2sBB16sII", b"FC", 2, 0, bytes(16), 0, 1)
    large = Transfer(digest=bytes(16), size=MAX_FRAME_BYTES + 1024, frame_bytes=MAX_FRAME_BYTES)
    longest = frames.encode(large, 0, [memoryview(bytes(MAX_FRAME_BYTES))])
    return {
        "another version with a right checksum": (head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)), "version"),
        "a byte longer than any": (longest + b"\0", "oversized"),
        "a header without its end": (longest[: HEADER_BYTES - 1], "truncated"),
        "without its end": (longest[:-1], "checksum"),
        "a bit of its magic": (bytes([longest[0] ^ 1]) + longest[1:], "malformed"),
        "a bit of its version": (longest[:2] + bytes([longest[2] ^ 1]) + longest[3:], "version"),
        "a bit of its digest": (longest[:9] + bytes([longest[9] ^ 1]) + longest[10:], "checksum"),
        "a bit of its data": (longest[:-1] + bytes([longest[-1] ^ 1]), "checksum"),
    }


def _payload(entries: object, body: bytes = b"", prefix: bytes = b"FP\x01\x00") -> bytes:
    """Return a payload with a header of our choice."""
    header = msgspec.msgpack.encode(("dense", entries))
    data = prefix + struct.pack("<I", len(header)) + header
    return data + bytes(-len(data) % ALIGN) * bool(body) + body


def _headed(header: bytes) -> bytes:
    return b"FP\x01\x00" + struct.pack("<I", len(header)) + header


def of_payloads() -> Damages:
    """Return payloads whose header does not add up, or claims what nobody should allocate for."""
    entry = msgspec.msgpack.encode(("w", "f32", ()))
    overlong = struct.pack("<2sBBI", b"FP", 1, 0, MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1)
    return {
        "a byte less than its tensor": (_payload([("w", "f32", (2,))], bytes(7)), "truncated"),
        "a byte more than its tensor": (_payload([("w", "f32", (2,))], bytes(9)), "truncated"),
        "no bytes of a scalar": (_payload([("w", "f32", ())]), "truncated"),
        "bytes of nothing": (_payload([], b"\0"), "truncated"),
        "complex numbers": (_payload([("w", "c64", (1,))], bytes(8)), "dtype"),
        "no dtype": (_payload([("w", "", (1,))], bytes(8)), "dtype"),
        "a negative extent": (_payload([("w", "u8", (-1,))]), "shape"),
        "two negative extents": (_payload([("w", "u8", (-2, -2))], bytes(4)), "shape"),
        "nine dimensions": (_payload([("w", "u8", (1,) * 9)], b"\0"), "shape"),
        "a name twice": (_payload([("w", "u8", (1,)), ("w", "u8", (1,))], bytes(65)), "shape"),
        "extents that overflow": (_payload([("w", "u8", (1 << 63, 1 << 63, 1 << 63))], b"\0"), "truncated"),
        "half an extent": (_payload([("w", "u8", (1.0,))], b"\0"), "malformed"),
        "no shape": (_payload([("w", "u8")], b"\0"), "malformed"),
        "a shape that is none": (_payload([["w", "u8", None]], b"\0"), "malformed"),
        "a map of tensors": (_payload({"w": 1}), "malformed"),
        "another magic": (_payload([], prefix=b"FC\x01\x00"), "malformed"),
        "another version": (_payload([], prefix=b"FP\x02\x00"), "version"),
        "half a prefix": (b"FP\x01", "truncated"),
        "a header longer than all": (struct.pack("<2sBBI", b"FP", 1, 0, 100) + bytes(99), "truncated"),
        "a header longer than is read": (overlong, "truncated"),
        "tebibytes": (_payload([("w", "f64", (1 << 40,))]), "truncated"),
        "eight extents of 64 bits": (_payload([("w", "f64", ((1 << 64) - 1,) * 8)]), "truncated"),
        "many large ones": (_payload([(str(n), "f32", (1 << 31, 1 << 31)) for n in range(100)]), "truncated"),
        **{f"{one.hex()} tensors": (_headed(b"\x92\xa5dense" + one), "malformed") for one in LENGTHS},
        **{f"{one.hex()} extents": (_headed(b"\x92\xa5dense\x91" + entry[:-1] + one), "malformed") for one in LENGTHS},
    }


def of_tensor_files() -> Damages:
    """Return a file that somebody else has written, without a digest."""
    return {"safetensors of others": (as_safetensors({"w": torch.ones(2)}), "corrupt")}


def of_records() -> Damages:
    """Return a record of a later version."""
    return {"a kind that nobody knows": (b'{"type":"Later"}', "corrupt: Invalid value 'Later'")}


def of_figures() -> Damages:
    """Return files of figures that are nested beyond all measure, or too large to be meant."""
    return {
        "nested lists": (b"[" * 100_000, "refused"),
        "nested maps": (b'{"a":' * 100_000, "refused"),
        "mebibytes of nothing": (b" " * (5 << 20), "refused"),
    }

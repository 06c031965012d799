"""Messages: every one of them, read by `wire.decode`."""

from __future__ import annotations

import ast
from pathlib import Path
from random import Random

import msgspec

from shared.errors import WireError
from shared.protocol import wire
from tests.fuzz.trees import cut_and_spliced, damaged

GOLDEN = Path(__file__).parents[1] / "shared" / "protocol" / "golden_wire.txt"


def golden() -> dict[str, bytes]:
    """Return the golden bytes by name."""
    found: dict[str, bytes] = {}
    name = ""
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("    "):
            found[name] = found.get(name, b"") + ast.literal_eval(line.strip())
        elif not line.startswith("#"):
            name = line.removesuffix(":")
    return found


def seeds() -> list[bytes]:
    """Return one of every message, and one with a key twice."""
    messages = [data for data in golden().values() if wire.is_message(data)]
    ack = next(data for data in messages if b"\xa3Ack" in data)
    return [*messages, ack[:3] + bytes([ack[3] + 1]) + ack[4:] + b"\xa5round\x07"]


def read(data: bytes) -> str:
    """A message or a WireError; what is read is written so that it is read the same."""
    try:
        message = wire.decode(data)
    except WireError as error:
        return f"{error.reason}: {error.__cause__ or error}"
    again = wire.encode(message)
    assert wire.encode(wire.decode(again)) == again, message
    return f"accepted: {type(message).__name__}"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the map that a message is, or its bytes."""
    if random.random() < 0.4:
        return cut_and_spliced(data, random)
    try:
        tree = msgspec.msgpack.decode(data[3:])
        return data[:3] + msgspec.msgpack.encode(damaged(tree, random))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return cut_and_spliced(data, random)

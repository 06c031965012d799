"""Damage to nested values, so that what is fuzzed gets behind the parser: a field changed, lost, doubled, misplaced."""

from __future__ import annotations

import math
from random import Random
from typing import Any

INTERESTING: list[Any] = [
    *(None, True, False, "", "x", "\0", "a/../b", "é\U0001f600", "x" * 300, b"", b"\xff" * 16, b"x" * 64),
    *(0, 1, -1, 127, 128, 255, 256, 65_535, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan, [], {}, [[]], {"": {}}, [0] * 40, [[0, 1]] * 9),
]


def damaged(tree: Any, random: Random) -> Any:
    """Return the tree with a few changes at random places; the given one is not touched."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        tree = _changed(tree, random)
    return tree


def _changed(tree: Any, random: Random) -> Any:
    """Go down at random and change what is there."""
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        return _in_map(tree, random)
    if isinstance(tree, list | tuple) and tree and random.random() < 0.9:
        return _in_list(list(tree), random)
    return _leaf(tree, random)


def _in_map(tree: dict[Any, Any], random: Random) -> dict[Any, Any]:
    key = random.choice(list(tree))
    match random.randrange(12):
        case 0:
            return {name: value for name, value in tree.items() if name != key}
        case 1:
            return tree | {random.choice(["", "news", "x" * 40, f"{key}s"]): _leaf(tree[key], random)}
        case 2:
            return tree | {random.choice(list(tree)): tree[key]}
        case _:
            return tree | {key: _changed(tree[key], random)}


def _in_list(tree: list[Any], random: Random) -> list[Any]:
    place = random.randrange(len(tree))
    match random.randrange(10):
        case 0:
            return tree[:place] + tree[place + 1 :]
        case 1:
            return tree[:place] + tree[place : place + 1] * random.choice((2, 3, 9)) + tree[place + 1 :]
        case 2:
            random.shuffle(tree)
            return tree
        case _:
            return [*tree[:place], _changed(tree[place], random), *tree[place + 1 :]]


def _leaf(value: Any, random: Random) -> Any:
    """Return another value: often of the same type, so that the check behind the type's is reached."""
    match value:
        case bool():
            return random.choice([not value, *INTERESTING])
        case int() if random.random() < 0.6:
            return random.choice([value + 1, value - 1, 2 * value, -value, random.getrandbits(random.randrange(1, 64))])
        case float() if random.random() < 0.6:
            return random.choice(
                [-value, value * 1e9, value + 1, 1 / (value or 1), random.random(), random.getrandbits(4)]
            )
        case str() if random.random() < 0.6:
            return random.choice([value + "x", value[1:], value.upper(), value * 3, value[::-1], f"{value}\n"])
        case bytes() if random.random() < 0.6:
            return random.choice([value[1:], value + b"\0", bytes(reversed(value)), random.randbytes(len(value))])
    return random.choice(INTERESTING)


def cut_and_spliced(data: bytes, random: Random) -> bytes:
    """Return bytes with a few of them changed, lost, moved or doubled: what is left of them where no tree can be."""
    damaged_bytes = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        place = random.randrange(len(damaged_bytes) + 1)
        match random.randrange(5):
            case 0:
                damaged_bytes[place : place + 1] = random.randbytes(1)
            case 1:
                del damaged_bytes[place : place + random.choice((1, 2, 4, 16))]
            case 2:
                damaged_bytes[place:place] = random.choice((b"\0", b"\xff" * 4, b"\xc1", random.randbytes(8)))
            case 3:
                damaged_bytes[place:place] = damaged_bytes[: random.randrange(1, 40)]
            case _:
                damaged_bytes[place : place + 4] = random.getrandbits(32).to_bytes(4, "little")
    return bytes(damaged_bytes)

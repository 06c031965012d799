"""Codec interface: trees of tensors to bytes and back, with explicit memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.tree import Tree

Memory: TypeAlias = Tree | None
"""Values that an encoder has not sent yet (error feedback); None before the first call."""

MOST_BYTES = 1 << 30
"""Maximum decoded size of a payload of unknown shapes; larger payloads may decode to their own size."""


@dataclass(frozen=True)
class Coded:
    """Decoded values, and the received coordinates of leaves sent in part."""

    tree: Tree
    coverage: dict[str, Tensor]


@dataclass(frozen=True)
class Codec:
    """A pair of pure functions.

    Attributes:
        encode: (tree, memory) -> (payload, next memory). The payload may share the tree's storage.
        decode: payload -> values and coverage; leaves may be views of the payload's bytes. Raises WireError.
        outline: payload -> the tree that decoding would return, without storage: a few bytes that decode to an
            unexpected number of values are rejected before they take memory. Raises WireError.
    """

    encode: Callable[[Tree, Memory], tuple[Payload, Memory]]
    decode: Callable[[Payload], Coded]
    outline: Callable[[Payload], Tree]


def decode_bounded(codec: Codec, payload: Payload) -> Coded:
    """Decode a payload whose shapes are not known in advance.

    Raises:
        WireError: The decoded size exceeds both `MOST_BYTES` and the payload's size; or the codec raises it.
    """
    size = sum(leaf.nbytes for leaf in codec.outline(payload).values())
    if size > max(MOST_BYTES, payload.num_bytes):
        raise WireError(f"{payload.num_bytes} bytes would decode to {size}", reason="oversized")
    return codec.decode(payload)

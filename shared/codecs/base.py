"""Codec interface: trees of tensors to bytes and back, with explicit memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from shared.errors import WireError
from shared.protocol.messages import Blob, Payload
from shared.tensors.tree import Tree, tensor_bytes

Memory: TypeAlias = Tree | None
"""Values that an encoder has not sent yet (error feedback); None before the first call."""

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_MOST = 1 << 59
"""Maximum product of nonzero extents: torch counts bytes in 63 bits."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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


def to_blob(tensor: Tensor) -> Blob:
    """Return a tensor's bytes; a view if it is in C order."""
    return Blob(_NAMES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor))


def from_blob(blob: Blob) -> Tensor:
    """Return a tensor that is a view of the blob's bytes.

    Raises:
        WireError: The bytes cannot be a tensor of that dtype and shape.
    """
    dtype = _possible_dtype(blob.dtype, blob.shape)
    try:
        flat = torch.frombuffer(blob.data, dtype=dtype) if blob.data.nbytes else torch.empty(0, dtype=dtype)
        return flat.view(blob.shape)
    except (RuntimeError, TypeError, ValueError) as error:  # TypeError: an extent beyond 64 bits
        raise WireError(f"{blob.data.nbytes} bytes do not fit {blob.dtype}{blob.shape}", reason="shape") from error


def outline_blob(blob: Blob) -> Tensor:
    """Return the tensor of `from_blob` without storage; the number of bytes is not checked.

    Raises:
        WireError: No tensor has that dtype and shape.
    """
    return _cached_outline(blob.dtype, blob.shape)


@lru_cache(maxsize=1024)
def _cached_outline(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Cache outlines, which are the same for all devices and take longer to make than to use."""
    possible = _possible_dtype(dtype, shape)
    try:
        return torch.empty(shape, dtype=possible, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"no tensor has the shape {shape}", reason="shape") from error


def _possible_dtype(dtype: str, shape: tuple[int, ...]) -> torch.dtype:
    if dtype not in DTYPES:
        raise WireError(f"unknown dtype {dtype!r}", reason="dtype")
    if min(shape, default=0) < 0 or math.prod(filter(None, shape)) > _MOST:  # torch would infer an extent of -1
        raise WireError(f"no tensor has the shape {shape}", reason="shape")
    return DTYPES[dtype]


def decode_bounded(codec: Codec, payload: Payload) -> Coded:
    """Decode a payload whose shapes are not known in advance.

    Raises:
        WireError: The decoded size exceeds both `MOST_BYTES` and the payload's size; or the codec raises it.
    """
    size = sum(leaf.nbytes for leaf in codec.outline(payload).values())
    if size > max(MOST_BYTES, payload.num_bytes):
        raise WireError(f"{payload.num_bytes} bytes would decode to {size}", reason="oversized")
    return codec.decode(payload)

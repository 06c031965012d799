"""The codec seam: a tree of tensors to bytes and back, with explicit memory."""

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
"""What an encoder did not send last time (error feedback); None before the first call."""

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
"""Extents, but for zeros, multiply to no more, or torch could not count their bytes in 63 bits."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 1 << 30
"""What a payload may stand for where nothing but itself says how much; one that holds more than that may as well."""


@dataclass(frozen=True)
class Coded:
    """What a codec gives back: the values, and for leaves sent in part, which coordinates came."""

    tree: Tree
    coverage: dict[str, Tensor]


@dataclass(frozen=True)
class Codec:
    """A pair of pure functions.

    Attributes:
        encode: (tree, memory) -> (payload, next memory). The payload may share the tree's storage.
        decode: payload -> values and coverage; leaves may be views of the payload's bytes. Raises WireError.
        outline: payload -> the tree that decoding gives, if it does, without storage: so a few bytes that stand for
            more numbers than anybody expects are refused before they take memory. Raises WireError.
    """

    encode: Callable[[Tree, Memory], tuple[Payload, Memory]]
    decode: Callable[[Payload], Coded]
    outline: Callable[[Payload], Tree]


def to_blob(tensor: Tensor) -> Blob:
    """Return a tensor's bytes; a view where it lies in C order."""
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
        raise WireError(f"{blob.data.nbytes} bytes are no {blob.dtype}{blob.shape}", reason="shape") from error


def outline_blob(blob: Blob) -> Tensor:
    """Return the tensor that `from_blob` gives, without storage; whether the bytes are so many is not asked.

    Raises:
        WireError: There is no tensor of that dtype and shape.
    """
    return _outlined(blob.dtype, blob.shape)


@lru_cache(maxsize=1024)
def _outlined(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Make it once for all that are alike, as those of all devices are: that takes longer than what it is asked for."""
    possible = _possible_dtype(dtype, shape)
    try:
        return torch.empty(shape, dtype=possible, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"no tensor has the shape {shape}", reason="shape") from error


def _possible_dtype(dtype: str, shape: tuple[int, ...]) -> torch.dtype:
    if dtype not in DTYPES:
        raise WireError(f"unknown dtype {dtype!r}", reason="dtype")
    if min(shape, default=0) < 0 or math.prod(filter(None, shape)) > _MOST:  # -1 would be torch's to choose
        raise WireError(f"no tensor has the shape {shape}", reason="shape")
    return DTYPES[dtype]


def decode_bounded(codec: Codec, payload: Payload) -> Coded:
    """Decode what came where nothing tells the shapes that it must have.

    Raises:
        WireError: It stands for more than `MOST_BYTES` and more than it holds; or the codec raises it.
    """
    size = sum(leaf.nbytes for leaf in codec.outline(payload).values())
    if size > max(MOST_BYTES, payload.num_bytes):
        raise WireError(f"{payload.num_bytes} bytes that stand for {size}", reason="oversized")
    return codec.decode(payload)

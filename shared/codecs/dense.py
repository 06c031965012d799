"""Lossless codec: every leaf unchanged.

Other codecs use its bytes of a single tensor.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from shared.codecs.base import Codec, Coded, Memory
from shared.errors import WireError
from shared.protocol.messages import Blob, Payload
from shared.tensors.tree import Tree, tensor_bytes

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


def _encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
    return Payload(codec="dense", blobs={key: to_blob(leaf) for key, leaf in tree.items()}), memory


def _decode(payload: Payload) -> Coded:
    _require_dense(payload)
    return Coded({key: from_blob(blob) for key, blob in payload.blobs.items()}, {})


def _outline(payload: Payload) -> Tree:
    _require_dense(payload)
    return {key: outline_blob(blob) for key, blob in payload.blobs.items()}


def _require_dense(payload: Payload) -> None:
    if payload.codec != "dense":
        raise WireError(f"payload of codec {payload.codec!r}, expected dense", reason="codec")


def dense() -> Codec:
    """Build the codec; a payload is exactly the bytes of its tensors."""
    return Codec(_encode, _decode, _outline)

"""Feature payloads by numpy alone, for serving processes without torch.

The bytes are those of the codecs `dense`, `float16` and `quantize` of `shared.codecs`, which read them unchanged; the
output of these with default options is readable here. A payload holds one tensor of float32 values. `dense` and
`float16` give identical bytes. `quantize` rounds to the nearest knot where that codec draws one of two: it draws so
that sums over many devices are unbiased, but nothing is summed over a single request, and half the error is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec
from shared.protocol.messages import Blob, Payload, Spec
from shared.protocol.payload import MAX_DIMENSIONS
from shared.tensors.bits import pack, packed_bytes, unpack

Features: TypeAlias = NDArray[np.float32]

CODECS = "dense", "float16", "quantize"
BITS, MAX_BITS = 8, 16
_HIGHEST, _MOST_EXPONENT = 15, 126
"""Powers of two of `float16`: above all scaled magnitudes; largest scale."""
_F32, _F16 = np.dtype("<f4"), np.dtype("<f2")


def encode_features(name: str, features: Features, codec: Spec) -> Payload:
    """Return features as a payload.

    Args:
        features: Of shape (B, ...) and 2 to 7 dimensions; finite.
        codec: One of `CODECS`; `quantize` takes `bits`, 1 to `MAX_BITS`, by default 8.
    """
    values = np.ascontiguousarray(features, dtype=_F32)
    if codec.name == "dense":
        return Payload(codec="dense", blobs={name: _blob("f32", values)})
    blobs = {f"~{name}": Blob("f32", (0, *values.shape), memoryview(b""))}
    if codec.name == "float16":
        exponent = _exponent(values)
        blobs["exponents"] = _blob("i8", np.array([exponent], np.int8))
        blobs["values"] = _blob("f16", (values.reshape(-1) * np.float32(2.0**exponent)).astype(_F16))
        return Payload(codec="float16", blobs=blobs)
    bits = int(codec.options.get("bits", BITS))
    codes, low, high = _quantize(values.reshape(-1), bits)
    blobs["bits"] = Blob("u8", (0, bits), memoryview(b""))
    blobs["range"] = _blob("f32", np.array([[low, high]], _F32))
    blobs["codes"] = _blob("u8", pack(codes, bits + 1))
    return Payload(codec="quantize", blobs=blobs)


def _blob(dtype: str, values: NDArray[np.generic]) -> Blob:
    return Blob(dtype, values.shape, values.reshape(-1).view(np.uint8).data)


def _exponent(values: Features) -> int:
    """Return the power of two that scales the largest magnitude below 2^15; 0 where there is none."""
    high = float(np.abs(values).max(initial=0.0))
    return max(-_MOST_EXPONENT, min(_HIGHEST - math.frexp(high)[1], _MOST_EXPONENT)) if high else 0


def _quantize(values: Features, bits: int) -> tuple[NDArray[np.int32], float, float]:
    """Return the codes, of shape (N,), and the least and the greatest magnitude."""
    magnitudes = np.abs(values)
    low = float(magnitudes.min(initial=math.inf)) if values.size else 0.0
    high = float(magnitudes.max(initial=0.0))
    share = (magnitudes.astype(np.float64) - low) / (high - low) if high > low else np.zeros(values.shape)
    steps = share * ((1 << bits) - 1)
    return np.rint(steps).astype(np.int32) + ((values < 0).astype(np.int32) << bits), low, high


def decode_features(payload: Payload, expected: TensorSpec, most_values: int) -> Features:
    """Return the features of a payload, of shape (B, ...), possibly views of its bytes.

    Args:
        expected: Name, dtype and shape (behind the batch) of the graph's input.
        most_values: Maximum number of values over all examples, checked before memory is allocated.

    Raises:
        WireError: The codec or tensor does not match, or a value is not finite.
    """
    if payload.codec not in CODECS:
        raise WireError(f"features by codec {payload.codec!r}, supported are {', '.join(CODECS)}", reason="codec")
    head = expected.name if payload.codec == "dense" else f"~{expected.name}"
    outline = payload.blobs.get(head)
    if outline is None:
        raise WireError(f"features without {expected.name!r}, which the graph takes", reason="shape")
    if outline.dtype != "f32" or expected.dtype != "float32":
        raise WireError(f"features of {outline.dtype}, and the graph takes {expected.dtype}", reason="dtype")
    shape = outline.shape if payload.codec == "dense" else outline.shape[1:]
    if payload.codec != "dense" and outline.shape[:1] != (0,):
        raise WireError(f"tensor {expected.name!r} has no outline {outline.shape}", reason="shape")
    _require_shape(shape, expected, most_values)
    values = _read_values(payload, head, math.prod(shape))
    if not np.isfinite(values).all():
        raise WireError("features are not finite numbers", reason="not-finite")
    return values.reshape(shape)


def _require_shape(shape: tuple[int, ...], expected: TensorSpec, most_values: int) -> None:
    if len(shape) >= MAX_DIMENSIONS or not shape or shape[0] < 1 or shape[1:] != expected.shape[1:]:
        shape_text = " x ".join(["batch", *map(str, expected.shape[1:])])
        raise WireError(f"features of shape {shape}, and the graph takes {shape_text}", reason="shape")
    if math.prod(shape) > most_values:
        raise WireError(f"features of {math.prod(shape)} values, at most {most_values} are allowed", reason="oversized")


def _codec_blobs(payload: Payload, head: str, kinds: Mapping[str, tuple[str, int]]) -> dict[str, Blob]:
    blobs = {name: blob for name, blob in payload.blobs.items() if name != head}
    if {name: (blob.dtype, len(blob.shape)) for name, blob in blobs.items()} != kinds:
        raise WireError(f"entries {sorted(blobs)}, expected {sorted(kinds)}", reason="shape")
    return blobs


def _read_values(payload: Payload, head: str, count: int) -> Features:
    match payload.codec:
        case "dense":  # the payload's own sizes were checked
            return _read_dense(payload, head)
        case "float16":
            return _read_float16(payload, head, count)
        case _:
            return _read_quantized(payload, head, count)


def _read_dense(payload: Payload, head: str) -> Features:
    _codec_blobs(payload, head, {})
    return np.frombuffer(payload.blobs[head].data, _F32)


def _read_float16(payload: Payload, head: str, count: int) -> Features:
    blobs = _codec_blobs(payload, head, {"exponents": ("i8", 1), "values": ("f16", 1)})
    exponents = np.frombuffer(blobs["exponents"].data, np.int8)
    if blobs["values"].shape != (count,) or len(exponents) != 1:
        raise WireError(f"{blobs['values'].shape} values and {len(exponents)} exponents for {count}", reason="shape")
    if abs(exponent := int(exponents[0])) > _MOST_EXPONENT:
        raise WireError(f"exponent of {exponent}", reason="shape")
    return np.frombuffer(blobs["values"].data, _F16).astype(np.float32) * np.float32(2.0**-exponent)


def _read_quantized(payload: Payload, head: str, count: int) -> Features:
    blobs = _codec_blobs(payload, head, {"bits": ("u8", 2), "range": ("f32", 2), "codes": ("u8", 1)})
    none, bits = blobs["bits"].shape
    if none or not 1 <= bits <= MAX_BITS:
        raise WireError(f"{bits} bits per magnitude, at most {MAX_BITS} are allowed", reason="shape")
    if blobs["range"].shape != (1, 2) or blobs["codes"].shape != (packed_bytes(count, bits + 1),):
        raise WireError(
            f"ranges {blobs['range'].shape}, {blobs['codes'].shape} bytes of codes for {count}", reason="shape"
        )
    low, high = map(float, np.frombuffer(blobs["range"].data, _F32))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise WireError("features are not finite numbers", reason="not-finite")
    if not 0 <= low <= high:
        raise WireError(f"magnitudes from {low} to {high}", reason="shape")
    codes = unpack(np.frombuffer(blobs["codes"].data, np.uint8), count, bits + 1).astype(np.int32)
    places = (codes & ((1 << bits) - 1)).astype(np.float64)
    magnitudes = (places / ((1 << bits) - 1) * (high - low) + low).astype(np.float32)
    return np.where(codes >> bits > 0, -magnitudes, magnitudes)

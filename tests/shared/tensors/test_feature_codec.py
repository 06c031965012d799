"""Features encoded without torch: the bytes that torch's codecs write and read, and nothing else is taken."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shared.codecs import CODECS
from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec
from shared.protocol.messages import Blob, Payload, Spec
from shared.protocol.payload import Scattered, pack, unpack
from shared.tensors import feature_codec

EXPECTED = TensorSpec(name="features", dtype="float32", shape=(-1, 3, 5))
MOST = 1 << 16
SPECS = [Spec(name="dense"), Spec(name="float16"), *(Spec(name="quantize", options={"bits": q}) for q in (1, 8, 9, 16))]


def some(count: int = 4, scale: float = 1.0) -> np.ndarray:
    """Return features of both signs, with zeros among them, as behind no ReLU and behind one."""
    drawn = np.random.default_rng(7).normal(size=(count, 3, 5)).astype(np.float32) * np.float32(scale)
    drawn[0, 0] = 0
    return drawn


def sent(features: np.ndarray, spec: Spec) -> Payload:
    """Return what arrives."""
    return unpack(Scattered(pack(feature_codec.encode_features("features", features, spec))).join())


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_what_is_written_is_read_by_torch_and_here_alike(spec, scale):
    """To the bit; `quantize` within half a step of what went in, `float16` within its 11 bits."""
    features = some(scale=scale)
    payload = sent(features, spec)
    by_torch = CODECS[spec.name]().decode(payload).tree["features"].numpy()
    found = feature_codec.decode_features(payload, EXPECTED, MOST)
    assert found.dtype == np.float32
    assert np.array_equal(found, by_torch)
    largest = np.abs(features).max()
    bits = spec.options.get("bits", 8)
    most = {"dense": 0.0, "float16": largest * 2**-11, "quantize": largest / (2**bits - 1) * 0.5001}[spec.name]
    assert np.abs(found - features).max() <= most


@pytest.mark.parametrize("name", ["dense", "float16"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_the_bytes_are_those_of_the_codec(name, scale):
    features = some(scale=scale)
    theirs, _ = CODECS[name]().encode({"features": torch.from_numpy(features)}, None)
    ours = feature_codec.encode_features("features", features, Spec(name=name))
    assert b"".join(pack(ours)) == b"".join(pack(theirs))


@pytest.mark.parametrize("bits", [1, 4, 8, 12])
def test_what_torch_quantizes_is_read(bits):
    payload, _ = CODECS["quantize"](bits=bits).encode({"features": torch.from_numpy(some())}, None)
    expected = CODECS["quantize"]().decode(payload).tree["features"].numpy()
    assert np.array_equal(feature_codec.decode_features(payload, EXPECTED, MOST), expected)


@pytest.mark.parametrize("value", [0.0, 2.5, -2.5])
def test_features_that_are_all_alike(value):
    """One magnitude: a range of no width."""
    features = np.full((1, 3, 5), value, np.float32)
    for spec in SPECS:
        assert np.array_equal(feature_codec.decode_features(sent(features, spec), EXPECTED, MOST), features)


def blob(dtype: str, shape: tuple[int, ...], data: bytes = b"") -> Blob:
    return Blob(dtype, shape, memoryview(data))


DENSE = blob("f32", (2, 3, 5), bytes(120))
OUTLINE = blob("f32", (0, 2, 3, 5))
HALF = {"~features": OUTLINE, "exponents": blob("i8", (1,), b"\0"), "values": blob("f16", (30,), bytes(60))}
CODED = {
    "~features": OUTLINE,
    "bits": blob("u8", (0, 1)),
    "range": blob("f32", (1, 2), bytes(8)),
    "codes": blob("u8", (8,), bytes(8)),
}
NAN = np.full((2, 3, 5), np.nan, np.float32).tobytes()


@pytest.mark.parametrize(
    ("codec", "blobs", "reason"),
    [
        ("masked", {"features": DENSE}, "codec"),
        ("dense", {"other": DENSE}, "shape"),
        ("dense", {"features": DENSE, "other": DENSE}, "shape"),
        ("dense", {"features": blob("f64", (2, 3, 5), bytes(240))}, "dtype"),
        ("dense", {"features": blob("f32", (2, 5, 3), bytes(120))}, "shape"),
        ("dense", {"features": blob("f32", (0, 3, 5))}, "shape"),
        ("dense", {"features": blob("f32", ())}, "shape"),
        ("dense", {"features": blob("f32", (2, 3, 5), NAN)}, "not-finite"),
        ("float16", HALF | {"values": blob("f16", (29,), bytes(58))}, "shape"),
        ("float16", HALF | {"exponents": blob("i8", (2,), bytes(2))}, "shape"),
        ("float16", HALF | {"exponents": blob("i8", (1,), b"\x7f")}, "shape"),
        ("float16", HALF | {"values": blob("f16", (30,), b"\0\x7c" * 30)}, "not-finite"),
        ("float16", HALF | {"~features": blob("f32", (1, 2, 3, 5))}, "shape"),
        ("float16", HALF | {"~features": blob("f32", (0, 1 << 40, 3, 5))}, "oversized"),
        ("quantize", CODED | {"bits": blob("u8", (0, 17))}, "shape"),
        ("quantize", CODED | {"codes": blob("u8", (9,), bytes(9))}, "shape"),
        ("quantize", CODED | {"codes": blob("u8", (8,), b"\xff" * 8)}, "malformed"),
        ("quantize", CODED | {"range": blob("f32", (1, 2), b"\0\0\x80?" + bytes(4))}, "shape"),
        ("quantize", CODED | {"range": blob("f32", (1, 2), b"\xff" * 8)}, "not-finite"),
        ("quantize", {"~features": OUTLINE}, "shape"),
    ],
)
def test_what_a_stranger_may_send_is_refused(codec, blobs, reason):
    with pytest.raises(WireError) as refused:
        feature_codec.decode_features(Payload(codec=codec, blobs=blobs), EXPECTED, MOST)
    assert refused.value.reason == reason


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_damaged_payload_gives_finite_features_or_a_refusal(spec):
    """A digest finds damage on the way; a device that sends nonsense under a right digest gets no further than here."""
    whole, drawn = b"".join(pack(feature_codec.encode_features("features", some(), spec))), random.Random(3)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(drawn.randint(1, 3)):
            damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
        try:
            found = feature_codec.decode_features(unpack(memoryview(damaged)), EXPECTED, MOST)
        except WireError:
            continue
        assert found.shape[1:] == (3, 5)
        assert np.isfinite(found).all()

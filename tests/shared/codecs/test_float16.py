"""Float16 codec: exact size, no overflow, hostile payloads refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs import CODECS
from shared.codecs.base import Codec
from shared.codecs.dense import to_blob
from shared.errors import ConfigError, WireError
from shared.protocol.messages import Payload, Spec
from shared.registry import build
from shared.tensors.tree import check_like
from tests.shared.codecs.test_dense import tree_over_the_wire as over_the_wire

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4)


def float16(**options) -> Codec:
    return CODECS["float16"](**options)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 1000), scale=st.floats(-120, 120))
def test_bytes_are_the_formula_and_values_keep_eleven_bits(shapes, seed, scale):
    """2 M + 1 a leaf, whatever its size; scalars and integers as they are, in the tree's order."""
    generator = torch.Generator().manual_seed(seed)
    tree = {str(place): torch.randn(shape, generator=generator) * 2**scale for place, shape in enumerate(shapes)}
    both = tree | {"steps": torch.tensor([7]), "loss": torch.tensor(0.5)}
    assert float16().encode(both, None)[0].num_bytes == 8 + 4 + sum(2 * leaf.numel() + 1 for leaf in tree.values())
    found = over_the_wire(float16(), both)
    assert list(found) == list(both)
    check_like(found, both)
    assert all(torch.equal(found[key], both[key]) for key in ("steps", "loss"))
    for key, leaf in tree.items():
        floor = leaf.abs().max() * 2.0**-38 + 2.0**-149 if leaf.numel() else 0.0  # half of the finest step, scaled
        assert ((found[key] - leaf).abs() <= leaf.abs() * 2.0**-11 + floor).all()


def test_the_layout_by_hand():
    """The largest magnitude, 4 = 2^2, is brought to 2^14: times 2^12."""
    blobs = float16().encode({"n": torch.tensor(5), "w": torch.tensor([[1.0, -4.0]])}, None)[0].blobs
    assert {name: (one.dtype, one.shape) for name, one in blobs.items()} == {
        "=n": ("i64", ()),
        "~w": ("f32", (0, 1, 2)),
        "exponents": ("i8", (1,)),
        "values": ("f16", (2,)),
    }
    assert blobs["exponents"].data == bytes([12])
    assert blobs["values"].data == torch.tensor([4096.0, -16384.0], dtype=torch.float16).numpy().tobytes()


def test_what_is_sent_again_is_the_same():
    """What came is a number of 16 bits already, and the scale its own."""
    once = over_the_wire(float16(), {"w": torch.randn(99, generator=torch.Generator().manual_seed(1))})
    assert torch.equal(over_the_wire(float16(), once)["w"], once["w"])


def test_the_largest_the_smallest_and_no_numbers():
    tree = {"large": torch.tensor([3e38, -1.0]), "small": torch.tensor([1e-44, 0.0]), "zero": torch.zeros(2)}
    found = over_the_wire(float16(), tree)
    assert found["large"][0] == pytest.approx(3e38, rel=1e-3)
    assert torch.equal(found["small"], tree["small"])
    assert torch.equal(found["zero"], tree["zero"])
    for bad in (math.nan, math.inf, -math.inf):
        came = over_the_wire(float16(), {"w": torch.tensor([1.0, bad])})["w"]
        assert came[0] == 1.0
        assert str(came[1].item()) == str(bad)


def test_other_floats_come_back_as_such():
    """Those of 16 bits travel as they are."""
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    tree = {"d": values.double(), "h": values.half(), "b": values.bfloat16(), "turned": values.T}
    found = over_the_wire(float16(), tree)
    check_like(found, tree)
    assert torch.equal(found["h"], tree["h"])
    assert torch.equal(found["b"], tree["b"])
    torch.testing.assert_close(found["turned"], values.T, rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(found["d"], tree["d"], rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("codec", ["float16", "quantize"])
def test_named_leaves_travel_as_they_are(codec):
    """As gradients do beside features; a receiver need not know which."""
    tree = {"features": torch.linspace(0, 1, 50), "gradient": torch.linspace(0, 1, 50)}
    sent, _ = CODECS[codec](exact=" gradient, other").encode(tree, None)
    found = CODECS[codec]().decode(sent).tree
    assert torch.equal(found["gradient"], tree["gradient"])
    assert not torch.equal(found["features"], tree["features"])
    chained = CODECS["chain"](codecs=f"masked,{codec}", masked_dims=1, **{f"{codec}_exact": "gradient"})
    assert torch.equal(over_the_wire(chained, tree)["gradient"], tree["gradient"])


@pytest.mark.parametrize(
    ("name", "blob", "reason"),
    [
        ("exponents", to_blob(torch.tensor([127], dtype=torch.int8)), "malformed"),
        ("exponents", to_blob(torch.tensor([-127], dtype=torch.int8)), "malformed"),
        ("exponents", to_blob(torch.zeros(2, dtype=torch.int8)), "shape"),
        ("exponents", to_blob(torch.zeros(1, dtype=torch.uint8)), "malformed"),
        ("values", to_blob(torch.zeros(4, dtype=torch.float16)), "shape"),
        ("values", to_blob(torch.zeros(5)), "malformed"),
        ("more", to_blob(torch.zeros(5)), "malformed"),
        ("~w", to_blob(torch.zeros(0, 1 << 40)), "shape"),
    ],
)
def test_payloads_that_do_not_fit_themselves_are_refused(name, blob, reason):
    sent = float16().encode({"w": torch.ones(5)}, None)[0]
    with pytest.raises(WireError) as caught:
        float16().decode(Payload(codec="float16", blobs={**sent.blobs, name: blob}))
    assert caught.value.reason == reason


@pytest.mark.parametrize("options", [{"dims": -1}, {"exact": 3}, {"bits": 16}])
def test_options_that_a_plan_must_not_have(options):
    with pytest.raises(ConfigError, match="float16"):
        build(CODECS, Spec(name="float16", options=options), "codec")

"""The bit-packed quantizer: bytes to the byte, draws from the content, no trust in what comes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs import CODECS
from shared.codecs.base import Codec
from shared.errors import ConfigError, WireError
from shared.protocol import payload
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors import quantizer
from shared.tensors.tree import Tree, check_like
from tests.shared.codecs.test_dense import tree_over_the_wire as over_the_wire
from tests.shared.codecs.test_dense import trees

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4)


def quantize(**options) -> Codec:
    return CODECS["quantize"](**options)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 13, 16])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 1000), dims=st.integers(1, 2))
def test_bytes_are_the_formula(bits, shapes, seed, dims):
    """⌈M (q + 1) / 8⌉ + 8: with scope `tree` of all leaves' M values together, with `leaf` of each; others dense."""
    tree = trees(shapes, seed) | {"steps": torch.tensor(7), "loss": torch.tensor(0.5)}
    counts = [leaf.numel() for leaf in tree.values() if leaf.dim() >= dims]
    dense = 8 + 4 + sum(4 * leaf.numel() for leaf in tree.values() if 0 < leaf.dim() < dims)

    def formula(values: int) -> int:
        return math.ceil(values * (bits + 1) / 8) + 8

    encoded = {scope: quantize(bits=bits, scope=scope, dims=dims).encode(tree, None)[0] for scope in ("leaf", "tree")}
    assert encoded["leaf"].num_bytes == dense + sum(map(formula, counts))
    assert encoded["tree"].num_bytes == dense + (formula(sum(counts)) if counts else 0)


@pytest.mark.parametrize("scope", ["leaf", "tree"])
@settings(max_examples=40, derandomize=True, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 1000), bits=st.integers(1, 16))
def test_every_value_is_within_a_step(scope, shapes, seed, bits):
    """In the tree's order, shapes and dtypes; scalars and integers as they are."""
    tree = trees(shapes, seed) | {"loss": torch.tensor(0.1), "steps": torch.tensor([3, 4])}
    found = over_the_wire(quantize(bits=bits, scope=scope), tree)
    assert list(found) == list(tree)
    check_like(found, tree)
    assert all(torch.equal(found[key], tree[key]) for key in ("loss", "steps"))
    sizes = {key: leaf.abs().flatten() for key, leaf in tree.items() if leaf.dim() and leaf.is_floating_point()}
    whole = torch.cat([*sizes.values(), torch.empty(0)])
    for key, size in sizes.items():
        limits = whole if scope == "tree" else size
        step = (limits.max() - limits.min()) / (2**bits - 1) if limits.numel() else 0.0
        assert ((found[key] - tree[key]).abs() <= step + 1e-6).all()


def test_it_is_the_quantizer_of_the_mathematics():
    """A leaf is quantized as `shared.tensors.quantizer` does with the generator of its content."""
    leaf = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    content = payload.digest([memoryview((5).to_bytes(8, "little")), memoryview(leaf.numpy().tobytes())])
    generator = torch.Generator().manual_seed(int.from_bytes(content[:8], "little", signed=True))
    codes, low, high = quantizer.quantize(leaf, 4, generator)
    assert torch.equal(
        over_the_wire(quantize(bits=4, seed=5), {"w": leaf})["w"], quantizer.dequantize(codes, 4, low, high)
    )


def test_the_layout_by_hand():
    """Magnitudes 1 to 4 are knots of two bits: codes 0, 4 + 1, 2, 4 + 3 of three bits each, 0b111_010_101_000."""
    tree = {"n": torch.tensor(5), "w": torch.tensor([[1.0, -2.0], [3.0, -4.0]])}
    blobs = quantize(bits=2).encode(tree, None)[0].blobs
    assert {name: (one.dtype, one.shape) for name, one in blobs.items()} == {
        "=n": ("i64", ()),
        "~w": ("f32", (0, 2, 2)),
        "bits": ("u8", (0, 2)),
        "range": ("f32", (1, 2)),
        "codes": ("u8", (2,)),
    }
    assert blobs["range"].data == floats(1, 4)
    assert list(blobs["codes"].data) == [0b10101000, 0b1110]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_come_back_as_such(dtype):
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = over_the_wire(quantize(bits=8), {"w": values, "turned": values.T})
    step = values.abs().max().item() / 255
    assert found["w"].dtype == dtype
    assert (found["w"] - values).abs().max() <= 1.5 * step + 0.02
    assert found["turned"].shape == (50, 3)
    assert (found["turned"] - values.T).abs().max() <= 1.5 * step + 0.02


def test_many_dimensions_travel_as_they_are():
    """A payload has room for eight, and an outline takes one of them."""
    deep = torch.randn(1, 1, 1, 1, 1, 1, 1, 3)
    assert torch.equal(over_the_wire(quantize(bits=1), {"w": deep})["w"], deep)


def nudged(turn: int) -> Tree:
    """Return trees that differ in the last bits of one value."""
    values = torch.linspace(-1.0, 1.3, 60)
    values[17] = torch.tensor(0.5).view(torch.int32).add(turn).view(torch.float32)
    return {"w": values}


@pytest.mark.parametrize("draw", ["content", "seed"])
def test_draws_from_the_content_have_no_bias(draw):
    """Over 1200 trees that differ in one bit, or seeds: mean within five deviations, variance within 5 %, and
    no tree's draws tell of the next one's."""
    turns = 1200
    if draw == "content":
        found = [over_the_wire(quantize(bits=2), nudged(turn))["w"] for turn in range(turns)]
    else:
        found = [over_the_wire(quantize(bits=2, seed=turn), nudged(0))["w"] for turn in range(turns)]
    error = torch.stack(found).double() - nudged(0)["w"]
    size = nudged(0)["w"].abs().double()
    step = (size.max() - size.min()) / 3
    x = (size - size.min()) / step
    variance = step**2 * (x - x.floor()) * (1 - x + x.floor())
    assert (error.mean(0).abs() <= 5 * (variance / turns).sqrt() + 1e-6).all()
    assert error.square().mean(0).sum().item() == pytest.approx(variance.sum().item(), rel=0.05)
    moving = variance > 0
    normed = error[:, moving] / variance[moving].sqrt()
    assert (normed[1:] * normed[:-1]).mean().abs() <= 5 / (turns * moving.sum().item()) ** 0.5


def test_the_same_tree_gives_the_same_bytes():
    """Whatever else was drawn meanwhile: a task done twice sends what it sent; memory passes through."""
    tree = trees([[40, 3], [7]], 1)
    state = torch.get_rng_state()
    first, _ = quantize(bits=3).encode(tree, None)
    torch.rand(5)
    memory = {"w": torch.ones(1)}
    second, kept = quantize(bits=3).encode({key: leaf.clone() for key, leaf in tree.items()}, memory)
    assert payload.digest(payload.pack(first)) == payload.digest(payload.pack(second))
    assert kept is memory
    torch.set_rng_state(state)
    quantize().encode(tree, None)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_payload_says_how_it_is_read():
    """Options are the encoder's: one with other options, as a receiver builds it by name, reads the same."""
    tree = trees([[40, 3], [7]], 1)
    sent, _ = quantize(bits=3, scope="tree", seed=9).encode(tree, None)
    found = [codec.decode(sent).tree for codec in (quantize(bits=3, scope="tree", seed=9), quantize())]
    assert all(torch.equal(found[0][key], found[1][key]) for key in tree)


@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_told_and_refused(scope, bad):
    """Wherever it stands: training that diverged is refused by the server by the reason that `dense` gives."""
    for key in ("0", "1", "2"):
        tree = trees([[4], [5], [6]], 1)
        tree[key][2] = bad
        with pytest.raises(WireError) as caught:
            over_the_wire(quantize(scope=scope), tree)
        assert caught.value.reason == "not-finite"


def test_the_largest_floats():
    """Their sum is infinite, and they are not."""
    tree = {"w": torch.tensor([3e38, -3.2e38, 3.4e38])}
    assert (over_the_wire(quantize(bits=8), tree)["w"].sign() == tree["w"].sign()).all()


def floats(*numbers: float) -> bytes:
    return torch.tensor(numbers, dtype=torch.float32).numpy().tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 0},
        {"bits": 17},
        {"bits": 2.5},
        {"bits": "8"},
        {"scope": "layer"},
        {"dims": -1},
        {"seed": 0.5},
        {"seed": -1},
        {"bits": True},
        {"q": 8},
    ],
)
def test_options_that_a_plan_must_not_have(options):
    with pytest.raises(ConfigError, match="quantize"):
        build(CODECS, Spec(name="quantize", options=options), "codec")

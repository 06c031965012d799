"""Masked codec, alone and chained: exact bytes, means, hostile payloads refused."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs import CODECS
from shared.errors import ConfigError, WireError
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import Mean, Tree, accumulate, check_like, finish_mean
from tests.shared.codecs.test_dense import over_the_wire

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=5)


def pruned(shapes: list[list[int]], share: float, seed: int, dtype: torch.dtype = torch.float32) -> Tree:
    """Return a tree of which about that share of every leaf is zero, and a counter."""
    generator = torch.Generator().manual_seed(seed)
    tree = {str(place): torch.randn(shape, generator=generator) for place, shape in enumerate(shapes)}
    kept = {key: torch.rand(leaf.shape, generator=generator) >= share for key, leaf in tree.items()}
    return {key: (leaf * kept[key]).to(dtype) for key, leaf in tree.items()} | {"steps": torch.tensor(7)}


def counts(tree: Tree, dims: int = 2) -> tuple[int, int, int]:
    """Return n, nnz and n_other of the floating leaves."""
    floating = [leaf for leaf in tree.values() if leaf.is_floating_point()]
    sparse = [leaf for leaf in floating if leaf.dim() >= dims]
    n = sum(leaf.numel() for leaf in sparse)
    nnz = sum(int(leaf.count_nonzero()) for leaf in sparse)
    return n, nnz, sum(leaf.numel() for leaf in floating) - n


@settings(max_examples=60, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=st.sampled_from([0, 0.35, 0.7, 1]), seed=st.integers(0, 1000), dims=st.integers(0, 3))
def test_bytes_are_the_formula(shapes, share, seed, dims):
    """4 nnz + ⌈n / 8⌉ + 4 n_other, and 8 of the counter: one bitmap, however the leaves end."""
    tree = pruned(shapes, share, seed)
    n, nnz, others = counts(tree, dims)
    encoded, _ = CODECS["masked"](dims=dims).encode(tree, None)
    assert encoded.num_bytes == 4 * nnz + math.ceil(n / 8) + 4 * others + 8


@pytest.mark.parametrize("coverage", ["all", "holders"])
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=st.sampled_from([0, 0.35, 0.7, 1]), seed=st.integers(0, 1000))
def test_what_was_sent_comes_back(coverage, dtype, shapes, share, seed):
    """Every value, in its place and the tree's order; with `holders`, which of the sparse leaves are not zero."""
    tree = pruned(shapes, share, seed, dtype)
    found = over_the_wire(CODECS["masked"](coverage=coverage), tree)
    assert list(found.tree) == list(tree)
    check_like(found.tree, tree)
    assert all(torch.equal(found.tree[key], leaf) for key, leaf in tree.items())
    held = {key: (leaf != 0).tolist() for key, leaf in tree.items() if leaf.is_floating_point() and leaf.dim() >= 2}
    assert {key: mask.tolist() for key, mask in found.coverage.items()} == (held if coverage == "holders" else {})


def test_the_layout_by_hand():
    """Two leaves of 3 and 6 values: bits 0b101 and 0b100010 in one map, from the lowest on; a view of turned values."""
    tree = {"a": torch.tensor([[5.0, 0.0, 6.0]]), "b": torch.tensor([[0.0, 0.0], [7.0, 0.0], [0.0, 8.0]]).T}
    blobs = CODECS["masked"]().encode(tree, None)[0].blobs
    assert list(blobs) == ["~a", "~b", "bitmap", "dense/a", "dense/b"]
    assert blobs["~b"].shape == (0, 2, 3)
    assert list(blobs["bitmap"].data) == [0b00010101, 0b1]
    assert blobs["dense/b"].data == torch.tensor([7.0, 8.0]).numpy().tobytes()


def test_large_leaves():
    """More values than are put in their places at a time."""
    tree = pruned([[300, 1000], [7, 3]], 0.35, 1)
    assert all(torch.equal(leaf, tree[key]) for key, leaf in over_the_wire(CODECS["masked"](), tree).tree.items())


def test_nan_is_sent():
    """It is no zero: the receiver must see that training diverged."""
    tree = {"w": torch.tensor([[0.0, math.nan]])}
    with pytest.raises(WireError, match="NaN"):
        check_like(over_the_wire(CODECS["masked"](), tree).tree, tree)


def test_a_mean_over_all_or_over_holders():
    """(2 + 0) / 2 = 1 and 2 / 1 = 2; where nobody holds a value it is zero either way."""
    trees = [{"w": torch.tensor([[2.0, 4.0, 0.0]])}, {"w": torch.tensor([[0.0, 8.0, 0.0]])}]
    means = {}
    for coverage in ("all", "holders"):
        mean = Mean()
        for tree in trees:
            coded = over_the_wire(CODECS["masked"](coverage=coverage), tree)
            mean = accumulate(mean, coded.tree, 1.0, coded.coverage)
        means[coverage] = finish_mean(mean)["w"].tolist()
    assert means == {"all": [[1.0, 6.0, 0.0]], "holders": [[2.0, 6.0, 0.0]]}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=st.sampled_from([0, 0.35, 1]), seed=st.integers(0, 1000), bits=st.integers(1, 16))
def test_masked_values_are_quantized(shapes, share, seed, bits):
    """⌈nnz (q + 1) / 8⌉ + 8 + ⌈n / 8⌉ + 4 n_other; zeros stay zero, others stay in the range of those that are none."""
    tree = pruned(shapes, share, seed)
    n, nnz, others = counts(tree)
    codec = CODECS["chain"](quantize_bits=bits, quantize_scope="tree", masked_coverage="holders")
    sparse = [leaf for leaf in tree.values() if leaf.dim() >= 2]
    ranges = 8 if sparse else 0
    expected = math.ceil(nnz * (bits + 1) / 8) + ranges + math.ceil(n / 8) + 4 * others + 8
    assert codec.encode(tree, None)[0].num_bytes == expected
    found = over_the_wire(codec, tree)
    sizes = torch.cat([*(leaf[leaf != 0].abs() for leaf in sparse), torch.empty(0)])
    for key, leaf in tree.items():
        if leaf.dim() < 2:
            assert torch.equal(found.tree[key], leaf)
            continue
        assert torch.equal(found.coverage[key], leaf != 0)
        assert (found.tree[key][leaf == 0] == 0).all()
        if nnz:
            step = (sizes.max() - sizes.min()) / (2**bits - 1)
            assert ((found.tree[key] - leaf).abs() <= step + 1e-6).all()
            assert (found.tree[key][leaf != 0].abs() >= sizes.min()).all()


def test_a_chain_of_one_and_of_dense():
    tree = pruned([[4, 5]], 0.5, 1)
    for codecs in ("dense", "masked,dense", "masked, masked, dense"):
        sent, _ = CODECS["chain"](codecs=codecs).encode(tree, None)
        assert sent.codec == "chain"
        assert torch.equal(CODECS["chain"](codecs=codecs).decode(sent).tree["0"], tree["0"])


def test_memory_passes_through():
    memory = {"w": torch.ones(1)}
    for name in ("masked", "chain"):
        assert CODECS[name]().encode({"w": torch.ones(2, 2)}, memory)[1] is memory


def test_another_chain_is_refused():
    """Both sides build the plan's: values of another codec are not what this one reads."""
    sent, _ = CODECS["chain"](codecs="masked,dense").encode(pruned([[4, 5]], 0.5, 1), None)
    with pytest.raises(WireError):
        CODECS["chain"](codecs="masked,quantize").decode(sent)
    for name in ("masked", "quantize", "dense"):
        with pytest.raises(WireError) as caught:
            CODECS[name]().decode(sent)
        assert caught.value.reason == "codec"
    with pytest.raises(WireError) as caught:
        CODECS["chain"]().decode(msgspec.structs.replace(sent, codec="masked"))
    assert caught.value.reason == "codec"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("masked", {"coverage": "some"}),
        ("masked", {"dims": -1}),
        ("masked", {"bits": 8}),
        ("chain", {"codecs": ""}),
        ("chain", {"codecs": "quantize,masked"}),
        ("chain", {"codecs": "masked"}),
        ("chain", {"codecs": "masked,topk"}),
        ("chain", {"codecs": "masked,chain"}),
        ("chain", {"codecs": 5}),
        ("chain", {"bits": 8}),
        ("chain", {"codecs": "masked,dense", "quantize_bits": 8}),
        ("chain", {"quantize_bits": 17}),
        ("chain", {"quantize_q": 8}),
        ("chain", {"masked_coverage": "some"}),
        ("chain", {"masked_inner": "x"}),
        ("chain", {"quantize": 8}),
    ],
)
def test_options_that_a_plan_must_not_have(name, options):
    with pytest.raises(ConfigError, match=name):
        build(CODECS, Spec(name=name, options=options), "codec")

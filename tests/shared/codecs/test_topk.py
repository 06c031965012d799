"""The largest changes alone: mathematics of a top-k, bytes to the byte, what is left is remembered."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.codecs import CODECS
from shared.codecs.base import Codec, decode_bounded
from shared.codecs.positions import MOST
from shared.codecs.topk import sent_values, topk_bytes
from shared.errors import ConfigError, WireError
from shared.protocol import payload
from shared.protocol.messages import Blob, Payload, Spec
from shared.registry import build
from shared.tensors.tree import Tree, check_like
from tests.shared.codecs.test_dense import tree_over_the_wire as over_the_wire
from tests.shared.codecs.test_dense import trees

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5)
SHARES = st.sampled_from([1e-9, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])


def topk(**options) -> Codec:
    return CODECS["topk"](**options)


def joined(tree: Tree) -> Tensor:
    """Return the values of a tree of floats as one vector."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *(leaf.flatten().double() for leaf in tree.values())])


@settings(max_examples=50, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=SHARES, seed=st.integers(0, 1000))
def test_the_largest_values_come_and_the_others_are_zero(shapes, share, seed):
    """k = max(1, ⌈share d⌉) of them; in the tree's order, shapes and dtypes, integers as they are."""
    tree = trees(shapes, seed)
    found = over_the_wire(topk(share=share), tree | {"n": torch.tensor([3, 4])})
    assert list(found) == [*tree, "n"]
    check_like(found, tree | {"n": torch.tensor([3, 4])})
    assert found.pop("n").tolist() == [3, 4]
    sent, own = joined(found), joined(tree)
    count = sent_values(len(own), share)
    assert count == min(len(own), max(1, math.ceil(share * len(own))))
    largest = own.abs().argsort(descending=True, stable=True)[:count]
    expected = torch.zeros_like(own)
    expected[largest] = own[largest]
    assert torch.equal(sent, expected)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=SHARES, seed=st.integers(0, 1000), random_k=st.booleans())
def test_bytes_are_no_more_than_told(shapes, share, seed, random_k):
    """Nor than 8 k, 4 k and a bitmap, or 4 d, as HCEF's resolution counts them; integers are as they are."""
    tree = trees(shapes, seed) | {"steps": torch.tensor(7)}
    d = len(joined(tree)) - 1
    size = topk(share=share, random_k=random_k).encode(tree, None)[0].num_bytes - 8
    k = sent_values(d, share)
    assert size <= topk_bytes(d, share) <= min(8 * k, 4 * k + math.ceil(d / 8), 4 * d)


@pytest.mark.parametrize(("share", "rate"), [(0.001, 1.38), (0.01, 1.27), (0.1, 1.17), (0.3, 1.105), (0.5, 1.0625)])
def test_bytes_of_scattered_values_are_near_what_is_told(share, rate):
    """Of the spec's overhead over values alone, 2.00 where few are sent, the gaps leave a quarter of themselves."""
    d = 300_000
    tree = {"w": torch.randn(d, generator=torch.Generator().manual_seed(1))}
    size = topk(share=share).encode(tree, None)[0].num_bytes
    assert 0.97 * topk_bytes(d, share) <= size <= topk_bytes(d, share)
    assert topk_bytes(d, share) / (4 * sent_values(d, share)) <= rate


@settings(max_examples=50, derandomize=True, deadline=None)
@given(shapes=SHAPES, share=SHARES, seed=st.integers(0, 1000))
def test_it_contracts_and_does_nothing_the_second_time(shapes, share, seed):
    """|Q(x) - x|² <= (1 - k / d) |x|², and Q(Q(x)) = Q(x)."""
    tree = trees(shapes, seed)
    once = over_the_wire(topk(share=share), tree)
    own, sent = joined(tree), joined(once)
    d = len(own)
    if d:
        lost = (sent - own).square().sum()
        assert lost <= (1 - sent_values(d, share) / d) * own.square().sum() * (1 + 1e-12)
    again = over_the_wire(topk(share=share), once)
    assert all(torch.equal(again[key], once[key]) for key in once)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.77])
def test_of_equal_magnitudes_the_first_go_and_the_contraction_is_an_equality(share):
    """Whatever their signs and leaves."""
    tree = {"a": torch.full((3, 20), -0.5), "b": torch.full((40,), 0.5)}
    sent = joined(over_the_wire(topk(share=share), tree))
    k = sent_values(100, share)
    assert sent.nonzero().flatten().tolist() == list(range(k))
    assert (sent - joined(tree)).square().sum() == pytest.approx((1 - k / 100) * joined(tree).square().sum())


@pytest.mark.parametrize("random_k", [False, True])
def test_all_of_it_is_the_tree_to_the_bit(random_k):
    """With its zeros' signs; and in its own bytes alone."""
    tree = {"w": torch.tensor([[0.0, -0.0], [1e-45, -3e38]]), "s": torch.tensor(0.5)}
    codec = topk(share=1.0, random_k=random_k)
    assert codec.encode(tree, None)[0].num_bytes == 20
    found = over_the_wire(codec, tree)
    assert all(torch.equal(found[key].view(torch.int32), leaf.view(torch.int32)) for key, leaf in tree.items())


def test_zeros_do_not_travel():
    """Nothing of what a device has not moved, even where the share has room."""
    tree = {"w": torch.zeros(1000)}
    tree["w"][[3, 700]] = torch.tensor([1.0, -2.0])
    sent, _ = topk(share=0.5).encode(tree, None)
    assert sent.blobs["values"].shape == (2,)
    assert torch.equal(topk().decode(sent).tree["w"], tree["w"])
    assert topk(share=0.5).encode({"w": torch.zeros(1000)}, None)[0].num_bytes == 0


LAYOUTS = {
    "gaps": (0.02, [5, 40, 199], {"gaps": ("u8", (4,), bytes([5, 0x45, 0x78, 0x85]))}),
    "bitmap": (0.5, range(0, 200, 2), {"bitmap": ("u8", (25,), bytes([0x55]) * 25)}),
    "dense": (0.99, range(198), {}),
}
"""By form: the share, where values are, and the entry that says so."""


@pytest.mark.parametrize("form", LAYOUTS)
def test_the_layout_by_hand(form):
    """Of a leaf of 200 values: golden bytes of every form, behind outlines and leaves as they are."""
    share, places, where = LAYOUTS[form]
    leaf = torch.zeros(200)
    leaf[list(places)] = 1.5
    tree = {"n": torch.tensor(5), "w": leaf.view(20, 10), "bn.running_mean": torch.ones(1)}
    blobs = topk(share=share).encode(tree, None)[0].blobs
    values = ("f32", (200,), leaf.numpy().tobytes()) if form == "dense" else ("f32", (len(places),), None)
    assert list(blobs) == ["=n", "~w", "=bn.running_mean", "values", *where]
    assert (blobs["~w"].dtype, blobs["~w"].shape) == ("f32", (0, 20, 10))
    told = {name: (one.dtype, one.shape, bytes(one.data)) for name, one in blobs.items() if name in where}
    assert told == where
    expected = values[2] or torch.full((len(places),), 1.5).numpy().tobytes()
    assert (blobs["values"].dtype, blobs["values"].shape, bytes(blobs["values"].data)) == (*values[:2], expected)


def test_golden_bytes():
    """The whole payload of three values in a leaf of 200, as every version reads it."""
    leaf = torch.zeros(200)
    leaf[[5, 40, 199]] = torch.tensor([1.0, -2.0, 0.5])
    data = b"".join(payload.pack(topk(share=0.02).encode({"w": leaf}, None)[0]))
    header = b"\x92\xa4topk\x93\x93\xa2~w\xa3f32\x92\x00\xcc\xc8\x93\xa6values\xa3f32\x91\x03\x93\xa4gaps\xa2u8\x91\x04"
    start = b"FP\x01\0" + len(header).to_bytes(4, "little") + header
    values = b"\0\0\x80\x3f" + b"\0\0\0\xc0" + b"\0\0\0\x3f"
    assert data == start.ljust(64, b"\0") + values.ljust(64, b"\0") + b"\x05\x45\x78\x85"
    assert torch.equal(topk().decode(payload.unpack(memoryview(bytearray(data)))).tree["w"], leaf)


def test_positions_of_32_bits_where_one_value_lies_far_behind():
    """A position alone takes four bytes by either form, and is written plainly."""
    leaf = torch.zeros(1_000_001)
    leaf[1_000_000] = -1.0
    sent, _ = topk(share=1e-9).encode({"w": leaf}, None)
    assert bytes(sent.blobs["positions"].data) == (1_000_000).to_bytes(4, "little")
    assert torch.equal(topk().decode(sent).tree["w"], leaf)


def test_running_statistics_and_named_leaves_travel_as_they_are():
    tree = {
        "0.weight": torch.linspace(1, 2, 50),
        "1.running_mean": torch.linspace(0, 1e-6, 50),
        "1.running_var": torch.ones(50),
        "1.num_batches_tracked": torch.tensor(9),
        "2.bias": torch.linspace(0, 1e-6, 50),
    }
    found = over_the_wire(topk(share=0.02, exact="2.bias, other"), tree)
    assert found["0.weight"].count_nonzero() == 1
    assert all(torch.equal(found[key], tree[key]) for key in tree if key != "0.weight")


def test_other_floats_come_back_as_such():
    """By values of 16 bits alone, or by those of the dtype that holds all."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, 50, generator=generator)
    for kinds in (["half"], ["bfloat16"], ["double"], ["half", "bfloat16"], ["float", "double"]):
        tree = {kind: getattr(values + place, kind)().T for place, kind in enumerate(kinds)}
        codec = topk(share=0.2)
        size = {"half": 2, "bfloat16": 2, "double": 8, "half bfloat16": 4, "float double": 8}[" ".join(kinds)]
        d = 150 * len(kinds)
        assert codec.encode(tree, None)[0].num_bytes <= topk_bytes(d, 0.2, size)
        found = over_the_wire(codec, tree)
        check_like(found, tree)
        assert (joined(found) != 0).sum() == d // 5
        kept = joined(found) != 0
        assert torch.equal(joined(found)[kept], joined(tree)[kept])


def test_error_feedback_sends_everything_in_the_end():
    """What was sent and what is left are always all that was given: x_1 + ... + x_n = Q_1 + ... + Q_n + memory."""
    codec, memory = topk(share=0.1, error_feedback=True), None
    given, sent = torch.zeros(3, 40), torch.zeros(3, 40)
    for turn in range(12):
        tree = {"w": torch.randn(3, 40, generator=torch.Generator().manual_seed(turn)).mul(8).round()}
        before = memory["w"] if memory else torch.zeros(3, 40)
        packed, memory = codec.encode(tree | {"n": torch.tensor(turn)}, memory)
        came = codec.decode(packed).tree["w"]
        assert torch.equal(came, over_the_wire(topk(share=0.1), {"w": tree["w"] + before})["w"])
        given += tree["w"]
        sent += came
        assert torch.equal(given, sent + memory["w"])
        assert memory.keys() == {"w"}
    packed, memory = topk(share=1.0, error_feedback=True).encode({"w": torch.zeros(3, 40)}, memory)
    assert torch.equal(sent + codec.decode(packed).tree["w"], given)
    assert not memory["w"].any()


def test_what_is_remembered_of_another_shape_is_forgotten_and_of_absent_leaves_kept():
    memory = {"w": torch.ones(4), "v": torch.ones(2)}
    packed, after = topk(share=1.0, error_feedback=True).encode({"w": torch.ones(3)}, memory)
    assert torch.equal(topk().decode(packed).tree["w"], torch.ones(3))
    assert {key: leaf.tolist() for key, leaf in after.items()} == {"w": [0, 0, 0], "v": [1, 1]}
    assert memory["w"].tolist() == [1, 1, 1, 1]


def test_encoding_changes_nothing_and_draws_nothing_of_anybodys():
    """Neither the tree nor, without error feedback, the memory; nor torch's own generator."""
    tree, memory = trees([[40, 3], [7]], 1), {"w": torch.ones(1)}
    before, state = {key: leaf.clone() for key, leaf in tree.items()}, torch.get_rng_state()
    for options in ({}, {"random_k": True}, {"error_feedback": True}):
        for share in (0.1, 0.97, 1.0):
            first, _ = topk(share=share, **options).encode(tree, None)
            second, _ = topk(share=share, **options).encode(before, None)
            assert payload.digest(payload.pack(first)) == payload.digest(payload.pack(second))
    assert topk(share=0.1).encode(tree, memory)[1] is memory
    assert all(torch.equal(tree[key], before[key]) for key in tree)
    assert torch.equal(torch.get_rng_state(), state)


def test_drawn_positions_are_uniform_and_contract_in_mean():
    """Over 500 seeds every position comes as often as chance has it; what is lost is 1 - k / d in the mean."""
    turns, d, k = 500, 40, 10
    tree = {"w": torch.linspace(-1.0, 2.0, d) + 0.01}
    sent = torch.stack([over_the_wire(topk(share=k / d, random_k=True, seed=turn), tree)["w"] for turn in range(turns)])
    assert ((sent != 0).sum(1) == k).all()
    assert torch.equal(sent, torch.where(sent != 0, tree["w"], 0.0))
    often = (sent != 0).double().mean(0)
    deviation = (k / d * (1 - k / d) / turns) ** 0.5
    assert (often - k / d).abs().max() <= 5 * deviation
    lost = (sent - tree["w"]).double().square().sum(1).mean() / tree["w"].double().square().sum()
    assert lost.item() == pytest.approx(1 - k / d, rel=0.04)


def test_trees_that_differ_in_a_bit_draw_apart():
    tree = {"w": torch.ones(400)}
    other = {"w": tree["w"].clone()}
    other["w"][7] = 1 + 2**-23
    first, second = (over_the_wire(topk(share=0.5, random_k=True), one)["w"] != 0 for one in (tree, other))
    assert 40 < (first != second).sum() < 360


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_sent(bad):
    """It is larger than any: training that diverged is refused by the server."""
    tree = {"w": torch.arange(100.0)}
    tree["w"][50] = bad
    assert str(over_the_wire(topk(share=0.01), tree)["w"][50].item()) == str(bad)


def test_a_few_bytes_that_stand_for_more_than_anybody_expects_are_refused_before_they_take_memory():
    """By their outline; what cannot be placed by 32 bits at all also by decoding itself."""
    sent, _ = topk().encode({"w": torch.zeros(10)}, None)

    def outlined(*shape: int) -> Payload:
        blobs = {"~w": Blob("f32", (0, *shape), memoryview(b"")), "values": Blob("f32", (0,), memoryview(b""))}
        blobs["positions"] = Blob("i32", (0,), memoryview(b""))
        return Payload(codec="topk", blobs=blobs)

    assert topk().outline(sent)["w"].shape == (10,)
    assert topk().outline(outlined(1 << 20, 1 << 18))["w"].is_meta
    with pytest.raises(WireError) as caught:
        decode_bounded(topk(), outlined(1 << 28, 2))
    assert caught.value.reason == "oversized"
    with pytest.raises(WireError) as caught:
        topk().decode(outlined(MOST + 1))
    assert caught.value.reason == "oversized"
    assert decode_bounded(topk(), outlined(3, 2)).tree["w"].tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0},
        {"share": -0.1},
        {"share": 1.5},
        {"share": math.nan},
        {"share": "1"},
        {"share": True},
        {"error_feedback": "false"},
        {"random_k": 1},
        {"seed": 0.5},
        {"seed": -1},
        {"exact": 3},
        {"k": 5},
    ],
)
def test_options_that_a_plan_must_not_have(options):
    with pytest.raises(ConfigError, match="topk"):
        build(CODECS, Spec(name="topk", options=options), "codec")

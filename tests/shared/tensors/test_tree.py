"""Arithmetic on trees, against numpy and against sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.tensors import tree
from shared.tensors.tree import Mean, State
from tests.naming import names_all

MANY = settings(max_examples=60, derandomize=True, deadline=None)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def mean_of(*contributions) -> tree.Tree:
    mean = Mean()
    for contribution in contributions:
        mean = tree.accumulate(mean, *contribution)
    return tree.finish_mean(mean)


def test_weighted_mean_by_hand():
    """(1 * [1, 2] + 3 * [5, 6]) / 4 = [4, 5]; a leaf that only one holds is that one's own."""
    a = {"w": torch.tensor([1.0, 2.0]), "only": torch.tensor([7.0])}
    b = {"w": torch.tensor([5.0, 6.0])}
    got = mean_of((a, 1.0), (b, 3.0))
    assert got["w"].tolist() == [4.0, 5.0]
    assert got["only"].tolist() == [7.0]


def test_a_mean_keeps_what_single_updates_say():
    mean = tree.accumulate(Mean(facts={"left/a": True}), {"w": torch.ones(1)}, 1.0)
    assert mean.facts == {"left/a": True}
    assert tree.accumulate(mean, {}, 1.0).facts == {"left/a": True}


def test_mean_over_those_who_hold_a_coordinate_by_hand():
    """Weights 1 and 3, masks 110 and 011: first 1*2/1, second (1*4 + 3*8)/4, third 3*6/3; the fourth nobody holds."""
    a = {"w": torch.tensor([2.0, 4.0, 99.0, 99.0])}
    b = {"w": torch.tensor([99.0, 8.0, 6.0, 99.0])}
    masks = [{"w": torch.tensor([1, 1, 0, 0], dtype=torch.bool)}, {"w": torch.tensor([0, 1, 1, 0], dtype=torch.bool)}]
    assert mean_of((a, 1.0, masks[0]), (b, 3.0, masks[1]))["w"].tolist() == [2.0, 7.0, 6.0, 0.0]


@MANY
@given(st.integers(0, 1 << 30), st.integers(1, 5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_mean_is_numpys(seed, devices, masked):
    """Any number of devices, some covering all of a leaf, some a part: sum(w m x) / sum(w m) per coordinate, else 0."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(devices, 3, 4))
    masks = random.random((devices, 3, 4)) < 0.5
    masks[~np.array(masked[:devices])] = True
    weights = random.integers(1, 100, devices).astype(float)
    shares = weights[:, None, None] * masks
    held = shares.sum(0) > 0
    expected = np.where(held, (shares * values).sum(0) / np.where(held, shares.sum(0), 1), 0)
    got = mean_of(
        *(
            ({"w": torch.tensor(values[k])}, weights[k], {"w": torch.tensor(masks[k])} if masked[k] else None)
            for k in range(devices)
        )
    )
    np.testing.assert_allclose(got["w"].numpy(), expected, rtol=1e-12, atol=1e-12)


def test_the_inputs_are_not_changed():
    """The running sums are their own tensors: what a device sent may be a view of a file."""
    leaf = torch.tensor([1.0, 2.0])
    mask = torch.tensor([True, False])
    for coverage in (None, {"w": mask}):
        mean_of(({"w": leaf}, 1.0, coverage), ({"w": leaf}, 1.0, coverage))
    assert leaf.tolist() == [1.0, 2.0]
    assert mask.tolist() == [True, False]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("coverage", [None, {"w": torch.tensor([True, True])}], ids=["whole", "masked"])
def test_sixteen_bits_do_not_overflow(dtype, coverage):
    """Values of 10 with 10 000 examples each sum to 200 000, beyond what float16 holds; their mean is 10."""
    leaf = torch.full((2,), 10.0, dtype=dtype)
    mean = mean_of(({"w": leaf}, 1e4, coverage), ({"w": leaf}, 1e4, coverage))
    moved = tree.add({"w": torch.zeros(2, dtype=dtype)}, mean)["w"]
    assert moved.dtype == dtype
    assert moved.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_buffers_are_averaged_and_rounded(dtype):
    """BatchNorm's step counter: moved by 3 and by 4 with weights 1 and 3, that is 3.75, so by 4. None is truncated."""
    mean = mean_of(({"steps": torch.tensor(3, dtype=dtype)}, 1.0), ({"steps": torch.tensor(4, dtype=dtype)}, 3.0))
    assert mean["steps"].item() == 3.75
    moved = tree.add({"steps": torch.tensor(10, dtype=dtype)}, mean)["steps"]
    assert (moved.dtype, moved.item()) == (dtype, 14)


def test_large_integers_keep_their_last_digit():
    """Sums of integers are float64: 2**40 + 1 survives, in float32 it would not."""
    large = torch.tensor([(1 << 40) + 1])
    assert mean_of(({"n": large}, 2.0), ({"n": large}, 2.0))["n"].item() == (1 << 40) + 1


def test_add_and_sub():
    """a + (b - a) = b leaf by leaf; leaves that b lacks are a's own tensors."""
    a = {"w": torch.tensor([1.0, 2.0]), "kept": torch.tensor([3])}
    b = {"w": torch.tensor([5.0, 1.0])}
    assert tree.subtract(b, a)["w"].tolist() == [4.0, -1.0]
    moved = tree.add(a, tree.subtract(b, a))
    assert moved["w"].tolist() == [5.0, 1.0]
    assert moved["kept"] is a["kept"]
    assert a["w"].tolist() == [1.0, 2.0]


def test_raw_is_a_view_in_c_order():
    """A contiguous leaf is not copied; any other comes in C order; a scalar has bytes, an empty leaf none."""
    leaf = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    view = tree.tensor_bytes(leaf)
    leaf[0, 0] = 9
    assert view[0] == 9
    assert bytes(tree.tensor_bytes(leaf.T)) == bytes([9, 3, 1, 4, 2, 5])
    assert bytes(tree.tensor_bytes(torch.arange(4.0)[::2])) == b"\0\0\0\0\0\0\0@"
    assert (
        tree.tensor_bytes(leaf).nbytes,
        tree.tensor_bytes(torch.tensor(1.0)).nbytes,
        tree.tensor_bytes(torch.zeros(0, 3)).nbytes,
    ) == (6, 4, 0)


LIKE = {"w": torch.zeros(2, 3), "n": torch.tensor(0), "h": torch.zeros(2, dtype=torch.bfloat16), "e": torch.zeros(0)}


@pytest.mark.parametrize(
    ("leaves", "reason"),
    [
        ({"x": torch.zeros(2, 3)}, "unknown-tensor"),
        ({"w": torch.zeros(3, 2)}, "shape"),
        ({"w": torch.zeros(6)}, "shape"),
        ({"w": torch.zeros(2, 3, 1)}, "shape"),
        ({"n": torch.tensor([0])}, "shape"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, "dtype"),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, "dtype"),
        ({"n": torch.tensor(0.0)}, "dtype"),
    ],
)
def test_check_like_refuses(leaves, reason):
    """Also where the other leaves are fine."""
    with pytest.raises(WireError) as caught:
        tree.check_like({"h": LIKE["h"], **leaves}, LIKE)
    assert caught.value.reason == reason


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_check_like_refuses_what_is_no_number(dtype, bad):
    """At every place of a leaf, of every floating dtype; also as a scalar."""
    for place in range(5):
        leaf = torch.zeros(5, dtype=dtype)
        tree.check_like({"w": leaf}, {"w": leaf})
        leaf[place] = bad
        with pytest.raises(WireError) as caught:
            tree.check_like({"w": leaf}, {"w": leaf})
        assert caught.value.reason == "not-finite"
    with pytest.raises(WireError):
        tree.check_like({"w": torch.tensor(bad, dtype=dtype)}, {"w": torch.tensor(0, dtype=dtype)})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_check_like_tells_large_numbers_from_none(dtype, bad):
    """Numbers of which the squares are beyond the dtype are numbers; one that is none is found among them."""
    for largest in (torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        leaf = torch.full((3, 1001), largest, dtype=dtype)
        tree.check_like({"w": leaf}, {"w": leaf})
        tree.check_like({"w": leaf.T[::3]}, {"w": leaf.T[::3]})
        leaf[2, 1000] = bad
        with pytest.raises(WireError) as caught:
            tree.check_like({"w": leaf}, {"w": leaf})
        assert caught.value.reason == "not-finite"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_check_like_returns_the_norm(dtype):
    """The same bits as `tree_norm`, by which updates are judged that an earlier process of a server has checked."""
    leaves = {"w": 100 * torch.randn(7, 1001), "b": torch.randn(5), "none": torch.zeros(0), "steps": torch.tensor(3)}
    own = {name: leaf.to(dtype) for name, leaf in leaves.items()}
    assert tree.check_like(own, own) == tree.tree_norm(own)
    outline = {name: leaf.to("meta") for name, leaf in own.items()}
    assert tree.check_like(outline, own) == 0.0


def test_check_like_takes_a_part_and_what_is_empty():
    """A device may hold some leaves only; an empty leaf has no bad number; the largest finite number is fine."""
    tree.check_like({}, LIKE)
    tree.check_like(LIKE, LIKE)
    tree.check_like({"w": torch.full((2, 3), torch.finfo(torch.float32).max)}, LIKE)


def test_a_state_says_how_much_it_is_without_its_numbers():
    """A loop that ends with one has it printed: see `State.__repr__`."""
    state = State({"weight": torch.zeros(2, 3), "bias": torch.ones(2)}, {"rounds": 1})
    assert names_all(repr(state), 2, 8, 1)
    assert "tensor(" not in repr(state)

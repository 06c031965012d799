"""Subsets, hold-outs and batches lose nothing, invent nothing and repeat by seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_server.replay.devices.behaviour import batches as steps_by_size
from shared.data.examples import Examples, batches, split_holdout
from shared.data.sources.arrays import Arrays, as_inputs, count_sides, select_held_out, shuffled_order
from shared.data.spec import Data
from shared.protocol.messages import MERGES_SINGLE, Assignment, Hyper, count_steps

SEEDS = st.integers(0, 2**63 - 1)


def numbered(count):
    """Example i has input (i, 2i), label i and client ci."""
    labels = torch.arange(count)
    inputs = torch.stack([labels, 2 * labels], dim=1).to(torch.float32)
    return Examples(inputs, labels, tuple(f"c{i}" for i in range(count)))


def test_subset_keeps_input_label_and_client_together():
    part = numbered(5).subset(torch.tensor([4, 1]))
    assert len(part) == 2
    assert part.inputs.tolist() == [[4, 8], [1, 2]]
    assert part.labels.tolist() == [4, 1]
    assert part.clients == ("c4", "c1")


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        Examples(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        Examples(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), ("a",))
    with pytest.raises(ValueError, match="float32"):
        Examples(torch.zeros(2, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))


def test_bytes_become_brightness_and_other_numbers_stay():
    assert as_inputs(np.array([[0, 51, 255]], dtype=np.uint8)).tolist() == [[0, pytest.approx(0.2), 1]]
    assert as_inputs(np.array([[-3, 300]], dtype=">i2")).tolist() == [[-3, 300]]
    assert np.isinf(as_inputs(np.array([[1e300]]))).all()


@given(st.integers(0, 40), st.floats(0, 1, exclude_max=True), SEEDS)
def test_holdout_parts_the_examples(count, share, seed):
    train, held = split_holdout(numbered(count), share, seed)
    assert sorted(train.labels.tolist() + held.labels.tolist()) == list(range(count))
    assert train.labels.tolist() == sorted(train.labels.tolist())
    again, _ = split_holdout(numbered(count), share, seed)
    assert again.clients == train.clients
    if share == 0:
        assert len(held) == 0
    elif count > 1:
        assert len(train) >= 1
        assert len(held) == pytest.approx(count * share, abs=1)
        assert len(held) >= 1


@pytest.mark.parametrize("holdout", [0.0, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("validation", [0.0, 0.01, 0.3, 0.9])
def test_how_many_are_trained_on_is_told_without_the_examples(holdout, validation):
    """Whoever estimates work counts as the split does: holdout first, validation of the rest."""
    for count in (0, 1, 2, 3, 10, 37):
        train, _ = split_holdout(split_holdout(numbered(count), holdout, 0)[0], validation, 1)
        data = Data(source="digits", holdout=holdout, validation=validation)
        assert count_sides(count, None, data)[1] == len(train)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_holdout_share_out_of_range(share):
    with pytest.raises(ValueError, match="share"):
        split_holdout(numbered(3), share, 0)


@given(st.integers(0, 20), st.integers(1, 7), st.integers(0, 3), SEEDS)
def test_each_epoch_has_every_example_once(count, batch_size, epochs, seed):
    got = list(batches(numbered(count), batch_size=batch_size, epochs=epochs, seed=seed))
    labels = torch.cat([label for _, label in got]).tolist() if got else []
    for epoch in range(epochs):
        assert sorted(labels[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert all(torch.equal(inputs[:, 0].long(), label) and len(label) <= batch_size for inputs, label in got)
    again = list(batches(numbered(count), batch_size=batch_size, epochs=epochs, seed=seed))
    assert [label.tolist() for _, label in again] == [label.tolist() for _, label in got]


@given(st.integers(0, 70), st.integers(1, 20), st.integers(0, 3))
def test_a_last_batch_of_one_joins_the_batch_before_it(count, batch_size, epochs):
    """And the count of steps that server and replay go by says so too."""
    kinds = {"batch_size": batch_size, "epochs": epochs, "seed": 7}
    usual = [labels for _, labels in batches(numbered(count), **kinds)]
    merged = [labels for _, labels in batches(numbered(count), **kinds, merges_single=True)]
    assert torch.equal(torch.cat([*usual, torch.empty(0)]), torch.cat([*merged, torch.empty(0)]))
    if count % batch_size == 1 and batch_size > 1 and count > 1:
        assert [len(one) for one in merged] == ([batch_size] * (count // batch_size - 1) + [batch_size + 1]) * epochs
    else:
        assert [len(one) for one in merged] == [len(one) for one in usual]
    told = Assignment(seed=7, hyper=Hyper(batch_size=batch_size, local_epochs=epochs), values={MERGES_SINGLE: True})
    assert count_steps(told, count) == len(merged)
    assert max(map(len, merged), default=0) <= told.largest_batch
    sizes = steps_by_size(count, batch_size, len(merged), merges_single=True) if count else {}
    assert {size: times for size, times in sizes.items() if times} == Counter(map(len, merged))


def test_epochs_and_seeds_differ_in_order():
    def order(seed):
        return [label.tolist() for _, label in batches(numbered(50), batch_size=50, epochs=2, seed=seed)]

    first, second = order(1)
    assert first != second
    assert first != order(2)[0]


def test_batches_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    list(batches(numbered(9), batch_size=2, epochs=2, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_no_batch_of_nothing():
    with pytest.raises(ValueError, match="batch_size"):
        next(batches(numbered(3), batch_size=0, epochs=1, seed=0))


@given(st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_numpy_draws_the_order_of_torch(count, seed):
    """A board without torch holds out the very examples that one with torch does."""
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert shuffled_order(count, seed).tolist() == expected.tolist()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.9])
def test_numpy_holds_out_what_torch_holds_out(share):
    for count in (1, 2, 37, 1000):
        examples = numbered(count)
        arrays = Arrays(examples.inputs.numpy(), examples.labels.numpy(), examples.clients)
        expected = split_holdout(examples, share, 0)[1]
        found = select_held_out(arrays, share)
        assert (found.labels.tolist(), found.clients) == (expected.labels.tolist(), expected.clients)


def test_bytes_are_scaled_as_torch_scales_them():
    every = np.arange(256, dtype=np.uint8)[None]
    assert as_inputs(every).tolist() == torch.from_numpy(every).to(torch.float32).div_(255).tolist()

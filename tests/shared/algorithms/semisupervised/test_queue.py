"""The two-level queue: first in, first out; empty slots count for nothing; labels and marks move along."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.algorithms.semisupervised.losses import References, contrast, unit_rows
from shared.algorithms.semisupervised.queue import Queue, Ring


def numbered(first: int, count: int) -> References:
    """Return references whose three parts all tell their number."""
    numbers = torch.arange(first, first + count)
    return References(numbers[:, None].float().expand(count, 2), numbers, numbers % 2 == 0)


def held(ring: Ring) -> list[int]:
    """Return the numbers that a ring holds; their parts agree."""
    there = ring.references()
    assert there.projections[:, 0].tolist() == there.labels.tolist()
    assert there.confident.tolist() == [number % 2 == 0 for number in there.labels.tolist()]
    return sorted(there.labels.tolist())


@given(st.integers(1, 7), st.lists(st.integers(0, 11), max_size=6))
def test_a_ring_holds_the_last_that_were_pushed(capacity, batches):
    """Through wraps, and with batches larger than it: what a list cut at its front would hold."""
    ring, pushed = Ring.empty(capacity, 2), 0
    for count in batches:
        ring = ring.push(numbered(pushed, count))
        pushed += count
        assert held(ring) == list(range(max(0, pushed - capacity), pushed))
        assert held(Ring.from_tree(ring.tree("r/"), "r/")) == held(ring)


def test_a_ring_without_room_holds_nothing():
    assert held(Ring.empty(0, 2).push(numbered(0, 3))) == []


def test_empty_slots_have_no_part_in_the_sum():
    """Counted as zeros, they would raise the loss."""
    anchors = unit_rows(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)))
    labels = torch.tensor([0, 1, 0, 1])
    current = References(anchors, labels, torch.ones(4, dtype=torch.bool))
    queue = Queue(Ring.empty(8, 2), Ring.empty(8, 2))
    assert torch.equal(
        contrast(anchors, labels, queue.with_current(current), 0.2), contrast(anchors, labels, current, 0.2)
    )
    cleared = queue.push_unlabelled(numbered(0, 5)).after_session()
    assert torch.equal(
        contrast(anchors, labels, cleared.with_current(current), 0.2), contrast(anchors, labels, current, 0.2)
    )


def test_unlabelled_entries_push_no_labelled_one_out_and_end_with_the_session():
    queue = Queue(Ring.empty(3, 2), Ring.empty(4, 2)).push_labelled(numbered(0, 3))
    for step in range(5):
        queue = queue.push_unlabelled(numbered(10 * step, 4))
    assert (held(queue.labelled), held(queue.unlabelled)) == ([0, 1, 2], [40, 41, 42, 43])
    assert len(queue.with_current(numbered(90, 2)).labels) == 9
    after = Queue.from_tree(queue.after_session().tree())
    assert (held(after.labelled), held(after.unlabelled)) == ([0, 1, 2], [])

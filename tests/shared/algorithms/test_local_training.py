"""Training in stretches: epochs are told apart, and the loss is that of all of them."""

from __future__ import annotations

import pytest
import torch

from shared.algorithms.fedavg import descend_batches
from shared.algorithms.local_training import Tally, epochs
from shared.protocol.messages import Assignment, Hyper
from tests.shared.algorithms.dropouts import network
from tests.shared.algorithms.sessions import Own, examples


def own(count: int, batch_size: int, local_epochs: int) -> Own:
    hyper = Hyper(batch_size=batch_size, local_epochs=local_epochs, learning_rate=0.05)
    return Own(examples((1, 6, 6), count), Assignment(seed=1, hyper=hyper))


@pytest.mark.parametrize(
    ("count", "batch_size", "local_epochs"), [(7, 3, 3), (6, 3, 2), (1, 4, 4), (5, 9, 1), (4, 2, 0)]
)
def test_every_epoch_has_every_example_once(count, batch_size, local_epochs):
    """Also where its last batch is smaller, and where one batch holds them all."""
    batches = own(count, batch_size, local_epochs)
    parts = [[labels for _, labels in epoch] for epoch in epochs(batches)]
    assert [sum(map(len, part)) for part in parts] == local_epochs * [count]
    flat = [labels for part in parts for labels in part]
    for got, (_, labels) in zip(flat, batches, strict=True):
        assert torch.equal(got, labels)


def test_batches_that_end_early_are_an_epoch_cut_short():
    class Short(Own):
        def __iter__(self):
            return iter(list(super().__iter__())[:4])

    whole = own(7, 3, 3)
    assert [len(list(epoch)) for epoch in epochs(Short(whole.data, whole.told))] == [3, 1]


def test_the_tally_is_the_loss_of_one_long_training():
    """Without momentum, which begins anew, stretches make no difference."""
    batches, one, two = own(8, 3, 3), network(), network()
    hyper, tally = batches.told.hyper, Tally()
    assert tally.mean is None
    one.layers[9].p = two.layers[9].p = 0.0
    expected = descend_batches(one.layers, list(one.layers.named_parameters()), batches, hyper, one.objective)
    for epoch in epochs(batches):
        tally.train(two, epoch, hyper)
    assert tally.mean == pytest.approx(expected)
    assert tally.seen == 24
    assert all(torch.equal(leaf, two.tree()[key]) for key, leaf in one.tree().items())

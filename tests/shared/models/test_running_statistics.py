"""Running statistics measured anew: the mean over batches, of a network that stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from shared.models.running_statistics import measure_batch, measure_statistics, statistic_names


def normed() -> nn.Sequential:
    """Return layers with BatchNorm behind a convolution and a linear one."""
    torch.manual_seed(4)
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)),
        *(nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 2)),
    )


def drawn(count: int = 3) -> list[Tensor]:
    return [2 * torch.randn(size, 2, 4, 4) + 1 for size in (6, 4, 9)[:count]]


def hollow() -> nn.Sequential:
    with torch.device("meta"):
        return normed()


def test_by_hand():
    """Batches [0, 2] and [4, 10]: means 1 and 7, so 4; unbiased variances 2 and 18, so 10."""
    network = nn.Sequential(nn.BatchNorm1d(1))
    batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [10.0]])]
    after = measure_statistics(network, dict(network.state_dict()), batches)
    assert (after["0.running_mean"].item(), after["0.running_var"].item()) == (4.0, 10.0)
    assert statistic_names(network) == ("0.running_mean", "0.running_var")


def test_it_is_torchs_update_bn_to_the_bit_and_changes_nothing_else():
    network, batches = normed(), drawn()
    before = {key: leaf.clone() for key, leaf in network.state_dict().items()}
    found = measure_statistics(hollow(), before, iter(batches))
    update_bn(batches, network)
    for key, leaf in network.state_dict().items():
        assert torch.equal(found[key], before[key] if key.endswith("num_batches_tracked") else leaf), key
    assert all(torch.equal(leaf, before[key]) for key, leaf in normed().state_dict().items()), "what it was given"


def test_batch_by_batch_is_all_at_once_whatever_was_stored_and_nothing_is_dropped():
    network = nn.Sequential(*normed(), nn.Dropout(0.5))
    stored = {key: leaf.clone() for key, leaf in network.state_dict().items()}
    for key in statistic_names(network):
        stored[key].fill_(float("nan"))
    tree, other = stored, {"elsewhere": torch.ones(1)}
    for before, inputs in enumerate(batches := drawn()):
        outputs, tree = measure_batch(network, {**tree, **other}, inputs, before)
        assert outputs.all(), "a dropped one would be zero"
    whole = measure_statistics(network, stored, batches)
    assert all(torch.equal(tree[key], leaf) for key, leaf in whole.items())
    assert tree["elsewhere"] is other["elsewhere"]
    assert stored["1.running_mean"].isnan().all()


def test_the_network_is_as_it_was_also_after_an_error():
    """In its mode, with its momentum; one value a channel has no variance."""
    network = normed().eval()
    network[5].train()
    with pytest.raises(ValueError, match="more than 1 value"):
        measure_batch(network, dict(network.state_dict()), torch.ones(1, 2, 4, 4))
    assert [layer.training for layer in network] == [place == 5 for place in range(8)]
    assert [network[place].momentum for place in (1, 5)] == [0.1, 0.3]


def test_what_keeps_no_statistics_stays_as_it_is():
    network = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    tree = dict(network.state_dict())
    assert statistic_names(network) == ()
    assert measure_statistics(network, tree, [torch.randn(4, 3)]).keys() == tree.keys()
    assert measure_statistics(normed(), tree, []) is tree

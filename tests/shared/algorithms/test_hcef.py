"""HCEF device half: number of steps, skipped steps, reported gradients."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.algorithms.base import Cohort
from shared.algorithms.fedavg import descend_batches, fedavg
from shared.algorithms.hcef import assigned_share, gradient_moments, hcef, moments_of, steps_taken
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import Own

SEEDS = 5000


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def trained(algorithm, model, data, hyper, share: float = 1.0, seed: int = 3):
    """Return what one device's round comes to, from the usual parameters."""
    start = {key: leaf.clone() for key, leaf in model().tree().items()}
    cohort = Cohort(("c",), hyper, seed)
    told = algorithm.assign(algorithm.init(model(), 5), cohort, {"c": {"steps": share}}, 1)["c"]
    _, result = algorithm.local(model(), State(), start, Own(data, told), told)
    return told, result


@pytest.mark.parametrize("change", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=repr)
def test_with_all_steps_and_the_whole_change_it_is_fedavg_bit_for_bit(play, fleet, hyper, change):
    """Three steps of 16 examples are three epochs of every device here."""
    hyper = msgspec.structs.replace(hyper, batch_size=16, local_epochs=3, **change)
    ours = play(hcef(local_steps=3, weighting="examples"), fleet, 3, hyper).tree
    assert equal(ours, play(fedavg(), fleet, 3, hyper).tree)


def test_every_device_counts_alike_unless_the_plan_says_otherwise(fleet, model, hyper):
    assert trained(hcef(), model, fleet["c"], hyper)[1].weight == 1.0
    assert trained(hcef(weighting="examples"), model, fleet["c"], hyper)[1].weight == 16.0


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_steps_are_binomial(share):
    """Of 5 trials: every count as often as it should be, to four standard deviations of its frequency."""
    counts = Counter(steps_taken(seed, 5, share) for seed in range(SEEDS))
    for steps in range(6):
        often = math.comb(5, steps) * share**steps * (1 - share) ** (5 - steps)
        assert counts[steps] / SEEDS == pytest.approx(often, abs=4 * math.sqrt(often / SEEDS))


def test_all_or_nothing_is_no_matter_of_chance():
    assert {steps_taken(seed, 7, 1.0) for seed in range(200)} == {7}
    assert {steps_taken(seed, 7, 0.0) for seed in range(200)} == {0}


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.75])
def test_even_steps_are_as_many_in_the_mean_and_never_a_whole_one_off(share):
    counts = [steps_taken(seed, 5, share, "even") for seed in range(SEEDS)]
    assert {math.floor(5 * share), math.ceil(5 * share)} >= set(counts)
    assert sum(counts) / SEEDS == pytest.approx(5 * share, abs=4 * 0.5 / math.sqrt(SEEDS))


def test_even_steps_are_all_or_nothing_where_the_share_is():
    assert {steps_taken(seed, 7, 1.0, "even") for seed in range(200)} == {7}
    assert {steps_taken(seed, 7, 0.0, "even") for seed in range(200)} == {0}


def test_kept_momentum_goes_on_where_the_last_task_left_it(fleet, model, hyper):
    """Two tasks are the steps of one long one whose parameters are set in its middle; a task without steps keeps it."""
    hyper = msgspec.structs.replace(hyper, momentum=0.9)
    algorithm = hcef(local_steps=2, momentum="kept")
    start = {key: leaf.clone() for key, leaf in model().tree().items()}
    state, flow, data = State(), dict[str, torch.Tensor](), fleet["c"]
    for number, share in enumerate((1.0, 0.0, 1.0), 1):
        cohort = Cohort(("c",), hyper, 3)
        told = algorithm.assign(algorithm.init(model(), 5), cohort, {"c": {"steps": share}}, number)["c"]
        before = {key: leaf.clone() for key, leaf in state.tree.items()}
        given = state
        state, result = algorithm.local(model(), given, start, Own(data, told), told)
        assert equal(given.tree, before), "what is on the disk would differ from what the task began with"
        network = model()
        weights = list(network.layers.named_parameters())
        count = int(result.metrics["steps_taken"])
        descend_batches(
            network.layers, weights, islice(Own(data, told), count), told.hyper, network.objective, momenta=flow
        )
        assert equal(result.tree, tree.subtract(network.tree(), start))
        assert equal(state.tree, flow)
    assert flow


def test_a_skipped_step_touches_nothing(fleet, model, hyper):
    """Steps that are taken are the first so many of plain SGD, with their momentum; of none nothing moves."""
    hyper = msgspec.structs.replace(hyper, momentum=0.9, weight_decay=0.01)
    seen = set()
    for seed in range(12):
        told, result = trained(hcef(local_steps=4), model, fleet["c"], hyper, 0.5, seed)
        count = int(result.metrics["steps_taken"])
        seen.add(count)
        plain = model()
        plain.layers.train()
        weights = list(plain.layers.named_parameters())
        loss = descend_batches(plain.layers, weights, islice(Own(fleet["c"], told), count), told.hyper, plain.objective)
        assert equal(result.tree, tree.subtract(plain.tree(), model().tree()))
        assert result.loss == loss
        if not count:
            assert result.loss is None
            assert not any(leaf.any() for leaf in result.tree.values())
    assert {0, 4} <= seen or len(seen) >= 4


def test_all_steps_are_plain_sgd_of_the_textbook(fleet, model, hyper):
    hyper = msgspec.structs.replace(hyper, momentum=0.9)
    told, result = trained(hcef(local_steps=4), model, fleet["c"], hyper)
    layers = model().layers
    before = {key: leaf.clone() for key, leaf in layers.state_dict().items()}
    sgd = torch.optim.SGD(layers.parameters(), hyper.learning_rate, hyper.momentum)
    for inputs, labels in islice(Own(fleet["c"], told), 4):
        sgd.zero_grad()
        nn.functional.cross_entropy(layers(inputs), labels).backward()
        sgd.step()
    assert equal(result.tree, tree.subtract(dict(layers.state_dict()), before))


def test_the_server_tells_as_many_gradients_as_the_device_computes(fleet, model, hyper):
    """So that a replay charges what a task really takes."""
    for seed in range(8):
        told, result = trained(hcef(local_steps=5, gradients=3), model, fleet["c"], hyper, 0.4, seed)
        assert told.allocation.local_steps == result.metrics["steps_taken"] + 3


def test_estimates_are_made_every_so_many_rounds(fleet, model, hyper):
    algorithm = hcef(local_steps=2, gradients=3, estimate_every=4)
    cohort, found = Cohort(("c",), hyper, 1), []
    for number in range(1, 10):
        told = algorithm.assign(algorithm.init(model(), 5), cohort, {}, number)["c"]
        start = {key: leaf.clone() for key, leaf in model().tree().items()}
        _, result = algorithm.local(model(), State(), start, Own(fleet["c"], told), told)
        found.append("sigma2" in result.metrics)
        assert told.allocation.local_steps == (5 if found[-1] else 2)
    assert found == [True, False, False, False, True, False, False, False, True]


def test_what_is_estimated_changes_nothing_of_what_is_trained(fleet, model, hyper):
    plain = trained(hcef(), model, fleet["c"], hyper, 0.6)[1]
    told = trained(hcef(gradients=4), model, fleet["c"], hyper, 0.6)[1]
    assert equal(plain.tree, told.tree)
    assert told.metrics.keys() == {"sigma2", "g2", "steps_taken"}
    assert plain.metrics.keys() == {"steps_taken"}


def test_running_statistics_are_those_of_the_training_alone(fleet, hyper):
    def normed():
        torch.manual_seed(1)
        return Model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), {}, (6,))

    plain, told = (trained(hcef(gradients=count), normed, fleet["c"], hyper)[1] for count in (0, 4))
    assert equal(plain.tree, told.tree)
    assert told.tree["0.num_batches_tracked"] == 5


def test_moments_are_unbiased_on_gaussian_gradients():
    """5000 estimates of three gradients each, of a Gaussian in five dimensions: to four standard errors."""
    generator = torch.Generator().manual_seed(7)
    mean = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5])
    found = torch.tensor(
        [moments_of(mean + 0.6 * torch.randn(3, 5, generator=generator), 0.0) for _ in range(SEEDS)],
        dtype=torch.float64,
    )
    errors = found.std(0) / math.sqrt(SEEDS)
    expected = torch.tensor([5 * 0.36, float(mean @ mean)], dtype=torch.float64)
    assert torch.all((found.mean(0) - expected).abs() <= 4 * errors)
    naive = expected[1] + expected[0] / 3
    assert naive - found[:, 1].mean() > 15 * errors[1]  # what |mean|^2 alone would be


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=2, max_size=6), st.floats(0, 0.5))
def test_moments_are_never_negative(gradients, common):
    sigma2, g2 = moments_of(torch.tensor(gradients), common)
    assert sigma2 >= 0
    assert g2 >= 0


@pytest.mark.parametrize(("batch_size", "count"), [(4, 3), (4, 6), (16, 3), (3, 2)])
def test_minibatches_of_an_epoch_and_of_several_are_unbiased(fleet, model, hyper, batch_size, count):
    """Of 16 examples: parts of one epoch, or the first of several, against what all of them say."""
    data, layers = fleet["c"], model().layers
    weights = list(layers.parameters())

    def gradient(inputs, labels):
        loss = nn.functional.cross_entropy(layers(inputs), labels)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)]).double()

    each = torch.stack([gradient(data.inputs[i : i + 1], data.labels[i : i + 1]) for i in range(16)])
    whole = each.mean(0)
    spread = float((each - whole).square().sum()) / 15
    expected = (spread * (1 / batch_size - 1 / 16), float(whole @ whole))
    hyper = msgspec.structs.replace(hyper, batch_size=batch_size, local_epochs=count)
    batches = [Own(data, Assignment(seed=seed, hyper=hyper)) for seed in range(200)]
    found = torch.tensor(
        [gradient_moments(Model(layers), one, batch_size, count) for one in batches], dtype=torch.float64
    )
    errors = found.std(0) / math.sqrt(len(found))
    assert torch.all((found.mean(0) - torch.tensor(expected)).abs() <= 4 * errors + 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 0},
        {"gradients": 1},
        {"gradients": -2},
        {"weighting": "some"},
        {"estimate_every": 0},
        {"local_steps": 2.5},
        {"draw": "coin"},
        {"momentum": "lost"},
    ],
)
def test_settings_that_no_round_can_use_are_refused(options):
    with pytest.raises((ValueError, TypeError)):
        hcef(**options)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True, [0.5], math.nan])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(WireError):
        assigned_share({"steps": share}, "steps")
    assert assigned_share({}, "steps") == 1.0

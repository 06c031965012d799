"""FedAvg against the textbook, and the parts of it that every federated method here shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

from shared.algorithms.base import Cohort, Result
from shared.algorithms.fedavg import fedavg
from shared.data.examples import batches
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, StepOptions, derive_seed
from shared.tensors import mixed_precision
from shared.tensors.tree import Mean, State


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def make_optimizer(layers: nn.Module, hyper: Hyper) -> torch.optim.Optimizer:
    step, decay = hyper.step, hyper.weight_decay
    if step.optimizer == "sgd":
        return torch.optim.SGD(layers.parameters(), hyper.learning_rate, hyper.momentum, weight_decay=decay)
    kind = torch.optim.Adam if step.optimizer == "adam" else torch.optim.AdamW
    return kind(layers.parameters(), hyper.learning_rate, (step.beta1, step.beta2), step.eps, decay)


def train(layers: nn.Module, data, hyper: Hyper, seed: int) -> None:
    """Train with torch's optimizers, as anybody would write it."""
    optimizer, step = make_optimizer(layers, hyper), hyper.step
    for inputs, labels in batches(data, batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=seed):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bfloat16"):
            loss = functional.cross_entropy(layers(inputs), labels)
        loss.backward()
        if step.clip_norm:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), step.clip_norm)
        optimizer.step()


def textbook(layers: nn.Module, fleet, hyper: Hyper, rounds: int) -> dict[str, torch.Tensor]:
    """Algorithm 1 of the paper with C = 1, in one function and one process."""
    server = {key: leaf.clone() for key, leaf in layers.state_dict().items()}
    for number in range(1, rounds + 1):
        total = {key: torch.zeros_like(leaf) for key, leaf in server.items()}
        for device in sorted(fleet):
            layers.load_state_dict(server)
            train(layers, fleet[device], hyper, derive_seed(11, number, device))
            for key, leaf in layers.state_dict().items():
                total[key].add_(leaf - server[key], alpha=len(fleet[device]))
        examples = sum(map(len, fleet.values()))
        server = {key: leaf + total[key] / examples for key, leaf in server.items()}
    return server


STEPS = [
    {"optimizer": "adam"},
    {"optimizer": "adamw", "beta1": 0.5, "eps": 1e-3, "clip_norm": 0.1},
    {"clip_norm": 0.1},
    {"precision": "bfloat16", "clip_norm": 1.0},
]
CHANGES = [
    *({}, {"momentum": 0.9, "weight_decay": 0.01}, {"batch_size": 100}),
    *({"weight_decay": 0.01, "step_options": StepOptions(**step)} for step in STEPS),
]


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_is_the_textbooks_bit_for_bit(play, fleet, model, hyper, change, monkeypatch):
    """Three devices of 5, 9 and 16 examples over three rounds: plain, with momentum and decay, with full batches.

    And with each option of a step, also on a processor that does not compute in 16 bits itself.
    """
    monkeypatch.setattr(mixed_precision, "computes_in", lambda _precision, _device: True)
    hyper = msgspec.structs.replace(hyper, **change)
    assert equal(play(fedavg(), fleet, 3, hyper).tree, textbook(model().layers, fleet, hyper, 3))


def test_one_device_is_plain_sgd(play, fleet, model, hyper):
    """A fleet of one has nothing to average: a round of one epoch is that epoch (w + (w_1 - w) = w_1 to rounding)."""
    hyper = msgspec.structs.replace(hyper, local_epochs=1)
    layers = model().layers
    train(layers, fleet["c"], hyper, derive_seed(11, 1, "c"))
    got = play(fedavg(), {"c": fleet["c"]}, 1, hyper).tree
    torch.testing.assert_close(got, dict(layers.state_dict()), rtol=1e-6, atol=1e-7)


def test_the_order_of_absorbing_matters_only_in_the_last_bits(play, fleet):
    """So the caller absorbs in device order: the same order gives the same bits, any order the same mean."""
    orders = ["".join(order) for order in permutations("abc")]
    first = play(fedavg(), fleet, 2, order="abc").tree
    assert equal(play(fedavg(), fleet, 2).tree, first)
    for order in orders:
        torch.testing.assert_close(play(fedavg(), fleet, 2, order=order).tree, first, rtol=1e-5, atol=1e-6)


def test_a_device_half_changes_nothing_that_it_was_given(fleet, model, hyper, own):
    """The start may be views of a file and is needed again for the difference; the device state is handed back."""
    start = {key: leaf.clone() for key, leaf in model().tree().items()}
    kept = {key: leaf.clone() for key, leaf in start.items()}
    state = State({}, {"round": 1})
    told = Assignment(seed=1, hyper=hyper)
    after, result = fedavg().local(model(), state, start, own(fleet["b"], hyper, 1), told)
    assert after is state
    assert equal(start, kept)
    assert (result.weight, result.num_examples, result.coverage, result.metrics) == (9.0, 9, {}, {})
    assert not any(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in result.tree.values())


def test_loss_is_the_mean_over_examples(fleet, model, hyper, own):
    """One step over all: the loss before it. Batches of 4, 4 and 1 at a vanishing rate: 4 : 4 : 1, the same."""
    data = fleet["b"]
    expected = functional.cross_entropy(model().layers(data.inputs), data.labels).item()
    for batch_size in (9, 4):
        told = Assignment(seed=1, hyper=Hyper(batch_size=batch_size, learning_rate=1e-9))
        result = fedavg().local(model(), State(), model().tree(), own(data, told.hyper, 1), told)[1]
        assert result.loss == pytest.approx(expected, rel=1e-5)


def test_zero_epochs_train_nothing(fleet, model, hyper, own):
    """No loss is reported, as there is none, and nothing moves."""
    told = Assignment(seed=1, hyper=msgspec.structs.replace(hyper, local_epochs=0))
    result = fedavg().local(model(), State(), model().tree(), own(fleet["b"], told.hyper, 1), told)[1]
    assert result.loss is None
    assert all(not leaf.any() for leaf in result.tree.values())


def test_buffers_travel_with_the_parameters(hyper, own, fleet):
    """BatchNorm's statistics and its integer counter: 2 batches an epoch, 2 epochs, so 4 steps on either device."""
    network = Model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))
    algorithm = fedavg()
    state = algorithm.init(network, 0)
    mean = Mean()
    told = Assignment(seed=1, hyper=hyper)
    for _ in range(2):
        result = algorithm.local(network, State(), state.tree, own(fleet["b"].subset(torch.arange(8)), hyper, 1), told)[
            1
        ]
        mean = algorithm.absorb(mean, "a", told, result)
    moved = algorithm.aggregate(state, mean).tree
    assert moved["0.num_batches_tracked"].item() == 4
    assert moved["0.num_batches_tracked"].dtype == torch.int64
    assert moved["0.running_mean"].any()


def test_what_nobody_holds_stays():
    """Masks 100 and 110 with weights 1 and 3: moved by 2, by 4, by nothing; a leaf that nobody sent stays as well."""
    state = State({"w": torch.tensor([10.0, 10.0, 10.0]), "quiet": torch.tensor([5.0])}, {"round": 1})
    told = Assignment(seed=1, hyper=Hyper())
    mean = Mean()
    for weight, move, mask in ((1.0, [5.0, 9.0, 9.0], [1, 0, 0]), (3.0, [1.0, 4.0, 9.0], [1, 1, 0])):
        part = Result({"w": torch.tensor(move)}, weight, 1, coverage={"w": torch.tensor(mask, dtype=torch.bool)})
        mean = fedavg().absorb(mean, "a", told, part)
    moved = fedavg().aggregate(state, mean)
    assert moved.tree["w"].tolist() == [12.0, 14.0, 10.0]
    assert moved.tree["quiet"].tolist() == [5.0]
    assert moved.facts == {"round": 1}


def test_the_server_state_is_not_the_models_storage(model):
    """Training a model afterwards does not move the server."""
    network = model()
    state = fedavg().init(network, 0)
    for leaf in network.tree().values():
        leaf.zero_()
    assert all(leaf.any() for key, leaf in state.tree.items() if key.endswith("weight"))


def test_seeds_are_the_same_for_ever():
    """Recorded numbers: a change here would change every run that is resumed or replayed.."""
    assert derive_seed(1, 2, "pi-4") == 7328466746170683813
    numbers = {derive_seed(seed, number, device) for seed in range(5) for number in range(5) for device in "abc"}
    assert len(numbers) == 75
    assert all(0 <= number < 1 << 63 for number in numbers)


def test_assign_alike_tells_each_device_its_own(hyper):
    """The plan's hyperparameters for all, a seed of its own for each, an allocation for whom there is one."""
    cohort = Cohort(("a", "b"), hyper, seed=11)
    told = fedavg().assign(State(), cohort, {"b": {"rho": 0.5}, "gone": {"rho": 1.0}}, 4)
    assert told == {
        "a": Assignment(seed=derive_seed(11, 4, "a"), hyper=hyper),
        "b": Assignment(seed=derive_seed(11, 4, "b"), hyper=hyper, values={"rho": 0.5}),
    }


def test_a_baseline_is_the_record_with_one_field_replaced(play, fleet):
    """Replacing `aggregate` by one that stays put leaves the model where it began."""
    still = replace(fedavg(), aggregate=lambda state, _mean: state)
    assert equal(play(still, fleet, 2).tree, play(still, fleet, 1).tree)

"""SCAFFOLD against algorithm 1 of the paper in a plain loop, and control variates whose update was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shared.algorithms.base import Algorithm, Cohort
from shared.algorithms.fedavg import fedavg
from shared.algorithms.scaffold import scaffold
from shared.data.examples import Examples, batches
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.models.build import build_initial
from shared.protocol.messages import Assignment, Hyper, derive_seed
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.server_optimizers.textbook import require_close
from tests.shared.algorithms.sessions import MLP, Own

SEED = 11
SAMPLED = ("abc", "ab", "c", "bc", "a", "abc")
"""Devices of each round."""


def play(
    algorithm: Algorithm,
    fleet: Mapping[str, Examples],
    hyper: Hyper,
    cohorts: Sequence[str],
    lost: Mapping[int, str] | None = None,
    kept: dict[str, State] | None = None,
) -> State:
    """Play rounds with these devices; updates that are `lost` in a round never reach the server."""
    state, devices = algorithm.init(build_initial(MLP, 5), 5), {} if kept is None else kept
    for number, names in enumerate(cohorts, 1):
        told = algorithm.assign(state, Cohort(tuple(names), hyper, SEED, len(cohorts)), {}, number)
        mean = algorithm.empty(state)
        for device in names:
            start = {name: leaf.clone() for name, leaf in algorithm.broadcast(state, device, told[device]).items()}
            own = Own(fleet[device], told[device])
            before = devices.get(device, State())
            devices[device], result = algorithm.local(build_initial(MLP, 6), before, start, own, told[device])
            algorithm.check_update(told[device], start, result.tree)
            if device not in (lost or {}).get(number, ""):
                mean = algorithm.absorb(mean, device, told[device], result)
        state = algorithm.aggregate(state, mean)
    return state


def textbook(
    layers: nn.Module,
    fleet: Mapping[str, Examples],
    hyper: Hyper,
    cohorts: Sequence[str],
    server_rate: float = 1.0,
    *,
    by_examples: bool = False,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return x and c after algorithm 1 with option II: K steps of SGD as written there, arrays of 64 bits."""
    x = {name: leaf.numpy().astype(np.float64) for name, leaf in layers.state_dict().items()}
    c = {name: np.zeros_like(leaf) for name, leaf in x.items()}
    own = {device: {name: np.zeros_like(leaf) for name, leaf in x.items()} for device in fleet}
    for number, names in enumerate(cohorts, 1):
        moved, changed = ({name: np.zeros_like(leaf) for name, leaf in x.items()} for _ in "xc")
        weights = {device: len(fleet[device]) if by_examples else 1 for device in names}
        for device in names:
            y, steps, seed = dict(x), 0, derive_seed(SEED, number, device)
            for inputs, labels in batches(
                fleet[device], batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=seed
            ):
                layers.load_state_dict({name: torch.tensor(leaf, dtype=torch.float32) for name, leaf in y.items()})
                layers.zero_grad()
                functional.cross_entropy(layers(inputs), labels).backward()
                for name, weight in layers.named_parameters():
                    gradient = weight.grad.numpy().astype(np.float64) + hyper.weight_decay * y[name]
                    y[name] = y[name] - hyper.learning_rate * (gradient - own[device][name] + c[name])
                steps += 1
            for name, leaf in y.items():
                after = own[device][name] - c[name] + (x[name] - leaf) / (steps * hyper.learning_rate)
                moved[name] += weights[device] / sum(weights.values()) * (leaf - x[name])
                changed[name] += after - own[device][name]
                own[device][name] = after
        x = {name: leaf + server_rate * moved[name] for name, leaf in x.items()}
        c = {name: leaf + changed[name] / len(fleet) for name, leaf in c.items()}
    return x, c


@pytest.mark.parametrize("cohorts", [4 * ("abc",), SAMPLED], ids=["all", "sampled"])
@pytest.mark.parametrize("options", [{}, {"server_learning_rate": 0.5, "weighting": "examples"}], ids=repr)
def test_some_rounds_are_the_textbooks(fleet, model, hyper, cohorts, options):
    """Model and control variate, with all devices in each round and with a few; N is 3 from the first round on."""
    hyper = msgspec.structs.replace(hyper, weight_decay=0.01)
    rate, by_examples = options.get("server_learning_rate", 1.0), "weighting" in options
    x, c = textbook(model().layers, fleet, hyper, cohorts, rate, by_examples=by_examples)
    for known in (0, 3):
        state = play(scaffold(devices=known, **options), fleet, hyper, cohorts)
        require_close(state.tree, x)
        for name, leaf in c.items():
            assert np.abs(state.tree[f"control/{name}"].double().numpy() - leaf).max() <= 1e-6, name
            assert np.abs(leaf).max() > 1e-2


def test_c_is_the_mean_of_the_control_variates_that_it_contains(fleet, hyper):
    """Of the devices that have taken part, at any round; also where updates were lost after training."""
    lost = {1: "b", 3: "c", 4: "ab"}
    cohorts = ("ab", "abc", "bc", "ab", "abc", "abc")
    for rounds in range(1, 7):
        kept: dict[str, State] = {}
        state = play(scaffold(), fleet, hyper, cohorts[:rounds], lost, kept)
        own = []
        for device, held in kept.items():
            seed = state.facts.get(f"control/{device}")
            if seed is not None:
                prefix = {held.facts["last_seed"]: "control/", held.facts.get("before_last_seed"): "earlier/"}[seed]
                own.append({name: held.tree[prefix + name] for name in build_initial(MLP, 5).tree()})
        for name in build_initial(MLP, 5).tree():
            expected = torch.stack([one[name] for one in own]).mean(0)
            torch.testing.assert_close(state.tree[f"control/{name}"], expected, rtol=1e-5, atol=1e-6)
    assert len(own) == 3


def test_the_first_round_is_fedavg_with_equal_weights(fleet, hyper):
    """All control variates are zero, so nothing is corrected yet."""
    state = play(scaffold(), fleet, hyper, ("abc",))
    averaged, mean = fedavg().init(build_initial(MLP, 5), 5), Mean()
    told = fedavg().assign(averaged, Cohort(tuple("abc"), hyper, SEED, 1), {}, 1)
    for device, one in told.items():
        own = Own(fleet[device], one)
        result = fedavg().local(build_initial(MLP, 6), State(), averaged.tree, own, one)[1]
        mean = fedavg().absorb(mean, device, one, replace(result, weight=1.0))
    for name, leaf in fedavg().aggregate(averaged, mean).tree.items():
        torch.testing.assert_close(state.tree[name], leaf, rtol=1e-6, atol=1e-7)


def test_a_device_without_a_step_changes_nothing(fleet, hyper):
    hyper = msgspec.structs.replace(hyper, local_epochs=0)
    begun = play(scaffold(), fleet, hyper, ())
    after = play(scaffold(), fleet, hyper, ("abc",))
    assert all(torch.equal(after.tree[name], leaf) for name, leaf in begun.tree.items())


def test_buffers_have_no_control_variate_and_are_averaged(hyper, own, fleet):
    network = Model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))
    network.layers[1].bias.requires_grad_(False)
    algorithm, mean = scaffold(server_learning_rate=0.5), Mean()
    state = algorithm.init(network, 0)
    assert {name for name in state.tree if "/" in name} == {
        f"control/{name}" for name in ("0.weight", "0.bias", "1.weight")
    }
    told = Assignment(seed=1, hyper=hyper)
    for device in "ab":
        start = {name: leaf.clone() for name, leaf in algorithm.broadcast(state, device, told).items()}
        batch = own(fleet["b"].subset(torch.arange(8)), hyper, 1)
        mean = algorithm.absorb(mean, device, told, algorithm.local(network, State(), start, batch, told)[1])
    moved = algorithm.aggregate(state, mean).tree
    assert moved["0.num_batches_tracked"].item() == 4
    assert torch.equal(moved["1.bias"], state.tree["1.bias"])
    assert not torch.equal(moved["control/1.weight"], state.tree["control/1.weight"])


def test_a_download_or_update_without_its_control_variate_is_refused(fleet, model, hyper):
    algorithm = scaffold()
    state = algorithm.init(model(), 5)
    told = algorithm.assign(state, Cohort(("a",), hyper, SEED, 1), {}, 1)["a"]
    down = algorithm.broadcast(state, "a", told)
    part = {name: leaf for name, leaf in down.items() if name != "control/1.bias"}
    with pytest.raises(WireError, match=naming("control/1.bias")):
        algorithm.local(model(), State(), part, Own(fleet["a"], told), told)
    with pytest.raises(WireError, match=naming("control/1.bias")):
        algorithm.check_update(told, down, part)


def test_momentum_is_refused(hyper):
    with pytest.raises(ConfigError, match=naming("hyper.momentum", 0.9)):
        scaffold().check_hyper(msgspec.structs.replace(hyper, momentum=0.9))

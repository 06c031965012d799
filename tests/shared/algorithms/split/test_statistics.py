"""A session of lightweight FedSL that measures running statistics: nothing is dropped, and nothing is trained."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from shared.algorithms.base import Algorithm
from shared.algorithms.split.fedsl import STATISTICS_OPTIONS, fedsl
from shared.models.running_statistics import measure_statistics, statistic_names
from shared.protocol.messages import STATISTICS, STATISTICS_BATCHES, Assignment
from tests.shared.algorithms.sessions import Driven, Fleet, drive

STEPS = 3
OPTIONS = {"cut": 2, "period": 4, "drop": 0.4, "sparsity": 0.5}


def trained() -> Fleet:
    """Return devices that have trained two rounds; BatchNorm and a Dropout are on both sides of the cut."""
    fleet = Fleet(fedsl(**OPTIONS), "normed", (12, 16))
    fleet.play()
    fleet.play()
    return fleet


def told(fleet: Fleet, *, aware: bool = True) -> dict[str, Assignment]:
    """Return what devices are told; one of before does not see the value that says what the session is for."""
    values = {STATISTICS: True} if aware else {}
    return {
        device: msgspec.structs.replace(one, steps=STEPS, values={**one.values, **values})
        for device, one in fleet.told(3).items()
    }


def measured(fleet: Fleet, algorithm: Algorithm, **how) -> Driven:
    """Drive a session in which the server measures, whatever the devices know of it."""
    split = algorithm.split
    instead = replace(algorithm, split=replace(split, serve=split.measure))
    own = told(fleet, **how)
    return drive(instead, fleet.skeleton, fleet.state, own, fleet.own(own), before=fleet.devices)


@pytest.mark.parametrize("aware", [True, False])
def test_the_servers_part_is_measured_on_all_features_and_moves_nothing(aware):
    """As `measure_statistics` of the uncut network's features does it; agents of before, too, take no step."""
    fleet = trained()
    start = {key: leaf.clone() for key, leaf in fleet.state.tree.items()}
    driven = measured(fleet, fedsl(**(OPTIONS | STATISTICS_OPTIONS)), aware=aware)
    top, ups = fleet.skeleton.above(2), driven.ups
    assert [set(up) for step in ups for up in step.values()] == [{"features", "labels"}] * 2 * STEPS
    sent = [step[device]["features"] for step in ups for device in sorted(step)]
    expected = measure_statistics(top, start, sent)
    names = statistic_names(fleet.skeleton.layers)
    assert driven.state.facts[STATISTICS_BATCHES] == 2 * STEPS
    for key, leaf in driven.state.tree.items():
        assert torch.equal(leaf, expected[key]), key
    assert not torch.equal(start["8.running_var"], expected["8.running_var"])
    assert all(torch.equal(driven.state.tree[key], start[key]) for key in start if key not in names)
    assert driven.downs == [{"a": {}, "b": {}}] * STEPS
    for device in "ab":
        result, state = driven.results[device], driven.devices[device]
        assert result.loss is None
        assert torch.equal(state.tree["mask"], fleet.devices[device].tree["mask"])
        if aware:
            assert result.metrics[STATISTICS_BATCHES] == STEPS
            assert set(result.tree) == set(statistic_names(fleet.skeleton.below(2)))
        else:
            assert STATISTICS_BATCHES not in result.metrics
            assert all(torch.equal(leaf, start[key]) for key, leaf in result.tree.items()), "not even its own"


def test_what_a_device_measures_is_of_its_own_batches():
    fleet = trained()
    driven = measured(fleet, fedsl(**(OPTIONS | STATISTICS_OPTIONS)))
    own = told(fleet)
    for device, batches in fleet.own(own).items():
        inputs = [one for _, (one, _) in zip(range(STEPS), batches, strict=False)]
        expected = measure_statistics(fleet.skeleton.below(2), fleet.state.tree, inputs)
        for key, leaf in driven.results[device].tree.items():
            assert torch.equal(leaf, expected[key])


def test_features_that_overflow_do_not_count():
    """A variance beyond floats would spoil all that is measured."""
    fleet, algorithm = trained(), fedsl(**(OPTIONS | STATISTICS_OPTIONS))

    def up(value: float) -> dict[str, torch.Tensor]:
        return {"features": value * torch.randn(4, 3, 4, 4), "labels": torch.zeros(4, dtype=torch.uint8)}

    ups = {"a": up(1.0), "b": up(1e30)}
    alone, _ = algorithm.split.measure(fleet.skeleton, fleet.state, {}, {"a": ups["a"]})
    both, downs = algorithm.split.measure(fleet.skeleton, fleet.state, {}, ups)
    assert both.facts[STATISTICS_BATCHES] == 1
    assert set(downs) == {"a", "b"}
    assert all(torch.equal(leaf, both.tree[key]) for key, leaf in alone.tree.items())

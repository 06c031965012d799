"""The studies of FedSPU: the paper's fleet, every method told the same; small cells run; what is read off them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_server.journal.records import Evaluated
from edge_server.plan.devices import expand_devices
from edge_server.replay.study.result import Result
from tests.benchmarks.fedspu_orderings import BASELINES, OURS, REFERENCES, STOPPING, Ran, claims, curve_of, read
from tests.edge_server.replay.study.shipped import grid, require_only_algorithms_differ, run
from tests.machine import shared

NAMES = {"fedspu": 19 * 9, "fedspu-cifar": 19 * 9, "fedspu-writers": 19 * 3}


@pytest.mark.parametrize("name", NAMES)
def test_methods_differ_in_nothing_but_their_algorithm(name):
    found = grid(name)
    assert len(found) == NAMES[name]
    require_only_algorithms_differ(found)
    stopping = {cell.variant for cell in found if cell.plan.algorithm.options.get("early_stopping")}
    plain = {cell.variant for cell in found} - stopping
    assert plain == {OURS, *BASELINES, *REFERENCES}
    assert stopping == {f"{one}{STOPPING}" for one in plain - {"fedavg"}}


@pytest.mark.parametrize("name", NAMES)
def test_the_fleet_is_the_papers(name):
    """A hundred devices, ten a round, five epochs, a fifth of them in each cluster."""
    plan = grid(name)[0].plan
    assert len(expand_devices(plan.device)) == 100
    assert (plan.cohort.size, plan.hyper.local_epochs) == (10, 5)
    assert (plan.optimizer.name, plan.optimizer.options) == ("clusters", {"keep": "0.2,0.4,0.6,0.8,1"})
    trained = (1 - plan.data.holdout) * (1 - plan.data.validation)
    assert trained == pytest.approx(0.595)


def small(name: str, variant: str, folder: Path, **changes: object) -> tuple[Path, Result]:
    """Run a cell that ends soon; twelve of its devices."""
    cell = next(one for one in grid(name) if one.variant == variant)
    plan = cell.plan
    data = msgspec.structs.replace(plan.data, path=str(shared("data") / plan.data.path), **changes)
    plan = msgspec.structs.replace(
        plan,
        rounds=2,
        device=[msgspec.structs.replace(one, count=min(one.count, 12)) for one in plan.device][:12],
        cohort=msgspec.structs.replace(plan.cohort, size=2, min_devices=12),
        hyper=msgspec.structs.replace(plan.hyper, local_epochs=1),
        evaluation=msgspec.structs.replace(plan.evaluation, devices_every=1),
        data=data,
    )
    return run(msgspec.structs.replace(cell, plan=plan), folder)


@pytest.mark.parametrize(
    ("name", "variant"), [("fedspu-cifar", "random_dropout-stopping"), ("fedspu-writers", "fedavg")]
)
def test_a_small_cell_of_it_runs(tmp_path, name, variant):
    """On a few of the real examples; all devices are evaluated, also those that were in no round."""
    limit = {} if grid(name)[0].plan.data.client_column else {"limit": 600}
    place, result = small(name, variant, tmp_path, **limit)
    assert [one.arrived for one in result.digest.rounds] == [2, 2]
    [(rate, runs)] = read(place.parent).items()
    [(key, ran)] = runs.items()
    assert rate == result.digest.plan.hyper.learning_rate
    assert key[0] == variant
    assert set(ran.curve) == {1, 2}
    if variant != "fedavg":
        assert ran.accuracy == pytest.approx(result.digest.rounds[-1].accuracy)
        assert result.digest.personal


def test_every_device_weighs_the_same_whatever_it_holds():
    by_device = {"a": {"eval_accuracy": 1.0, "eval_examples": 1.0}, "b": {"eval_accuracy": 0.5, "eval_examples": 99.0}}
    records = [Evaluated(accuracy=0.505, by_device=by_device | {"c": {}}, round=3)]
    assert curve_of(records) == {3: [1.0, 0.5]}


def ran(accuracy: float, rounds: int = 100, size: float = 1e6) -> Ran:
    return Ran(accuracy, accuracy, 0.0, {rounds: accuracy}, rounds, size, size, 1.0)


def test_claims_are_of_the_settings_that_were_run():
    """The mean of two settings, a baseline that ran in one of them alone left out; a claim that fails is told."""
    runs = {("fedspu", alpha, "1"): ran(0.8) for alpha in ("0.1", "1")}
    runs |= {("random_dropout", alpha, "1"): ran(share) for alpha, share in (("0.1", 0.7), ("1", 0.8))}
    runs |= {("hermes", alpha, "1"): ran(0.81) for alpha in ("0.1", "1")} | {("fedmp", "1", "1"): ran(0.1)}
    runs[("fedspu-stopping", "1", "1")] = ran(0.75, rounds=60)
    found = {one.said: one for one in claims(runs)}
    assert found["FedSPU above random_dropout, without early stopping"].figures == "80.00 against 75.00"
    assert found["FedSPU above hermes, without early stopping"].holds is False
    assert found["FedSPU above fedmp, without early stopping"].holds is None
    assert found["FedSPU 4 points above the baselines' mean, without early stopping"].holds is False
    assert found["traffic of FedSPU over that of random_dropout is 1.00 ± 0.01"].holds
    assert found["early stopping cuts FedSPU's rounds by 25 to 71 %"].figures == "40.0 %: 100 to 60"
    assert found["FedSPU without early stopping above that with it"].figures == "-5.00 points"


def test_methods_are_compared_over_the_seeds_that_both_ran_with():
    runs = {("fedspu", "1", seed): ran(share) for seed, share in (("1", 0.8), ("2", 0.6), ("3", 0.1))}
    runs |= {("hermes", "1", "1"): ran(0.7), ("hermes", "1", "2"): ran(0.3), ("fedmp", "1", "4"): ran(0.9)}
    found = {one.said: one for one in claims(runs)}
    assert found["FedSPU above hermes, without early stopping"].figures == "70.00 against 50.00"
    assert found["FedSPU above fedmp, without early stopping"].holds is None
    said = found["FedSPU 4 points above the baselines' mean, without early stopping"]
    assert said.figures == "+20.00 points over 1 of 7 baselines"

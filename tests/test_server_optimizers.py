"""Server optimizers and SCAFFOLD: a replay is the textbook's, a live run the replay's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, Evaluated, closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.plan.plan import Plan
from edge_server.release.run_model import read_model
from edge_server.replay.run import replay_plan, replay_sites
from edge_server.rounds.resume import load_trained_network
from shared.models.build import build_initial
from shared.tensors.tree import State, Tree
from tests.edge_server.fleets import Site
from tests.edge_server.harness import RUN, beginning, write_examples
from tests.edge_server.textbook import NAMES, ROUNDS, make_plan, require_equal, shares, textbook_round
from tests.shared.algorithms import test_scaffold

numbers = itertools.count()
ADAPTIVE = {
    "fedavgm": (0.0, lambda v, _d: v),
    "fedadam": (0.9, lambda v, d: 0.99 * v + 0.01 * d**2),
    "fedyogi": (0.9, lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2)),
    "fedadagrad": (0.0, lambda v, d: v + d**2),
}
"""beta1, and the second moment of the paper."""
LIVE = ("fedadam", "scaffold")
SITES = """
[sites]
clusters = { roof = ["a"], barn = ["b"], yard = ["c"] }
graph = "full"
[[device]]
name = "a"
[[device]]
name = "b"
[[device]]
name = "c"
"""


def plan_of(folder: Path, name: str, options: str = "", **sections: str) -> Plan:
    """Return a plan of three devices that evaluate in every round, with momentum where the method has any."""
    momentum = "" if name == "scaffold" else "\nmomentum = 0.5"
    sections = {
        "algorithm": f'name = "{name}"\noptions = {{ {options} }}',
        "hyper": f"local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.2{momentum}",
        "data": f"{write_examples(folder, 90)}\nholdout = 0.2",
        "evaluation": "every = 1\non_device = true\ndevices_every = 2",
    } | sections
    return make_plan(folder, **sections)


def network_of(state: State) -> Tree:
    return {name: leaf for name, leaf in state.tree.items() if "/" not in name}


def figures(records: list[AnyRecord]) -> list[object]:
    """Return what every round and evaluation came to."""
    rounds = [(one.outcome, one.arrived, one.loss, one.accuracy, one.device_accuracy) for one in closed_rounds(records)]
    return rounds + [(one.round, one.accuracy) for one in records if isinstance(one, Evaluated)]


def adaptive(plan: Plan, beta1: float, second_moment: Callable) -> dict[str, np.ndarray]:
    """Return the model after algorithm 2 of the paper; FedAvgM has a velocity instead of moments."""
    server = {name: leaf.double().numpy() for name, leaf in beginning(plan).items()}
    first = {name: np.zeros_like(leaf) for name, leaf in server.items()}
    second = {name: np.full_like(leaf, 1e-6) for name, leaf in server.items()}
    weights = [len(examples) for examples in shares(plan)]
    for number in range(1, plan.rounds + 1):
        start = {name: torch.tensor(leaf, dtype=torch.float32) for name, leaf in server.items()}
        changes: list[Tree] = []
        textbook_round(plan, number, start, NAMES, sent=lambda tree, changes=changes: changes.append(tree) or tree)
        for name, leaf in server.items():
            pairs = zip(weights, changes, strict=True)
            change = sum(weight * moved[name].double().numpy() for weight, moved in pairs) / sum(weights)
            if plan.algorithm.name == "fedavgm":
                first[name] = 0.9 * first[name] + change
                server[name] = leaf + first[name]
                continue
            first[name] = beta1 * first[name] + (1 - beta1) * change
            second[name] = second_moment(second[name], change)
            server[name] = leaf + 0.1 * first[name] / (np.sqrt(second[name]) + 1e-3)
    return server


def require_close(tree: Tree, expected: dict[str, np.ndarray]) -> None:
    assert tree.keys() == expected.keys()
    for name, leaf in expected.items():
        assert np.abs(tree[name].double().numpy() - leaf).max() <= 1e-6, name


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_replay_is_the_textbooks(tmp_path, name):
    plan = plan_of(tmp_path, name)
    state, records = replay_plan(plan, tmp_path / RUN)
    require_close(network_of(state), adaptive(plan, *ADAPTIVE[name]))
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS


def test_a_replay_of_scaffold_is_the_textbooks(tmp_path):
    plan = plan_of(tmp_path, "scaffold")
    state, _ = replay_plan(plan, tmp_path / RUN)
    fleet = dict(zip(NAMES, shares(plan), strict=True))
    layers = build_initial(plan.model, plan.seed).layers
    expected, _ = test_scaffold.textbook(layers, fleet, plan.hyper, plan.rounds * [NAMES])
    require_close(network_of(state), expected)


@pytest.mark.parametrize("name", LIVE)
def test_live_and_replayed_it_comes_to_the_same_bits(network, name, tmp_path):
    """Also what is evaluated on server and devices; the run's network is released without what lies beside it."""
    plan = plan_of(tmp_path, name)
    live, records = Site(network, plan, tmp_path, name=f"optimizer{next(numbers)}").play()
    again, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    require_equal(live.tree, again.tree)
    assert figures(records) == figures(others)
    assert len(network_of(live)) < len(live.tree)
    run = StoredRun(tmp_path / RUN, records)
    require_equal(load_trained_network(run)[1], network_of(live))
    require_equal(read_model(run, plan.rounds).tree, network_of(live))


@pytest.mark.parametrize(("name", "beside"), [("fedadam", ("first/", "second/")), ("scaffold", ("control/",))])
def test_between_sites_networks_are_averaged_and_control_variates_but_no_moments(tmp_path, name, beside):
    """On a full graph both sites have the same network after a round; moments are of a site's own devices."""
    plan = plan_of(tmp_path, name, cohort="min_devices = 1", more=SITES)
    ends = replay_sites(plan, {site: tmp_path / f"run-{site}" for site in plan.sites.names})
    roof, barn = (ends[site][0] for site in ("roof", "barn"))
    require_equal(network_of(roof), network_of(barn))
    for leaf in (leaf for leaf in roof.tree if leaf.startswith(beside)):
        assert torch.equal(roof.tree[leaf], barn.tree[leaf]) == (name == "scaffold"), leaf
    require_equal(checkpoints.load(tmp_path / "run-roof" / "checkpoints", plan.rounds).tree, roof.tree)

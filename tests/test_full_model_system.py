"""Semi-supervised methods that train the whole network: real agents, the real server, live, killed and replayed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edge_server.journal.records import RoundOpened, UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan, test_data
from edge_server.replay.run import replay
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import evaluated
from shared.data.load import load as load_examples
from shared.errors import ConfigError
from shared.models.build import blank
from shared.models.evaluate import score
from shared.registry import build
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import write_plan
from tests.edge_server.textbook import DEVICES, NAMES, require_equal

test_data.__test__ = False  # a function of ours, not a test

numbers = itertools.count()
ROUNDS = 3
METHODS = {"fedswitch": "supervised_steps = 4, threshold = 0.3"}


@pytest.fixture(params=METHODS)
def method(request) -> str:
    return request.param


def make_plan(folder, method: str, options: str = "", **sections: str) -> Plan:
    """Return a plan of three devices with unlabelled stripes, thirty of which the server has labels of."""
    written = {
        "algorithm": f'name = "{method}"\noptions = {{ {options or METHODS[method]} }}',
        "model": 'name = "cnn"\noptions = { side = 16, width = 4, hidden = 12 }',
        "hyper": "batch_size = 8\nlearning_rate = 0.05\nmomentum = 0.9",
        "cohort": "min_devices = 3",
        "data": 'source = "npz"\npath = "pictures.npz"\nlabels = "none"',
        "server_data": 'source = "npz"\npath = "pictures.npz"\ndrawn = { per_class = 3 }',
        "evaluation": "every = 1",
        "partition": 'kind = "even"',
    } | sections
    path = write_plan(folder, rounds=ROUNDS, more=DEVICES, **written)
    path.write_text(f"seed = 11\n{path.read_text()}")
    return load(path, folder)


@pytest.fixture
def pictures(tmp_path):
    """Write a file of pictures whose class is a stripe."""
    random, arrays = np.random.default_rng(3), {}
    for split, count in (("train", 120), ("test", 60)):
        labels = np.arange(count) % 10
        noise = random.integers(0, 90, (count, 16, 16)).astype(np.uint8)
        for picture, label in zip(noise, labels, strict=True):
            picture[label : label + 3] += 150
        arrays |= {f"x_{split}": noise, f"y_{split}": labels}
    np.savez(tmp_path / "pictures.npz", **arrays)
    return tmp_path


def test_live_and_replayed_it_comes_to_the_same_bits(network, pictures, method):
    plan = make_plan(pictures, method)
    here = Site(network, plan, pictures, name=f"full{next(numbers)}")
    live, records = here.play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.refused) for one in rounds] == ROUNDS * [("aggregated", NAMES, {})]
    judged = evaluated(build(ALGORITHMS, plan.algorithm, "algorithm"), live)
    test = load_examples(test_data(plan))
    assert rounds[-1].accuracy == score(blank(plan.model).layers.eval(), judged, test).accuracy
    replayed, again = replay(plan, pictures / "replayed")
    require_equal(replayed.tree, live.tree)
    assert replayed.facts == live.facts
    assert [one.accuracy for one in closed_rounds(again)] == [one.accuracy for one in rounds]


@pytest.mark.parametrize("kind", [RoundOpened, UpdateAccepted])
def test_after_a_kill_in_a_round_it_ends_at_the_same_bits(pictures, method, kind):
    """All that the server must know of its devices is in the checkpoint; its own steps are done again."""
    plan = make_plan(pictures, method)
    state, _ = Site(Network(), plan, pictures).play()
    (pictures / "killed").mkdir()
    here = Site(Network(), plan, pictures / "killed")
    after, _ = here.play(lambda: here.serve_twice(lambda one: isinstance(one, kind) and one.round == 2))
    require_equal(after.tree, state.tree)
    assert after.facts == state.facts


def test_bad_options_are_named_before_anything_begins(pictures, method):
    with pytest.raises(ConfigError, match="threshold"):
        make_plan(pictures, method, "threshold = 1.5")
    with pytest.raises(ConfigError, match="tresholds"):
        make_plan(pictures, method, "tresholds = 0.5")

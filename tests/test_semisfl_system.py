"""SemiSFL end to end: real agents, the real server, live, killed and replayed to the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from edge_server.journal.outcome import summarise_outcome
from edge_server.journal.records import CostSettled, Evaluated, UpdateAccepted, closed_rounds
from edge_server.journal.runs import Run
from edge_server.plan.plan import Plan, share, test_data
from edge_server.replay.run import replay
from edge_server.rounds.check_plan import load
from edge_server.rounds.resume import trained_network
from edge_server.trace.export import trace_of
from edge_server.trace.import_run import records_of
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import evaluated
from shared.data.examples import split_holdout
from shared.data.load import load as load_examples
from shared.errors import ConfigError
from shared.models.build import blank
from shared.models.evaluate import score
from shared.registry import build
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import RUN, write_plan
from tests.edge_server.textbook import DEVICES, NAMES, require_equal

test_data.__test__ = False  # a function of ours, not a test

numbers = itertools.count()
ROUNDS = 2
FLOAT16 = 'name = "float16"\noptions = { exact = "gradient" }'
OPTIONS = "cut = 2, steps = 3, supervised_steps = 4, hidden = 16, projections = 8, threshold = 0.3"


TERMS = {"supervised_loss", "contrastive_loss", "consistency_loss", "clustering_loss", "supervised_steps"}


def make_plan(folder, algorithm: str = "semisfl", options: str = OPTIONS, **sections: str) -> Plan:
    """Return a plan of three devices with unlabelled digits, thirty of which the server has labels of."""
    written = {
        "algorithm": f'name = "{algorithm}"\noptions = {{ {options} }}',
        "model": 'name = "cnn"\noptions = { side = 16, width = 4, hidden = 12 }',
        "hyper": "batch_size = 8\nlearning_rate = 0.05\nmomentum = 0.9",
        "cohort": "min_devices = 3",
        "data": 'source = "npz"\npath = "pictures.npz"\nlabels = "none"',
        "server_data": 'source = "npz"\npath = "pictures.npz"\ndrawn = { per_class = 3 }',
        "evaluation": "every = 1",
        "partition": 'kind = "even"',
    } | sections
    written = {section: text for section, text in written.items() if text}
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


def test_live_and_replayed_it_comes_to_the_same_bits(network, pictures):
    plan = make_plan(pictures)
    here = Site(network, plan, pictures, name=f"semi{next(numbers)}")
    live, records = here.play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.steps, one.refused) for one in rounds] == ROUNDS * [
        ("aggregated", NAMES, 3, {})
    ]
    found = [one.terms for one in rounds]
    assert [one.keys() for one in found] == ROUNDS * [TERMS]
    facts = live.facts
    both = found[-1]["consistency_loss"] + found[-1]["clustering_loss"]
    assert both == pytest.approx(facts["unlabelled_loss"] / facts["session_steps"])
    both = found[-1]["supervised_loss"] + found[-1]["contrastive_loss"]
    assert both == pytest.approx(facts["supervised_loss"])
    assert [one["supervised_steps"] for one in found] == [4.0] * ROUNDS
    run = Run(pictures / RUN, records)
    model, network_then = trained_network(run)
    require_equal(network_then, {key: live.tree[f"teacher/{key}"] for key in model.layers.state_dict()})
    test, shown = load_examples(test_data(plan)), summarise_outcome(records, run.folder)
    assert rounds[-1].accuracy == shown.last.accuracy == score(model.layers.eval(), network_then, test).accuracy
    best, parameters = trained_network(run, shown.best.round)
    assert score(best.layers.eval(), parameters, test).accuracy == shown.best.accuracy
    replayed, again = replay(plan, pictures / "replayed")
    require_equal(replayed.tree, live.tree)
    assert replayed.facts == live.facts
    assert [(one.accuracy, one.terms) for one in closed_rounds(again)] == [(one.accuracy, one.terms) for one in rounds]
    assert [one.terms for one in closed_rounds(records_of(trace_of(records)))] == found


@pytest.mark.parametrize("codec", ['name = "quantize"\noptions = { bits = 7 }', FLOAT16])
def test_with_a_codec_at_the_cut_the_replay_has_the_live_runs_bits(pictures, codec):
    """Both batches of features and the gradient go through it, on either side alike; other bits than without it."""
    plan = make_plan(pictures, cut_codec=codec)
    live, records = Site(Network(), plan, pictures).play()
    assert [one.refused for one in closed_rounds(records)] == [{}] * ROUNDS
    require_equal(replay(plan, pictures / "replayed")[0].tree, live.tree)
    (pictures / "plain").mkdir()
    plain, _ = replay(make_plan(pictures), pictures / "plain")
    assert any(not torch.equal(leaf, live.tree[name]) for name, leaf in plain.tree.items())


def test_after_a_kill_in_a_round_it_ends_at_the_same_bits(pictures):
    """The supervised steps and the session are done again; queue, teacher and K_s come from the checkpoint."""
    plan = make_plan(pictures)
    state, _ = Site(Network(), plan, pictures).play()
    (pictures / "killed").mkdir()
    here = Site(Network(), plan, pictures / "killed")
    after, _ = here.play(lambda: here.serve_twice(lambda one: isinstance(one, UpdateAccepted) and one.round == 2))
    require_equal(after.tree, state.tree)
    assert after.facts == state.facts


RANGES = 'kind = "ranges", hertz = 1e9, cycles_per_flop = 1.0'
SWITCHED = "cut = 2, steps = 3, supervised_steps = 4, threshold = 0.3, switch_divergence = 0.0"


def test_with_its_terms_left_out_and_the_student_labelling_it_comes_to_the_same_bits(pictures):
    """FedSwitch-SL: live, replayed and after a kill in the round that begins with the students' bottoms alone."""
    plan = make_plan(pictures, "fedswitch_sl", SWITCHED)
    live, records = Site(Network(), plan, pictures).play()
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
    assert [live.facts[f"labeller/{name}"] for name in NAMES] == ["student"] * len(NAMES)
    replayed, _ = replay(plan, pictures / "replayed")
    require_equal(replayed.tree, live.tree)
    assert replayed.facts == live.facts
    (pictures / "killed").mkdir()
    here = Site(Network(), plan, pictures / "killed")
    after, _ = here.play(lambda: here.serve_twice(lambda one: isinstance(one, UpdateAccepted) and one.round == 2))
    require_equal(after.tree, live.tree)
    assert after.facts == live.facts


def test_a_device_that_labels_by_itself_is_charged_for_both_views(pictures):
    """In replay: as many cycles a round, though one bottom comes in place of two."""
    ranges = "\n".join(f'[[device]]\nname = "{name}"\ncompute = {{ {RANGES} }}' for name in NAMES)
    make_plan(pictures, "fedswitch_sl", SWITCHED)
    path = pictures / "plan.toml"
    path.write_text(path.read_text().replace(DEVICES, ranges))
    _, records = replay(load(path, pictures), pictures / "replayed")
    spent = {(one.round, one.device): one.cost.compute_s for one in records if isinstance(one, CostSettled)}
    assert all(spent[1, name] for name in NAMES)
    assert [spent[2, name] for name in NAMES] == pytest.approx([spent[1, name] for name in NAMES])


def test_the_baseline_of_supervised_steps_alone_runs_with_the_same_fleet(network, pictures):
    """Devices send nothing of what they have; the server's steps are those of the method's first round."""
    options = OPTIONS.replace("steps = 3, ", "", 1).replace(", threshold = 0.3", "")
    plan = make_plan(pictures, "supervised_only", options)
    here = Site(network, plan, pictures, name=f"semi{next(numbers)}")
    live, records = here.play()
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
    assert live.facts["followed"] == 4 * ROUNDS
    require_equal(replay(plan, pictures / "replayed")[0].tree, live.tree)


OWN = 'source = "npz"\npath = "pictures.npz"\nholdout = 0.25'
"""Examples of devices that have labels, a quarter of them held back."""
LABELLED = {"server_data": "", "hyper": "batch_size = 8\nlearning_rate = 0.05"}


@pytest.mark.parametrize(
    ("method", "more"), [(("semisfl", OPTIONS), {}), (("splitfed", "cut = 2, period = 3"), LABELLED)]
)
def test_devices_with_labels_evaluate_the_whole_model_on_what_they_hold_back(pictures, method, more):
    """Where the plan says so: bottom and top go down for it, the teacher's of SemiSFL, and three numbers come up."""
    plan = make_plan(pictures, *method, data=OWN, evaluation="every = 1\ndevices_every = 2", **more)
    live, records = Site(Network(), plan, pictures).play()
    [found] = [one for one in records if isinstance(one, Evaluated)]
    assert found.round == ROUNDS
    judged = evaluated(build(ALGORITHMS, plan.algorithm, "algorithm"), live)
    expected, trained = {}, {}
    for place, name in enumerate(NAMES):
        rest, held = split_holdout(load_examples(share(plan, plan.device, place)), 0.25, seed=0)
        scored = score(blank(plan.model).layers.eval(), judged, held)
        figures = {"eval_accuracy": scored.accuracy, "eval_loss": scored.loss, "eval_examples": float(len(held))}
        trained[name] = len(rest)
        expected[name] = {key: pytest.approx(figure) for key, figure in figures.items()}
    assert found.by_device == expected
    updates = [one for one in records if isinstance(one, UpdateAccepted) and one.round == 1]
    assert {one.device: one.update.num_examples for one in updates} == trained, "what is held back is not trained on"
    replayed, again = replay(plan, pictures / "replayed")
    require_equal(replayed.tree, live.tree)
    assert [one for one in again if isinstance(one, Evaluated)] == [found]


@pytest.mark.parametrize(
    ("method", "sections", "cause"),
    [
        ("semisfl", {"evaluation": "on_device = true"}, "devices of a round hold no whole model"),
        ("semifl", {"evaluation": "on_device = true"}, "evaluation.on_device: algorithm 'semifl' sends devices"),
        (
            "supervised_only",
            {"evaluation": "devices_every = 1"},
            'data.labels is "none", and devices evaluate on labels',
        ),
    ],
)
def test_what_devices_cannot_evaluate_is_refused(pictures, method, sections, cause):
    """Before, the devices of a method that reads no labels were asked, and answered with nothing."""
    with pytest.raises(ConfigError, match=cause):
        make_plan(pictures, method, "", **sections)

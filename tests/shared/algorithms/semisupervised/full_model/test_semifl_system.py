"""SemiFL end to end: real agents, the real server, live, killed and replayed to the same bits, skipped rounds too."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_field

from edge_server.journal.records import UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan, test_data
from edge_server.replay.devices.behaviour import Work
from edge_server.replay.devices.recorded_run import behaviours
from edge_server.replay.run import replay
from edge_server.rounds.check_plan import load
from edge_server.trace.export import trace_of
from edge_server.trace.trace import Trace
from edge_server.trial.tables import skipped_lines
from shared.data.load import load as load_examples
from shared.models.build import blank
from shared.models.evaluate import score
from shared.models.running_statistics import measure_statistics, statistics_of
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import write_plan
from tests.edge_server.textbook import DEVICES, NAMES, require_equal

test_data.__test__ = False  # a function of ours, not a test

numbers = itertools.count()
ROUNDS = 3
OPTIONS = "epochs = 1, server_epochs = 4, warmup_epochs = 12, threshold = {}, mirrors = false"
CNN = 'name = "cnn"\noptions = { side = 16, width = 4, hidden = 12 }'
NORMED = 'name = "vgg13"\noptions = { width = 0.04, channels = 1 }'


def make_plan(folder, threshold: float = 0.3, model: str = CNN, **sections: str) -> Plan:
    """Return a plan of three devices with unlabelled pictures, thirty of which the server has labels of."""
    written = {
        "algorithm": f'name = "semifl"\noptions = {{ {OPTIONS.format(threshold)} }}',
        "model": model,
        "hyper": "batch_size = 8\nlearning_rate = 0.1\nmomentum = 0.9",
        "cohort": "min_devices = 3",
        "data": 'source = "npz"\npath = "pictures.npz"\nlabels = "none"',
        "server_data": 'source = "npz"\npath = "pictures.npz"\ndrawn = { per_class = 3 }',
        "evaluation": "every = 1",
        "partition": 'kind = "even"',
    } | sections
    path = write_plan(folder, rounds=ROUNDS, more=DEVICES, **written)
    path.write_text(f"seed = 11\n{path.read_text()}")
    return load(path, folder)


def write_pictures(folder, side: int = 16):
    """Write a file of pictures whose class is a stripe."""
    random, arrays = np.random.default_rng(3), {}
    for split, count in (("train", 120), ("test", 60)):
        labels = np.arange(count) % 10
        noise = random.integers(0, 90, (count, side, side)).astype(np.uint8)
        for picture, label in zip(noise, labels, strict=True):
            picture[label : label + 3] += 150
        arrays |= {f"x_{split}": noise, f"y_{split}": labels}
    np.savez(folder / "pictures.npz", **arrays)
    return folder


@pytest.fixture
def pictures(tmp_path):
    return write_pictures(tmp_path)


def kept_of(records) -> dict[tuple[int, str], float]:
    """Return how many examples each device was sure of, by round."""
    accepted = (one for one in records if isinstance(one, UpdateAccepted))
    return {(one.round, one.update.device): one.update.metrics["kept_examples"] for one in accepted}


def test_live_and_replayed_it_comes_to_the_same_bits(network, pictures):
    plan = make_plan(pictures)
    live, records = Site(network, plan, pictures, name=f"semifl{next(numbers)}").play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.refused) for one in rounds] == ROUNDS * [("aggregated", NAMES, {})]
    kept = kept_of(records)
    assert len(kept) == ROUNDS * len(NAMES)
    assert {bool(one) for one in kept.values()} == {True, False}, "a round was skipped, and another was not"
    [line] = skipped_lines(records)
    assert line.startswith(f"devices found nothing to learn from in {list(kept.values()).count(0.0)} of 9 tasks")
    tested = {key.removeprefix("tested/"): leaf for key, leaf in live.tree.items() if key.startswith("tested/")}
    found = score(blank(plan.model).layers.eval(), tested, load_examples(test_data(plan)))
    assert rounds[-1].accuracy == found.accuracy
    replayed, again = replay(plan, pictures / "replayed")
    require_equal(replayed.tree, live.tree)
    assert replayed.facts == live.facts
    assert kept_of(again) == kept
    assert [one.accuracy for one in closed_rounds(again)] == [one.accuracy for one in rounds]


def test_after_a_kill_in_a_round_it_ends_at_the_same_bits(pictures):
    """The server's epochs are taken again; model and momentum come from the checkpoint."""
    plan = make_plan(pictures)
    state, _ = Site(Network(), plan, pictures).play()
    assert any(bool(leaf.any()) for key, leaf in state.tree.items() if key.startswith("momentum/"))
    (pictures / "killed").mkdir()
    here = Site(Network(), plan, pictures / "killed")
    after, _ = here.play(lambda: here.serve_twice(lambda one: isinstance(one, UpdateAccepted) and one.round == 3))
    require_equal(after.tree, state.tree)
    assert after.facts == state.facts


def test_where_nobody_is_sure_of_anything_the_run_goes_on_with_the_servers_epochs(pictures):
    """Every round is skipped by all: no loss, nothing trained on, and a record that says so."""
    plan = make_plan(pictures, threshold=0.999999)
    live, records = Site(Network(), plan, pictures).play()
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.loss) for one in rounds] == ROUNDS * [("aggregated", NAMES, None)]
    updates = [one.update for one in records if isinstance(one, UpdateAccepted)]
    assert {(one.num_examples, one.loss, one.metrics["skipped"]) for one in updates} == {(0, None, 1.0)}
    assert skipped_lines(records) == [
        "devices found nothing to learn from in 9 of 9 tasks, all of them in 3 of 3 rounds"
    ]
    assert live.facts["server_rounds"] == ROUNDS
    assert all(bool((leaf == 0).all()) for key, leaf in live.tree.items() if key.startswith("momentum/"))
    assert all(bool((leaf == live.tree[f"tested/{key}"]).all()) for key, leaf in live.tree.items() if "/" not in key)
    require_equal(replay(plan, pictures / "replayed")[0].tree, live.tree)


def test_updates_of_nothing_pass_a_codec_and_steps_are_timed_before_the_first_round(pictures):
    """Round 1 is skipped by all, the others are not; what is timed is a step, not a round of the method's own."""
    plan = make_plan(pictures, measure="seconds = 0.1", codec='name = "quantize"')
    live, records = Site(Network(), plan, pictures).play()
    timed = [one.update.step for one in records if isinstance(one, UpdateAccepted) and not one.round]
    assert len(timed) == len(NAMES)
    assert all(timed)
    kept = kept_of(one for one in records if not isinstance(one, UpdateAccepted) or one.round)
    assert {bool(one) for one in kept.values()} == {True, False}
    require_equal(replay(plan, pictures / "replayed")[0].tree, live.tree)


def test_a_skipped_round_takes_as_long_when_its_record_is_replayed(pictures):
    """A device with nothing to learn from was done at once; what it might have trained is not charged for."""
    plan = make_plan(pictures)
    _, records = replay(plan, pictures / "replayed")
    assert (kept_of(records)[1, "a"], bool(kept_of(records)[2, "a"])) == (0.0, True)
    trace = trace_of(records)
    tasks = tuple(replace_field(task, compute_s=0.25 if task.round == 1 else 8.0) for task in trace.tasks)
    [device] = behaviours(Trace(trace.header, {**trace.tables, "tasks": tasks}), ["a"])
    weights = sum(leaf.numel() for leaf in blank(plan.model).layers.parameters())
    most = Work(steps=4, examples=30, weights=weights, flops=1, run="r", round=1, train=True, share=2 + 1 / 3)
    seconds = [device.compute(replace(most, round=number), 0.0) for number in (1, 2)]
    assert [one.seconds for one in seconds] == [0.25, 8.0]


def test_a_network_with_batchnorm_is_tested_by_the_servers_statistics(tmp_path):
    """No session measures them on devices: what is tested and kept has those of the labelled examples."""
    plan = make_plan(write_pictures(tmp_path, 32), threshold=0.11, model=NORMED)
    live, records = Site(Network(), plan, tmp_path).play()
    assert all(kept_of(records).values()), "everybody trained"
    assert {one.statistics_batches for one in closed_rounds(records)} == {None}
    tested = {key.removeprefix("tested/"): leaf for key, leaf in live.tree.items() if key.startswith("tested/")}
    assert plan.server_data
    labelled = load_examples(plan.server_data).inputs
    layers = blank(plan.model).layers
    wanted = measure_statistics(layers, tested, [labelled])
    assert statistics_of(layers)
    require_equal({name: tested[name] for name in wanted}, wanted)
    require_equal(replay(plan, tmp_path / "replayed")[0].tree, live.tree)

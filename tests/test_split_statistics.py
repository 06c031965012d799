"""A split network is tested, kept and handed on with running statistics of undropped features, live as in replay."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Rewound, RunOpened, UpdateAccepted, closed_rounds, drop_void
from edge_server.plan import data as plan_data
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan, run_replay
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.files import write
from edge_server.replay.trace.import_run import to_records
from edge_server.report.summarise import digest_run
from edge_server.trial.tables import rounds_table
from shared.data.load import load as load_examples
from shared.models.build import build_blank
from shared.models.evaluate import score
from shared.models.running_statistics import measure_statistics, statistic_names
from shared.tensors.tree import Tree
from tests.edge_server.fleets import RUN, Network, Site
from tests.edge_server.textbook import make_plan, require_equal

pytestmark = pytest.mark.usefixtures("one_thread")

numbers = itertools.count()
ROUNDS, BATCHES = 4, 5
"""Three devices: two batches of each make six."""
SECTIONS = {
    "algorithm": 'name = "fedsl"\noptions = { cut = 2, period = 3, drop = 0.6, sparsity = 0.3 }',
    "model": 'name = "vgg13"\noptions = { channels = 1, width = 0.06 }',
    "hyper": "batch_size = 32\nlearning_rate = 0.1",
    "codec": 'name = "masked"',
    "cut_codec": 'name = "quantize"',
    "data": 'source = "digits"',
    "partition": 'kind = "even"',
}


def plan_of(folder: Path, evaluation: str = f"every = 2\nstatistics_batches = {BATCHES}", rounds: int = ROUNDS) -> Plan:
    return make_plan(folder, rounds, **(SECTIONS | {"evaluation": evaluation}))


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> tuple[Plan, Path, Tree, list[AnyRecord]]:
    """Return a plan, and what its replay came to."""
    folder = tmp_path_factory.mktemp("played")
    plan = plan_of(folder)
    state, records = replay_plan(plan, folder / RUN)
    return plan, folder / RUN, state.tree, records


def measured_batches(records: list[AnyRecord]) -> list[int | None]:
    return [one.statistics_batches for one in closed_rounds(records)]


def errors_of(statistics: Tree, truth: Tree, own: list[str]) -> tuple[float, float]:
    """Return the mean squared errors of running means, in variances, and of running variances, in mean variances."""
    means = [key for key in own if key.endswith("running_mean")]
    pairs = [(key, key.replace("mean", "var")) for key in means]
    of_means = [(statistics[m] - truth[m]).square().mean() / truth[v].mean() for m, v in pairs]
    of_variances = [(statistics[v] - truth[v]).square().mean() / truth[v].mean().square() for _, v in pairs]
    return float(sum(of_means)), float(sum(of_variances))


def test_what_is_tested_and_kept_is_measured_without_dropping(played, tmp_path):
    """Every second round and the last; all else has the bits of a run that leaves it out.

    Six batches of 32 examples tell the statistics of all training examples, dropped features do not: here they are
    off 50 times as far and more. What that is worth in accuracy, four rounds do not show; a whole plan's figure does.
    """
    plan, folder, tree, records = played
    plain, without = replay_plan(plan_of(tmp_path, "every = 2\nstatistics_batches = 0"), tmp_path / RUN)
    assert measured_batches(records) == [None, 6, None, 6]
    assert measured_batches(without) == ROUNDS * [None]
    own = statistic_names(build_blank(plan.model).layers)
    assert all(torch.equal(tree[key], plain.tree[key]) for key in tree.keys() - set(own))
    assert [one.loss for one in closed_rounds(records)] == [one.loss for one in closed_rounds(without)]
    store, test, network = SqliteStore(folder), load_examples(plan_data.test_data(plan)), build_blank(plan.model).layers
    kept = store.load(ROUNDS).tree
    store.close()
    assert score(network, kept, test).accuracy == closed_rounds(records)[-1].accuracy
    require_equal(kept, tree)
    truth = measure_statistics(network, tree, load_examples(plan.data).inputs.split(64))
    stored, anew = (errors_of(one, truth, list(own)) for one in (plain.tree, tree))
    assert all(new < old / 10 for new, old in zip(anew, stored, strict=True)), (anew, stored)


def test_a_live_run_has_the_bits_of_its_replay(network, played, tmp_path):
    plan, _, tree, _ = played
    here = Site(network, plan, tmp_path, name=f"site{next(numbers)}")
    state, records = here.play()
    require_equal(state.tree, tree)
    assert measured_batches(records) == [None, 6, None, 6]


@pytest.mark.parametrize("kind", ["update", "checkpoint"])
def test_a_server_killed_while_it_measures_ends_at_the_same_bits(played, tmp_path, kind):
    """With one of the three updates of that session stored, or with the checkpoint that it led to."""
    plan, _, tree, _ = played
    here = Site(Network(), plan, tmp_path)
    session = ROUNDS + 1 + 2

    def cut(written: object) -> bool:
        return written == 2 if kind == "checkpoint" else getattr(written, "round", None) == session

    state, records = here.play(lambda: here.serve_twice(cut))
    require_equal(state.tree, tree)
    assert [one.round for one in records if isinstance(one, Rewound)] == [2]
    assert measured_batches(records) == [None, 6, None, 6]
    kept = [(one.device, one.round) for one in drop_void(records) if isinstance(one, UpdateAccepted)]
    assert len(kept) == len(set(kept)) == 3 * (ROUNDS + 2)


def test_a_plan_that_says_nothing_measures_and_a_run_of_before_goes_on_without(tmp_path):
    """Its record says nothing of it, as those of before; its replay measures nothing either."""
    quiet = plan_of(tmp_path, "every = 2", rounds=1)
    _, records = replay_plan(quiet, tmp_path / "new")
    [opened] = [one for one in records if isinstance(one, RunOpened)]
    assert (opened.statistics_batches, opened.plan) == (16, quiet), "by its plan a run is gone on with"
    assert measured_batches(records) == [18]
    here = Site(Network(), quiet, tmp_path / "old")
    store = SqliteStore(here.folder / RUN, durable=False)
    store.append(RunOpened(run=RUN, plan=quiet, draw="philox"))
    store.close()
    _, before = here.play()
    assert measured_batches(before) == [None]
    write(trace_of(before), tmp_path / "trace")
    [(_, again)] = run_replay(tmp_path / "trace", tmp_path, tmp_path / "runs", 0, 1)
    assert measured_batches(again) == [None]
    assert [one.accuracy for one in closed_rounds(again)] == [one.accuracy for one in closed_rounds(before)]


def test_its_bytes_are_told_apart(played):
    """Six batches of 32 examples with labels, of 4 channels of 4 x 4 floats, and the model; no gradients."""
    _, _, _, records = played
    run = digest_run(records)
    first, second = run.rounds[:2]
    assert first.statistics_bytes.value is None
    features = 6 * 32 * (4 * 4 * 4 * 4 + 1)
    assert features < second.statistics_bytes.value < 1.2 * features + 40_000
    assert second.until.bytes.value - first.until.bytes.value == pytest.approx(
        sum(getattr(second, name).value for name in run.traffic)
    )
    assert first.features_bytes.value == pytest.approx(second.features_bytes.value, rel=0.1), "none of it among these"
    table = rounds_table(records)
    assert [column.heading for column in table.columns][-3:] == ["model", "cut", "statistics"]
    assert next(row[-1] for row in table.rows) == "0.0/0.0"
    again = digest_run(to_records(trace_of(records)))
    assert [one.statistics_bytes for one in again.rounds] == [one.statistics_bytes for one in run.rounds]
    assert measured_batches(to_records(trace_of(records))) == measured_batches(records)
    purposes = [one.purpose for one in trace_of(records).tasks if one.round > ROUNDS]
    assert purposes == 6 * ["statistics"]

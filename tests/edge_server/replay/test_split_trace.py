"""A recorded split run, replayed: its seconds of computing, its links by model and cut traffic, its server's steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace as replace_field

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.plan.data import resolve_data
from edge_server.replay.comparison.stored_runs import gap_between_runs
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.devices.behaviour import Work, batches
from edge_server.replay.devices.recorded_device import load_devices
from edge_server.replay.devices.recorded_link import link_rates
from edge_server.replay.devices.recorded_run import recorded_behaviours
from edge_server.replay.devices.recorded_work import count_trainable_parameters
from edge_server.replay.run import replay_plan, run_replay
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.trace import Trace
from shared.protocol.measurements import Provenance
from tests.edge_server.textbook import LINKS, make_plan

STEPS = 4
SPLIT = {
    "model": 'name = "mlp"\noptions = { features = 8, hidden = 2048, classes = 3 }',
    "algorithm": f'name = "fedsl"\noptions = {{ period = {STEPS}, drop = 0.0, sparsity = 0.0, bits = 32 }}',
    "hyper": "batch_size = 8\nlearning_rate = 0.2",
}
BELOW = 8 * 2048 + 2048


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A split run of three devices, two of which wait for the third at every step, and its trace."""
    folder = tmp_path_factory.mktemp("trial")
    make_plan(folder, more=LINKS.replace("compute_s = 3.0", "compute_s = 6.0"), **SPLIT)
    [(run, records)] = run_replay(folder / "plan.toml", folder, folder / "runs", 0, 1)
    return folder, StoredRun(run, records), trace_of(records)


def with_tasks(trace: Trace, change) -> Trace:
    """Return a trace with every task changed."""
    return Trace(trace.header, {**trace.tables, "tasks": tuple(map(change, trace.tasks))})


def test_a_replayed_split_run_is_the_run_again(trial, tmp_path):
    """The same model and cut traffic, the recorded seconds of computing, round times within 5 %."""
    folder, run, _ = trial
    [(again, found)] = run_replay(Path(run.folder.name), folder, folder / "runs", 0, 1)
    gap = gap_between_runs(run, StoredRun(again, found))
    assert (gap.model, gap.updates.same) == ("same", gap.updates.of)
    for figure in ("compute_s", "bytes_up", "bytes_down"):
        assert gap.spread(figure).exact == gap.spread(figure).count == 9, figure
    for figure in ("features_bytes", "gradient_bytes"):
        assert gap.spread(figure).most < 1e-3, "but for a header of a frame more or less"
    assert gap.spread("round_s").most < 0.05
    assert gap.spread("exchange_s").median < 0.05


def test_a_session_s_work_is_what_lies_below_the_cut(trial):
    """Were it the whole network's, no recorded task would be this very work, and seconds would be scaled."""
    _, _, trace = trial
    assert count_trainable_parameters(trace) == BELOW
    work = Work(steps=STEPS, examples=32, weights=BELOW, flops=1, run="r", round=1, train=True)
    [device] = recorded_behaviours(trace, ["b"])
    effort = device.compute(work, 0.0)
    assert effort.seconds == costs_by_round(trial[1].records)[1]["b"].compute_s == pytest.approx(6.0)


def test_who_missed_a_step_computed_less_in_as_many_seconds(trial):
    """Three of four steps took 6 s: all four would take 8."""
    _, _, trace = trial
    partly = with_tasks(trace, lambda task: replace_field(task, missed_steps=1))
    work = Work(steps=STEPS, examples=32, weights=BELOW, flops=1, run="r", round=1, train=True)
    [device] = recorded_behaviours(partly, ["b"])
    examples = load_devices(partly)["b"].tasks[1].examples
    assert sum(size * count for size, count in batches(examples, 8, STEPS).items()) == 32
    assert device.compute(work, 0.0).seconds == pytest.approx(8.0)


def test_an_exchange_draws_the_watts_that_it_drew(trial, tmp_path):
    """3 W all the while: as many joules as three times the replay's own seconds, with their source."""
    folder, _, trace = trial
    meter = {"exchange_joules": Provenance(source="ina3221", quality="measured")}
    powered = with_tasks(
        trace,
        lambda task: replace_field(
            task, exchange_joules=3.0 * task.exchange_s, provenance={**task.provenance, **meter}
        ),
    )
    _, records = replay_plan(resolve_data(powered.header.plan, folder), tmp_path / "run", trace=powered)
    for cost in costs_by_round(records)[1].values():
        assert cost.exchange_joules == pytest.approx(3.0 * cost.exchange_s)
        assert cost.provenance["exchange_joules"].source == "trace: ina3221"


@pytest.mark.parametrize(
    ("examples", "steps", "found"),
    [(32, 4, {8: 4}), (30, 4, {8: 3, 6: 1}), (30, 9, {8: 7, 6: 2}), (5, 2, {8: 0, 5: 2})],
)
def test_an_epoch_ends_with_what_is_left_over(examples, steps, found):
    assert batches(examples, 8, steps) == found


def test_a_link_is_no_slower_than_the_cut_traffic_shows(trial):
    """Transfers of the model that took ten times as long, latency for all that is known: the exchange did not."""
    _, _, trace = trial
    true_up, true_down = link_rates(load_devices(trace)["a"], 1)
    assert (true_up, true_down) == pytest.approx((1e6, 4e6), rel=0.2)
    slow = with_tasks(
        trace, lambda task: replace_field(task, upload_s=10 * task.upload_s, download_s=10 * task.download_s)
    )
    one = load_devices(slow)["a"]
    up, down = link_rates(one, 1)
    task = one.tasks[1]
    assert 8 * (task.features_bytes / up + task.gradient_bytes / down) <= task.exchange_s * (1 + 1e-9)
    assert up > 3 * true_up / 10


def busier(trace: Trace, seconds: float) -> Trace:
    """Return a trace as of a server that takes so many seconds more for every round's steps."""
    tasks = (
        replace_field(task, exchange_s=task.exchange_s + seconds, arrived_s=task.arrived_s + seconds * task.round)
        for task in trace.tasks
    )
    rounds = (
        replace_field(
            one,
            opened_s=one.opened_s + seconds * (one.round - 1),
            closed_s=one.closed_s + seconds * one.round,
            seconds=one.seconds + seconds,
        )
        for one in trace.rounds
    )
    return Trace(trace.header, {**trace.tables, "tasks": tuple(tasks), "rounds": tuple(rounds)})


def test_what_a_step_takes_the_server_is_what_nobody_s_link_explains(trial, tmp_path):
    """Half a second more in every step of every device is the server's; the replay's rounds are as much longer."""
    folder, run, trace = trial
    before_s = recorded_gateway.split_step_seconds(trace)
    assert before_s < 0.1, "nobody serves in a replay of a plan"
    busy = busier(trace, 0.5 * STEPS)
    assert recorded_gateway.split_step_seconds(busy) == pytest.approx(before_s + 0.5, rel=0.1)
    _, records = replay_plan(resolve_data(busy.header.plan, folder), tmp_path / "run", trace=busy)
    for before, after in zip(closed_rounds(run.records), closed_rounds(records), strict=True):
        assert after.seconds == pytest.approx(before.seconds + 0.5 * STEPS, rel=0.05)

"""A trace as a replay's source: what was recorded happens again, what was not is scaled from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from msgspec.structs import replace as replace_field

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import Joined, Left, Noted, RoundOpened, closed_rounds
from edge_server.plan.data import resolve_data
from edge_server.record.rows import Presence, Sample, TaskRow
from edge_server.replay.devices.behaviour import Work
from edge_server.replay.devices.recorded_device import RecordedDevice
from edge_server.replay.devices.recorded_run import recorded_behaviours
from edge_server.replay.run import replay_plan, run_replay
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import export
from shared.errors import ConfigError
from shared.protocol.messages import Spec
from tests.edge_server.report.journals import field_run, trained_alone
from tests.edge_server.textbook import LINKS, make_plan
from tests.naming import names_all, naming

WEIGHTS = 4 * 64 + 4 + 4 * 10 + 10
"""Of the field run's network: 64 inputs, 4 hidden units, 10 classes."""

LARGE = 'name = "mlp"\noptions = { features = 8, hidden = 5000, classes = 3 }'


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A run of three devices with links and delays, and its trace."""
    folder = tmp_path_factory.mktemp("trial")
    make_plan(folder, more=LINKS, model=LARGE, evaluation="on_device = true")
    [(run, records)] = run_replay(folder / "plan.toml", folder, folder / "runs", 0, 1)
    export(folder / "runs", run.name, folder / "trace", folder)
    return folder, run, records


def test_a_replayed_trace_is_the_run_again(trial, tmp_path):
    """The same model and bytes, the recorded seconds of computing, and round times within 5 %."""
    folder, run, records = trial
    [(again, found)] = run_replay(folder / "trace", folder, tmp_path, 0, 1)
    before, after = closed_rounds(records), closed_rounds(found)
    for name in ("arrived", "bytes_up", "bytes_down", "accuracy", "loss", "test_loss"):
        assert [getattr(one, name) for one in after] == [getattr(one, name) for one in before], name
    assert median(abs(b.seconds / a.seconds - 1) for a, b in zip(before, after, strict=True)) < 0.05
    costs, replayed = costs_by_round(records), costs_by_round(found)
    for number, told in costs.items():
        for device, cost in told.items():
            other = replayed[number][device]
            assert other.compute_s == cost.compute_s
            assert other.download_s == pytest.approx(cost.download_s, rel=0.1)
            assert other.provenance["compute_s"].source.startswith("trace")
    assert again.parent == tmp_path
    assert run.name != again.name


def test_a_run_is_replayed_as_its_trace_is_and_twice_the_same(trial, tmp_path):
    """By the run's name or by the trace's folder, whatever the number of processes."""
    folder, run, _ = trial
    [(one, _)] = run_replay(Path(run.name), folder, folder / "runs", 0, 1)
    [(two, _)] = run_replay(folder / "trace", folder, tmp_path, 0, 2)
    assert (one / "journal.jsonl").read_bytes() == (two / "journal.jsonl").read_bytes()


def test_another_plan_does_other_work_with_the_recorded_devices(trial, tmp_path):
    """Twice the epochs take twice the seconds; a part of the devices may be named, and the record says who is not."""
    folder, _, _ = trial
    named = '[[device]]\nname = "b"\n[[device]]\nname = "c"'
    more = {"more": named, "cohort": "min_devices = 2", "model": LARGE, "partition": 'kind = "none"'}
    hyper = "local_epochs = {}\nbatch_size = 8\nlearning_rate = 0.2"
    seconds = []
    for epochs in (2, 4):
        make_plan(tmp_path, rounds=1, hyper=hyper.format(epochs), **more)
        [(_, records)] = run_replay(folder / "trace", folder, tmp_path, 0, 1, instead=tmp_path / "plan.toml")
        seconds.append({device: cost.compute_s for device, cost in costs_by_round(records)[1].items()})
    assert seconds[0].keys() == {"b", "c"}
    assert {name: seconds[1][name] / seconds[0][name] for name in "bc"} == pytest.approx({"b": 2.0, "c": 2.0})
    notes = [one.what for one in records if isinstance(one, Noted)]
    [note] = notes
    assert names_all(note, 1, "a")


def test_a_plan_may_not_name_a_device_that_the_trace_does_not_know(trial, tmp_path):
    folder, _, _ = trial
    make_plan(tmp_path, more='[[device]]\nname = "b"\n[[device]]\nname = "x"')
    with pytest.raises(ConfigError, match=naming("x")):
        run_replay(folder / "trace", folder, tmp_path, 0, 1, instead=tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match=naming(folder / "plan.toml")):
        run_replay(folder / "plan.toml", folder, tmp_path, 0, 1, instead=tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match=naming(7, 3)):
        run_replay(folder / "trace", folder, tmp_path, 7, 1)


def field(tmp_path: Path) -> Trace:
    return trace_of(trained_alone(field_run(tmp_path)))


def work(round_: int = 1, **changes: object) -> Work:
    """Return the work of the field run's tasks: 2 epochs of 40 examples in batches of 16."""
    known = {"steps": 6, "examples": 80, "weights": WEIGHTS, "flops": 800, "run": "r", "round": round_, "train": True}
    return Work(**{**known, **changes})


def test_the_same_task_takes_the_recorded_figures(tmp_path):
    """With their quality: what a sensor measured stays measured, and says that it comes from a trace."""
    [orin] = recorded_behaviours(field(tmp_path), ["orin"])
    effort = orin.compute(work(1), 999.0)
    assert (effort.seconds, effort.cycles, effort.joules, effort.idle_w) == (3.5, 3.0e9, 20.25, 2.0)
    told = effort.provenance["compute_joules"]
    assert (told.source, told.quality, told.uncertainty) == ("trace: ina3221", "measured", 0.02)
    assert effort.provenance["cycles"].quality == "modelled"


def test_a_smaller_share_of_each_step_is_that_share_of_a_recorded_task(tmp_path):
    """FedAvg was recorded, which computes all: of a method that computes a quarter, round 1 takes a quarter."""
    [orin] = recorded_behaviours(field(tmp_path), ["orin"])
    effort = orin.compute(work(1, share=0.25), 8.5)
    assert effort.cycles == pytest.approx(0.25 * 3.0e9)
    assert effort.provenance["cycles"].source == "trace: round 1 scaled"


def test_a_method_that_computes_less_takes_what_was_recorded_if_it_is_told_the_same(tmp_path):
    """Random dropout with half the neurons in round 1 and all in round 2: the same again is again the same."""
    trace = field(tmp_path)
    plan = replace_field(trace.header.plan, algorithm=Spec(name="random_dropout"))
    told = [replace_field(one, values={"keep": 0.5 if one.round == 1 else 1.0}) for one in trace.decisions]
    trace = replace(
        trace, header=replace_field(trace.header, plan=plan), tables={**trace.tables, "decisions": tuple(told)}
    )
    [orin] = recorded_behaviours(trace, ["orin"])
    assert orin.compute(work(1, share=0.25), 999.0).seconds == 3.5
    assert orin.compute(work(1, share=1.0), 8.5).cycles == pytest.approx(4 * 3.0e9)


def test_other_work_is_scaled_from_the_task_nearest_in_time(tmp_path):
    """Round 1 arrived at 12 s with 3.5 s and 20.25 J, round 2 at 73 s with 4.5 s; half the examples take half of that.

    The clock was 1.5 GHz until 68 s and 1 GHz since. Round 2 computed from 67.7 s to 72.2 s: 4.65e9 cycles of one core.
    """
    [orin] = recorded_behaviours(field(tmp_path), ["orin"])
    half = orin.compute(work(9, examples=40), 10.0)
    assert half.seconds == pytest.approx(1.75)
    assert half.cycles == pytest.approx(1.5e9)
    assert half.joules == pytest.approx(20.25 / 2)
    assert {one.quality for one in half.provenance.values()} == {"modelled"}
    late = orin.compute(work(9, examples=40), 80.0)
    assert late.seconds == pytest.approx(4.65 / 2), "all of it at 1 GHz"
    between = orin.compute(work(9, examples=40), 67.0)
    assert between.seconds == pytest.approx(1.0 + 4.65 / 2 - 1.5), "a second of it at 1.5 GHz"


def test_another_network_is_scaled_by_its_operations(tmp_path):
    """A step on 16 examples was measured at 9000 operations: 562.5 an example. 1125 take twice as long."""
    [orin] = recorded_behaviours(field(tmp_path), ["orin"])
    assert orin.compute(work(1, weights=2 * WEIGHTS, flops=80 * 1125), 10.0).seconds == pytest.approx(7.0)


def test_a_device_without_a_task_takes_the_figures_of_another_and_says_so(tmp_path):
    """The late task of `pi-10` is known, of `pi-9` none is."""
    found = recorded_behaviours(field(tmp_path), ["orin", "pi-10", "pi-9"])
    assert [one.compute(work(2), 70.0).seconds for one in found] == [4.5, 4.5, 4.5]
    assert [len(one.warnings) for one in found] == [0, 0, 1]
    assert names_all(found[2].warnings[0], "pi-9")


def test_a_trace_without_any_task_cannot_be_replayed(tmp_path):
    empty = trace_of(field_run(tmp_path)[:5])
    with pytest.raises(ConfigError):
        recorded_behaviours(empty, ["orin"])
    with pytest.raises(ConfigError, match=naming("x")):
        recorded_behaviours(field(tmp_path), ["orin", "x"])


def test_a_link_has_the_rate_of_its_round(tmp_path):
    """4000 bytes came in 0.4 s and 4050 went in 0.8 s; of 12 - 5 s the task's 4.7 s leave 2.3 s beside.

    So the delay may be 0.18 s, half of 90 % of 0.4 s: 4000 bytes in 0.04 s, 4050 in 0.44 s, and 1.94 s stay beside.
    """
    [orin] = recorded_behaviours(field(tmp_path), ["orin"])
    assert orin.delay_s == pytest.approx(0.18)
    up, down = orin.of_round(1)
    assert down.at(0.0) == pytest.approx(32000 / 0.04)
    assert up.at(0.0) == pytest.approx(32400 / 0.44)
    assert orin.compute(work(1), 0.0).lag_s == pytest.approx(2.3 - 0.36)
    assert orin.of_round(7)[0].at(0.0) == up.at(0.0), "a round that was not recorded has the nearest one's"
    assert orin.radio("up", 5.0, 7.0) == pytest.approx(2 * 3.5 / 0.8)
    assert orin.radio("down", 5.0, 7.0) is None, "nobody measured it"


def test_devices_are_there_when_they_were(tmp_path):
    found = recorded_behaviours(field(tmp_path), ["orin", "pi-10", "pi-9"])
    assert [one.present for one in found] == [
        ((0.0, math.inf),),
        ((1.5, 8.0), (61.0, math.inf)),
        ((5.5, 60.0),),
    ]


def reading(second: float, hertz: float) -> Sample:
    return Sample(at_s=second, device="a", name="cpu.f_hertz", value=hertz, unit="Hz", quality="measured")


def test_the_mean_of_both_sides_stands_for_an_absence():
    """900 MHz until it left at 8 s, 600 MHz when it was back at 61 s; what was read between tasks does not count."""
    tasks = {
        number: TaskRow(round=number, device="a", outcome="arrived", compute_s=5.0, upload_s=1.0, arrived_s=arrived_s)
        for number, arrived_s in ((1, 7.0), (2, 70.0))
    }
    clock = [reading(3.0, 9e8), reading(6.5, 1e8), reading(65.0, 6e8), reading(90.0, 2e9)]
    away = ((0.0, 8.0), (61.0, 75.0), (79.0, math.inf))
    curve, gaps = RecordedDevice("a", "", tasks=tasks, readings={"cpu.f_hertz": clock}, present=away).curve(
        "cpu.f_hertz"
    )
    assert [curve.at(second) for second in (0.0, 7.9, 8.0, 60.9, 62.0, 65.0, 99.0)] == [
        *(9e8, 9e8, 7.5e8, 7.5e8, 6e8, 6e8, 6e8)
    ]
    assert gaps == 1


def test_a_filled_gap_is_noted(tmp_path):
    """In the replay's record, by device."""
    trace = field(tmp_path)
    gone = Presence(at_s=20.0, device="orin", event="left", cause="gone")
    back = Presence(at_s=26.0, device="orin", event="joined", cause="restarted")
    seen = tuple(sorted((*trace.presence, gone, back), key=lambda one: one.at_s))
    [orin] = recorded_behaviours(Trace(trace.header, {**trace.tables, "availability": seen}), ["orin"])
    [warning] = orin.warnings
    assert names_all(warning, "orin", 1, "5 s")


def test_what_a_round_waited_for_besides_is_waited_for_again(trial, tmp_path):
    """Such as a trainer that starts: in round 1 every update came 3 s later than its parts say; no cost counts them."""
    folder, _, records = trial
    trace = files.read(folder / "trace")
    tasks = [
        replace_field(one, arrived_s=one.arrived_s + 3.0) if one.round == 1 and one.arrived_s is not None else one
        for one in trace.tasks
    ]
    plan = replace_field(resolve_data(trace.header.plan, folder), rounds=1)
    _, found = replay_plan(plan, tmp_path / "run", trace=Trace(trace.header, {**trace.tables, "tasks": tuple(tasks)}))
    [after], before = closed_rounds(found), closed_rounds(records)[0]
    assert after.seconds == pytest.approx(before.seconds + 3.0, rel=0.05)
    assert costs_by_round(found)[1]["a"].compute_s == costs_by_round(records)[1]["a"].compute_s


def test_who_left_in_the_trace_leaves_in_its_replay(trial, tmp_path):
    """At the recorded seconds; a round that needs three devices waits until the third is back."""
    folder, _, _ = trial
    trace = files.read(folder / "trace")
    gone = Presence(at_s=4.0, device="c", event="left", cause="gone")
    back = Presence(at_s=8.0, device="c", event="joined", cause="reconnected")
    trace = Trace(trace.header, {**trace.tables, "availability": (*trace.presence, gone, back)})
    _, records = replay_plan(resolve_data(trace.header.plan, folder), tmp_path / "run", trace=trace)
    assert [one.at for one in records if isinstance(one, Left)] == [4.0]
    assert [(one.device, one.at) for one in records if isinstance(one, Joined)][-1] == ("c", 8.0)
    opened = [one.at for one in records if isinstance(one, RoundOpened)]
    assert opened[1] == 8.0
    assert [len(one.arrived) for one in closed_rounds(records)] == [3, 3, 3]

"""The server's own seconds, as a trace tells them and as a replay takes them."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Struct

from edge_server.journal.records import closed_rounds
from edge_server.journal.runs import StoredRun
from edge_server.plan.data import resolve_data
from edge_server.record.rows import Round, Sample
from edge_server.replay.comparison.stored_runs import gap_between_runs
from edge_server.replay.devices import recorded_gateway
from edge_server.replay.devices.recorded_device import server_training_s
from edge_server.replay.devices.recorded_run import recorded_behaviours
from edge_server.replay.run import replay_plan, run_replay
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.trace import Trace
from shared.algorithms import ALGORITHMS
from tests.edge_server.report.journals import field_run, trained_alone
from tests.edge_server.textbook import labelled_server, make_plan, require_equal

LINKS = """
[[device]]
name = "a"
compute_s = 0.1
up_mbit_s = 2.0
down_mbit_s = 2.0
[[device]]
name = "b"
compute_s = 0.4
up_mbit_s = 20.0
down_mbit_s = 20.0
[[device]]
name = "c"
compute_s = 0.2
up_mbit_s = 10.0
down_mbit_s = 10.0
"""
LARGE = 'name = "mlp"\noptions = { features = 8, hidden = 30000, classes = 3 }'


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of three devices whose links are so unequal that two of them wait for the third, and its trace."""
    folder = tmp_path_factory.mktemp("played")
    make_plan(folder, rounds=2, more=LINKS, model=LARGE, evaluation="every = 1")
    [(run, records)] = run_replay(folder / "plan.toml", folder, folder / "runs", 0, 1)
    return folder, StoredRun(run, records), trace_of(records)


def with_rows(trace: Trace, table: str, change) -> Trace:
    """Return a trace with every row of a table changed."""
    rows: tuple[Struct, ...] = tuple(map(change, trace.tables[table]))
    return Trace(trace.header, {**trace.tables, table: rows})


def later(seconds: dict[int, float]):
    """Return what lets rounds end later, and all that follows as much later."""

    def change(row: Round) -> Round:
        before = sum(own_s for number, own_s in seconds.items() if number < row.round)
        own_s = before + seconds.get(row.round, 0.0)
        moments = {"opened_s": row.opened_s + before, "closed_s": row.closed_s + own_s}
        return msgspec.structs.replace(row, **moments, seconds=row.seconds + seconds.get(row.round, 0.0))

    return change


def test_a_round_is_the_servers_own_from_the_last_update_to_its_end(tmp_path):
    """Orin's update of round 1 came at 12 s of the field's run; what its upload took to be stored is the upload's."""
    trace = trace_of(trained_alone(field_run(tmp_path)))
    [one, *_] = trace.rounds
    tasks = [task for task in trace.tasks if task.round == 1 and task.outcome == "arrived"]
    parts_s = max(task.download_s + task.compute_s + task.upload_s for task in tasks)
    ended_s = max(*(task.arrived_s for task in tasks), one.opened_s + parts_s)
    assert recorded_gateway.round_end_seconds(trace)(1) == pytest.approx(one.closed_s - ended_s)
    assert one.closed_s - ended_s > 0
    rest_s = one.closed_s - one.opened_s - tasks[0].download_s - tasks[0].compute_s
    longer = with_rows(trace, "tasks", lambda row: msgspec.structs.replace(row, upload_s=rest_s - 0.25))
    assert recorded_gateway.round_end_seconds(longer)(1) == pytest.approx(0.25)


def test_who_is_waited_for_until_the_deadline_is_not_the_servers_time(played):
    """With one device missing and a deadline of 120 s, a round of 121 s has one second of the server's own."""
    _, _, trace = played
    missing = with_rows(
        trace, "tasks", lambda row: msgspec.structs.replace(row, outcome="missing") if row.device == "a" else row
    )
    assert trace.header.plan.round.deadline_s < 500
    due_s = trace.header.plan.round.deadline_s
    ended = with_rows(missing, "rounds", lambda row: msgspec.structs.replace(row, closed_s=row.opened_s + due_s + 1.0))
    assert recorded_gateway.round_end_seconds(ended)(1) == pytest.approx(1.0)


def test_a_round_that_nobody_knows_of_takes_the_median(played):
    _, _, trace = played
    slow = with_rows(trace, "rounds", later({1: 3.0, 2: 5.0}))
    tasks = tuple(
        msgspec.structs.replace(row, arrived_s=row.arrived_s + 3.0 * (row.round == 2)) for row in slow.tables["tasks"]
    )
    slow = Trace(slow.header, {**slow.tables, "tasks": tasks})
    own_s = recorded_gateway.round_end_seconds(slow)
    assert (own_s(1), own_s(2), own_s(9)) == pytest.approx((3.0, 5.0, 4.0), abs=0.01)
    unknown = with_rows(slow, "tasks", lambda row: msgspec.structs.replace(row, arrived_s=None))
    assert recorded_gateway.round_end_seconds(unknown)(1) == 0.0


def test_a_replay_takes_the_servers_own_seconds(played, tmp_path):
    """Rounds end three and five seconds after their last update, as they did, and the model does not change."""
    folder, run, trace = played
    slow = with_rows(trace, "rounds", later({1: 3.0, 2: 5.0}))
    tasks = tuple(
        msgspec.structs.replace(row, arrived_s=row.arrived_s + 3.0 * (row.round == 2)) for row in slow.tables["tasks"]
    )
    slow = Trace(slow.header, {**slow.tables, "tasks": tasks})
    plan = resolve_data(slow.header.plan, folder)
    _, records = replay_plan(plan, tmp_path / "slow", trace=slow)
    before = [one.seconds for one in closed_rounds(run.records)]
    after = [one.seconds for one in closed_rounds(records)]
    assert [b - a for a, b in zip(before, after, strict=True)] == pytest.approx([3.0, 5.0], abs=0.2)
    found = gap_between_runs(run, StoredRun(tmp_path / "slow", records))
    assert found.model == "same"


def test_a_replay_takes_the_seconds_of_a_recorded_servers_training(tmp_path, monkeypatch):
    """They delay every device of a round: what the least delayed one's update took beyond its own spans."""
    monkeypatch.setitem(ALGORITHMS, "labelled-server", labelled_server)
    sections = {"algorithm": 'name = "labelled-server"', "server_data": 'source = "npz"\npath = "examples.npz"'}
    plan = make_plan(tmp_path, rounds=2, more=LINKS, **sections)
    state, records = replay_plan(plan, tmp_path / "quick")
    quick = trace_of(records)
    own_s = server_training_s(quick)
    slow = with_rows(with_rows(quick, "rounds", later({1: 3.0, 2: 3.0})), "tasks", arrived_later(3.0))
    assert server_training_s(slow) == pytest.approx(own_s + 3.0)
    one_late = with_rows(quick, "tasks", lambda row: arrived_later(9.0)(row) if row.device == "a" else row)
    assert server_training_s(one_late) < own_s + 3.0
    again, after = replay_plan(plan, tmp_path / "slow", trace=slow)
    pairs = zip(closed_rounds(records), closed_rounds(after), strict=True)
    assert [two.seconds - one.seconds for one, two in pairs] == pytest.approx([3.0, 3.0], abs=0.05)
    require_equal(again.tree, state.tree)


def arrived_later(seconds: float):
    """Return what lets updates come so much later in every round, and all that follows as well."""
    return lambda row: msgspec.structs.replace(row, arrived_s=row.arrived_s + seconds * row.round)


def told(trace: Trace, rates: dict[str, float]) -> Trace:
    """Return a trace whose devices told of their links after the first round."""
    name = "link.down_bits_per_s"
    rows = [
        Sample(at_s=5.0, device=device, name=name, value=rate, unit="bit/s", quality="measured")
        for device, rate in rates.items()
    ]
    return Trace(trace.header, {**trace.tables, "readings": tuple(rows)})


def test_who_waited_for_others_has_the_link_that_it_told_of(played):
    """The slowest of a transmission waited for nobody: whatever it told, its link is what its download shows."""
    _, _, trace = played
    names = ["a", "b", "c"]
    without = [one.of_round(1)[1].at(0.0) for one in recorded_behaviours(trace, names)]
    rates = dict(zip(names, (50e6, 20e6, 10e6), strict=True))
    found = [one.of_round(1)[1].at(0.0) for one in recorded_behaviours(told(trace, rates), names)]
    assert found[0] == without[0]
    assert found[1:] == [20e6, 10e6]
    assert without[1] < 15e6
    slower = recorded_behaviours(told(trace, dict.fromkeys(names, 1e3)), names)
    assert [one.of_round(1)[1].at(0.0) for one in slower] == without


def test_a_replay_of_unequal_links_gives_every_download_its_seconds(played, tmp_path):
    """Downloads are within a tenth, and without what devices told they are not; payloads and model are the same bits.

    Into how many frames an upload is cut follows its pace: of these, their headers of 36 bytes may be more or fewer.
    """
    folder, run, trace = played
    plan = resolve_data(trace.header.plan, folder)
    errors = {}
    for name, one in (("told", told(trace, {"a": 2e6, "b": 20e6, "c": 10e6})), ("untold", trace)):
        _, records = replay_plan(plan, tmp_path / name, trace=one)
        found = gap_between_runs(run, StoredRun(tmp_path / name, records))
        errors[name] = found.spread("download_s").most
        assert found.model == "same"
        assert found.spread("bytes_down").exact == found.spread("payload_up_bytes").exact == 6
        assert {abs(one.replayed - one.recorded) % 36 for one in found.pairs if one.figure == "bytes_up"} == {0}
        assert found.spread("bytes_up").most < 1e-4
        assert found.spread("round_s").most < 0.05
    assert errors["told"] < 0.1 < errors["untold"]

"""A run becomes a trace and a run again, and nothing of it is lost, invented or moved."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import CostSettled, RoundOpened, RunOpened, UpdateAccepted, closed_rounds
from edge_server.journal.runs import find_run, find_unfinished, summarise_run
from edge_server.journal.sqlite import read_records
from edge_server.record.rows import TABLES, columns, unit_of
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.header import FILE
from edge_server.replay.trace.transfer import export, import_trace
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from shared.protocol.messages import derive_seed
from tests.edge_server.report.journals import field_cost as cost
from tests.edge_server.report.journals import field_run
from tests.naming import naming


def export_field_run(folder: Path, *, cut: int | None = None, **options: bool) -> Path:
    """Write the trace of the field run, or of its first records."""
    with closing(SqliteStore(folder / "runs" / "field-1", durable=False)) as store:
        store.extend(field_run(folder)[:cut])
    export(folder / "runs", "field-1", folder / "trace", folder, **options)
    return folder / "trace"


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("cut", [None, 10, 3, 1])
def test_an_imported_trace_exports_to_the_same_bytes(tmp_path, cut):
    """Of a run that finished, and of one that stopped anywhere."""
    trace = export_field_run(tmp_path, cut=cut)
    folder = import_trace(files.read(trace), tmp_path / "elsewhere")
    assert folder == tmp_path / "elsewhere" / "field-1"
    export(tmp_path / "elsewhere", "field-1", tmp_path / "again", tmp_path)
    assert texts(trace) == texts(tmp_path / "again")


def test_an_imported_run_shows_what_the_run_shows(tmp_path):
    """Rounds, costs and the summary; moments too, but for the zero of their clock."""
    trace = export_field_run(tmp_path)
    run, again = (
        find_run(tmp_path / "runs", "field-1"),
        find_run(tmp_path / "elsewhere", str(import_trace(files.read(trace), tmp_path / "to"))),
    )
    assert summarise_run(again) == summarise_run(run)
    assert costs_by_round(again.records) == costs_by_round(run.records)
    still = [msgspec.structs.replace(one, at=None) for one in closed_rounds(run.records)]
    told = [msgspec.structs.replace(one, at=None) for one in closed_rounds(again.records)]
    assert [msgspec.structs.replace(one, failed={}) for one in told] == [
        msgspec.structs.replace(one, failed={}) for one in still
    ]
    for kind in (RoundOpened, UpdateAccepted):
        count = [sum(isinstance(one, kind) for one in found) for found in (run.records, again.records)]
        assert count[0] == count[1]
    said = [one.update.cost for one in again.records if isinstance(one, UpdateAccepted) and one.update.params]
    assert [(cost.compute_s, cost.upload_s, "upload_s" in cost.provenance) for cost in said] == [
        (3.5, None, False),
        (4.5, None, False),
    ], "an update cannot say what its own upload will cost"


def test_moments_are_seconds_of_the_run_over_the_restart(tmp_path):
    """The second process began 60 s after the first, and its clock showed 3 s then."""
    trace = files.read(export_field_run(tmp_path))
    assert [(one.round, one.opened_s, one.closed_s) for one in trace.rounds] == [(1, 5.0, 14.0), (2, 62.0, 74.0)]
    events = [(one.at_s, one.device, one.event, one.cause, one.interrupts) for one in trace.presence]
    assert events == [
        (0.0, "orin", "joined", "connected", None),
        (1.5, "pi-10", "joined", "connected", None),
        (5.5, "pi-9", "joined", "connected", None),
        (8.0, "pi-10", "left", "gone", 1),
        (60.0, "orin", "joined", "connected", None),
        (60.0, "pi-9", "left", "unheard", None),
        (61.0, "pi-10", "joined", "restarted", None),
    ]


def test_a_task_is_told_apart_by_what_came_of_it(tmp_path):
    """One arrived, one was late, whose cost is known all the same, one failed and one was never heard of."""
    trace = files.read(export_field_run(tmp_path))
    found = {(one.round, one.device): one for one in trace.tasks}
    assert {key: one.outcome for key, one in found.items()} == {
        (0, "orin"): "arrived",
        (0, "pi-9"): "failed",
        (1, "orin"): "arrived",
        (1, "pi-10"): "missing",
        (1, "pi-9"): "failed",
        (2, "orin"): "arrived",
        (2, "pi-10"): "late",
        (3, "orin"): "arrived",
    }
    assert [found[key].purpose for key in ((0, "orin"), (1, "orin"), (3, "orin"))] == ["measure", "train", "evaluate"]
    first = found[1, "orin"]
    assert (first.began_s, first.arrived_s) == (7.0, 12.0), "5 s before it arrived, 0.3 of them in exchange"
    assert (first.steps, first.examples, first.hertz) == (6, 40, 1.5e9), "2 epochs of 40 in batches of 16"
    assert first.provenance["compute_joules"] == cost("orin", 1).provenance["compute_joules"]
    assert found[2, "pi-10"].compute_s == 4.5
    assert found[2, "pi-10"].compute_joules is None, "no sensor is not zero joules"


def test_a_task_does_not_begin_before_its_round(tmp_path):
    """The clocks of two machines differ: one that says it computed for 90 s of the 7 s there were began with them."""
    records = [
        msgspec.structs.replace(one, cost=msgspec.structs.replace(one.cost, compute_s=90.0))
        if isinstance(one, CostSettled)
        else one
        for one in field_run(tmp_path)
    ]
    assert [one.began_s for one in trace_of(records).tasks if one.purpose == "train"] == [5.0, None, None, 62.0, None]


def test_devices_stand_in_the_order_of_the_fleet(tmp_path):
    """As the plan names them, then by number: they share the data set in that order."""
    devices = files.read(export_field_run(tmp_path)).header.devices
    assert [(one.name, one.board) for one in devices] == [("pi-9", ""), ("orin", "orin-nano"), ("pi-10", "")]


def test_an_anonymous_trace_holds_no_name_and_the_same_figures(tmp_path):
    trace = export_field_run(tmp_path, anonymous=True)
    assert not [
        name for name, text in texts(trace).items() if re.search("orin|pi-|said|wet", text.replace("orin-nano", ""))
    ]
    found = files.read(trace)
    assert [one.name for one in found.header.devices] == ["device-0", "device-1", "device-2"]
    assert {(one.round, one.device): one.outcome for one in found.tasks}[2, "device-2"] == "late"
    assert found.header.anonymous
    seed = found.header.plan.seed  # a name is not to be told by trying whose seed it would have
    assert [one.seed for one in found.decisions] == [
        derive_seed(seed, one.round, one.device) for one in found.decisions
    ]


def test_an_anonymous_trace_does_not_say_where_anything_lay(tmp_path):
    """Not the folder of the data, where that is none of the data sets', nor that of a recorded link."""
    records = field_run(tmp_path)
    plan = msgspec.structs.replace(
        records[0].plan, data=msgspec.structs.replace(records[0].plan.data, path="/srv/customer-7/digits.npz")
    )
    with closing(SqliteStore(tmp_path / "runs" / "field-1", durable=False)) as store:
        store.extend([msgspec.structs.replace(records[0], plan=plan), *records[1:]])
    export(tmp_path / "runs", "field-1", tmp_path / "named", tmp_path)
    assert "customer-7" in "".join(texts(tmp_path / "named").values())
    export(tmp_path / "runs", "field-1", tmp_path / "trace", tmp_path, anonymous=True)
    assert "customer-7" not in "".join(texts(tmp_path / "trace").values())
    assert files.read(tmp_path / "trace").header.plan.data.path == "digits.npz"


def test_names_that_say_whose_data_a_device_has_cannot_be_left_out(tmp_path):
    records = field_run(tmp_path)
    plan = msgspec.structs.replace(
        records[0].plan, partition=msgspec.structs.replace(records[0].plan.partition, kind="client")
    )
    with closing(SqliteStore(tmp_path / "runs" / "field-1", durable=False)) as store:
        store.extend([msgspec.structs.replace(records[0], plan=plan), *records[1:]])
    with pytest.raises(ConfigError, match=naming("partition", "client")):
        export(tmp_path / "runs", "field-1", tmp_path / "trace", tmp_path, anonymous=True)


def test_nobody_goes_on_with_an_imported_run(tmp_path):
    """Its updates and its model are elsewhere."""
    trace = export_field_run(tmp_path, cut=10)
    plan = load(tmp_path / "plan.toml", tmp_path)
    assert find_unfinished(tmp_path / "runs", plan) == "field-1"
    import_trace(files.read(trace), tmp_path / "to")
    assert find_unfinished(tmp_path / "to", plan) is None


def test_a_run_is_not_overwritten(tmp_path):
    trace = export_field_run(tmp_path)
    with pytest.raises(ConfigError, match=naming("field-1", "--as")):
        import_trace(files.read(trace), tmp_path / "runs")
    folder = import_trace(files.read(trace), tmp_path / "runs", "field-2")
    assert next(one for one in read_records(folder) if isinstance(one, RunOpened)).run == "field-2"
    with pytest.raises(ConfigError, match=naming(trace)):
        export(tmp_path / "runs", "field-1", trace, tmp_path)


def test_the_page_tells_every_column_and_its_unit():
    """What the README says of each table is what is written, in that order."""
    page = (Path(files.__file__).parent / "README.md").read_text()
    for table in TABLES:
        [section] = re.findall(rf"^## {table}\.csv\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        told = re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE)
        own = [name for name in columns(table) if not name.endswith(("_quality", "_source", "_uncertainty"))]
        assert told == [(name, unit_of(name)) for name in own], table
    assert FILE in page

"""Plan tables of devices: meaning, defaults, refusals with remedies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import RangeLink, TraceLink
from edge_server.plan.plan import devices
from edge_server.plan.simulated_devices import CyclesPower, RangeCompute, TracePower
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.feasibility import require_possible
from edge_server.replay.trace.export import sort_by_fleet
from edge_server.replay.workload import Workload
from edge_server.rounds.check_plan import load
from shared.data.cache import DataCache
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.naming import naming

ALL = """
[[device]]
name = "pi"
count = 3
compute = { kind = "ranges", hertz = [1e9, 2e9], cycles_per_example = 2e7, again = "round" }
link = { kind = "trace", path = "net/x.csv.gz", name = "bus", where = { network = "wifi" }, scale = 0.5 }
power = { kind = "trace", path = "/srv/pi.csv", key_column = "workload", name = "gemm" }
[[device]]
name = "nano"
compute = { kind = "profile", board = "jetson-nano", cycles_per_flop = 0.3, cores = 3.5 }
link = { kind = "wireless", bandwidth_hz = [1e6, 5e6], distance_m = 120.0, fading = "rayleigh", again = 0.1 }
power = { kind = "profile", board = "jetson-nano" }
[[device]]
name = "zero"
compute_s = 3.0
link = { kind = "ranges", up_mbit_s = [1, 5], loss = 0.01 }
power = { kind = "given", busy_w = 2.0 }
"""


def plan_of(folder, more):
    """Return the plan with these devices."""
    return load(write_plan(folder, more=more), folder)


def test_every_table_can_be_given(tmp_path):
    plan = plan_of(tmp_path, ALL)
    pi, nano, zero = plan.device
    assert pi.compute == RangeCompute(hertz=(1e9, 2e9), cycles_per_example=2e7, again="round")
    assert isinstance(pi.link, TraceLink)
    assert (pi.link.where, pi.link.scale, pi.link.after) == ({"network": "wifi"}, 0.5, "repeat")
    assert (nano.compute.cores, nano.link.again, nano.power.board) == (3.5, 0.1, "jetson-nano")
    assert zero.link == RangeLink(up_mbit_s=(1.0, 5.0), loss=0.01)
    assert (zero.compute, zero.compute_s) == (None, 3.0)


def test_a_count_stands_for_so_many_devices_alike(tmp_path):
    plan = plan_of(tmp_path, ALL)
    fleet = devices(plan)
    assert [device.name for device in fleet] == ["pi-0", "pi-1", "pi-2", "nano", "zero"]
    assert {device.count for device in fleet} == {0}
    assert fleet[2].link == plan.device[0].link
    assert [device.name for device in devices(plan, 2)] == ["pi-0", "pi-1"]
    assert [device.name for device in devices(plan, 6)][-1] == "device-5"


def test_relative_paths_of_traces_start_at_the_data_root(tmp_path):
    pi = plan_of(tmp_path, ALL).device[0]
    assert pi.link.path == str(tmp_path / "net" / "x.csv.gz")
    assert isinstance(pi.power, TracePower)
    assert pi.power.path == "/srv/pi.csv"


def test_a_plan_with_every_table_survives_the_journal(tmp_path):
    """As JSON, which has no tuples, and with kinds as tags."""
    plan = plan_of(tmp_path, ALL + "[budget]\ntime_s = 60.0\njoules = 5.0\n")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan
    assert plan.budget.joules == 5.0


def test_a_device_without_tables_means_what_it_always_did():
    device = DevicePlan(name="a")
    assert (device.compute, device.link, device.power, device.count) == (None, None, None, 0)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("count = -1", ("count",)),
        ('compute = { kind = "magic" }', ("device[0].compute", "magic")),
        ('compute = { kind = "given" }', ("device[0].compute", "seconds")),
        ('compute = { kind = "given", seconds = inf }', ("device[0].compute", "seconds")),
        ('compute = { kind = "given", seconds = 1.0 }\ncompute_s = 2.0', ("compute", "compute_s")),
        ('compute = { kind = "ranges", hertz = 1e9 }', ("compute", "cycles_per_step")),
        (
            'compute = { kind = "ranges", hertz = 1e9, cycles_per_step = 1.0, cycles_per_flop = 1.0 }',
            ("cycles_per_step",),
        ),
        ('compute = { kind = "ranges", hertz = [2e9, 1e9], cycles_per_step = 1.0 }', ("hertz",)),
        ('compute = { kind = "ranges", hertz = 0.0, cycles_per_step = 1.0 }', ("hertz",)),
        (
            'compute = { kind = "ranges", hertz = 1.0, cycles_per_step = 1.0, again = -1.0 }',
            ("again", '"never"', '"round"'),
        ),
        ('compute = { kind = "profile", board = "x", cycles_per_step = 1.0, cores = 0.0 }', ("cores",)),
        ('link = { kind = "given", up_mbit_s = 0.0 }', ("device[0].link", "up_mbit_s")),
        ('link = { kind = "given", loss = 1.0 }', ("loss",)),
        ('link = { kind = "given", up_mbit = 1.0 }', ("device[0].link", "up_mbit", "up_mbit_s")),
        ('link = { kind = "ranges", again = nan }', ("again", '"never"', '"round"')),
        ('link = { kind = "given" }\nup_mbit_s = 1.0', ("link", "up_mbit_s")),
        ('link = { kind = "wireless", bandwidth_hz = 1e6 }', ("distance_m", "path_loss")),
        ('link = { kind = "wireless", bandwidth_hz = 1e6, distance_m = 1.0, share = 2.0 }', ("share",)),
        ('link = { kind = "wireless", bandwidth_hz = 1e6, distance_m = 1.0, tx_dbm = nan }', ("tx_dbm",)),
        ('link = { kind = "wireless", bandwidth_hz = 5e6, distance_m = 0.2 }', ("distance_m", "3gpp", 10)),
        ('link = { kind = "wireless", bandwidth_hz = 5e6, distance_m = [0.1, 300.0] }', ("distance_m", "3gpp", 10)),
        ('link = { kind = "trace", path = "x", scale = 0.0 }', ("scale",)),
        ('link = { kind = "trace", path = "x", offset_s = -1.0 }', ("offset_s",)),
        ('link = { kind = "trace", path = "x", offset_s = [2.0, 1.0] }', ("offset_s",)),
        ('link = { kind = "trace", path = "x", after = "stop" }', ("device[0].link.after", "stop")),
        ('power = { kind = "given", busy_w = -1.0 }', ("device[0].power", "busy_w")),
        ('power = { kind = "cycles", kappa = 1e-28 }', ("power", "cycles", "compute")),
        ('power = { kind = "profile", board = "x" }', ("power", "cycles", "compute")),
    ],
)
def test_a_mistake_in_a_table_names_file_and_key(tmp_path, table, named):
    path = write_plan(tmp_path, more=f'[[device]]\nname = "a"\n{table}')
    with pytest.raises(ConfigError, match=naming(path, "device", *named)) as caught:
        load(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_names_that_a_count_makes_must_not_clash(tmp_path):
    more = '[[device]]\nname = "pi"\ncount = 2\n[[device]]\nname = "pi-1"'
    with pytest.raises(ConfigError, match=naming("device", "pi-1")):
        plan_of(tmp_path, more)


def test_a_trace_names_the_devices_of_a_count_in_the_fleet_s_order(tmp_path):
    """Else a replay of it would give them one another's examples."""
    plan = plan_of(tmp_path, '[[device]]\nname = "z"\ncount = 12\n[[device]]\nname = "a"')
    names = [device.name for device in devices(plan)]
    assert sort_by_fleet(plan, sorted(names)) == names


@pytest.mark.parametrize(("key", "value"), [("time_s", "0.0"), ("joules", "-1.0"), ("time_s", "inf")])
def test_a_budget_must_be_positive_and_finite(tmp_path, key, value):
    with pytest.raises(ConfigError, match=naming("budget", key)):
        plan_of(tmp_path, f"[budget]\n{key} = {value}")


def test_the_papers_power_needs_a_clock():
    """Joules by cycles, of a device whose cycles nobody counts, would be none; with a clock they can be told."""
    compute = RangeCompute(hertz=1e9, cycles_per_step=1.0)
    assert DevicePlan(name="a", compute=compute, power=CyclesPower(kappa=0.0)).power


def test_the_example_of_a_cell_can_be_replayed():
    """Every device of it behaves, and its budgets are none that nobody could keep to."""
    pytest.importorskip("sklearn", reason="the digits come with the extra `demo`")
    plan = load(Path(__file__).parents[3] / "deploy" / "plans" / "cell.toml", Path())
    fleet = devices(plan)
    assert len(fleet) == 60 == plan.cohort.min_devices
    behaviours = [build_behaviour(device, index, plan.seed) for index, device in enumerate(fleet)]
    require_possible(plan, fleet, behaviours, Workload(DataCache()))

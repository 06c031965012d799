"""Recorded links and powers as curves: the published families, the rules for gaps and zeros, and what is refused."""

from __future__ import annotations

import gzip
from itertools import islice, pairwise
from pathlib import Path

import pytest

from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import TraceLink
from edge_server.plan.simulated_devices import GivenCompute, TracePower
from edge_server.replay.devices.behaviour import Behaviour, Work
from edge_server.replay.devices.build import build_behaviour
from shared.errors import ConfigError
from tests.machine import shared
from tests.naming import names_all, naming

WORK = Work(steps=1, examples=1, weights=1, flops=1, run="r", round=1, train=True)
FAMILIES = {
    "hsdpa3g_norway": {"name": "norway_bus_1"},
    "oboe": {"name": "oboe_trace_0"},
    "fcc_broadband": {"name": "trace_10322_http---edition.cnn.com"},
    "puffer_220218": {"name": "puffer_0000"},
    "mahimahi_cellular_100ms": {"name": "ATT-LTE-driving-2016"},
    "ireland_5g": {"name": "2019.12.01_12.11.21"},
    "wifi_cellular_pairs": {"name": "11_1", "where": {"network": "cellular"}},
}


def link(path: Path, index: int = 0, **keys: object) -> Behaviour:
    """Return the behaviour of a device behind a recorded link."""
    return build_behaviour(DevicePlan(name="a", link=TraceLink(path=str(path), **keys)), index, 0)


def written(folder: Path, text: str, header: str = "trace,t_s,mbps") -> Path:
    """Write a small trace."""
    path = folder / "trace.csv"
    path.write_text(f"{header}\n{text}")
    return path


def head(folder: Path, source: Path, lines: int = 3000) -> Path:
    """Copy the begin of a recorded file: all of them together take too long to read in a test."""
    path = folder / source.name
    with gzip.open(source, "rt") as rows, gzip.open(path, "wt") as out:
        out.writelines(islice(rows, lines))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_published_family_can_be_replayed(tmp_path, family):
    """What passes in its first minute is what its rows say, each held until the next one, for at most 5 s."""
    path = head(tmp_path, shared("data", "net-traces", f"{family}.csv.gz"))
    keys = FAMILIES[family]
    with gzip.open(path, "rt") as file:
        header, *rows = [line.strip().split(",") for line in file]
    fits = {"trace": keys["name"], "direction": "up", **keys.get("where", {})}
    column = header.index("ul_mbps" if "ul_mbps" in header else "mbps")
    mine = [row for row in rows if all(row[header.index(key)] == fits[key] for key in fits if key in header)]
    moments: dict[float, list[float]] = {}
    for row in mine:
        moments.setdefault(float(row[header.index("t_s")]), []).append(float(row[column]))
    starts = sorted(moments)
    expected = 0.0
    for start, stop in pairwise(starts):
        begin, end = start - starts[0], min(stop, start + 5.0, starts[0] + 60.0) - starts[0]
        expected += max(0.0, end - begin) * sum(moments[start]) / len(moments[start]) * 1e6
    device = link(path, **keys)
    assert expected > 0
    assert device.up.integral(0.0, 60.0) == pytest.approx(expected)
    assert device.up.finish_time(0.0, expected / 2) == pytest.approx(
        next(t / 1000 for t in range(60_001) if device.up.integral(0.0, t / 1000) >= expected / 2), abs=2e-3
    )
    assert bool(device.warnings) == any(b - a > 5 for a, b in pairwise(starts))


def test_a_gap_is_held_for_five_seconds_then_nothing_passes_and_the_run_hears_of_it(tmp_path):
    """2 Mbit/s at 0 s, the next value at 20 s: 10 Mbit by 5 s, and the next one at 21 s."""
    device = link(written(tmp_path, "x,0,2\nx,20,1\nx,21,1\n"))
    assert device.up.integral(0.0, 20.0) == 10e6
    assert device.up.finish_time(0.0, 11e6) == 21.0
    [warning] = device.warnings
    assert names_all(warning, "'x'", 1, "5 s", "20 s")


def test_zeros_are_outages_and_stay(tmp_path):
    """1 Mbit/s, nothing for 3 s, 1 Mbit/s again; then from the begin."""
    device = link(written(tmp_path, "x,10,1\nx,11,0\nx,14,1\n"))
    assert device.up.finish_time(0.5, 1e6) == 4.5
    assert device.up.integral(0.0, 14.0) == 2 * (1e6 + 3e6)  # the last step is as long as the one before it
    assert device.warnings == ()


def test_values_of_one_moment_count_by_their_mean_and_empty_cells_are_none(tmp_path):
    device = link(written(tmp_path, "x,0,1\nx,0,3\nx,1,\nx,2,4\n"))
    assert device.up.integral(0.0, 2.0) == 4e6


def test_two_ways_may_have_columns_of_their_own(tmp_path):
    path = written(tmp_path, "x,0,1,8\nx,1,2,9\n", header="trace,t_s,ul_mbps,dl_mbps")
    assert [way.at(0.0) for way in (link(path).up, link(path).down)] == [1e6, 8e6]
    turned = link(path, up_column="dl_mbps", down_column="ul_mbps")
    assert [way.at(0.0) for way in (turned.up, turned.down)] == [8e6, 1e6]


def test_a_direction_column_tells_the_ways_apart(tmp_path):
    path = written(tmp_path, "x,up,0,1\nx,up,1,1\nx,down,0,8\nx,down,1,8\n", header="trace,direction,t_s,mbps")
    assert [way.at(0.0) for way in (link(path).up, link(path).down)] == [1e6, 8e6]


def test_without_a_name_every_device_has_a_trace_of_its_own(tmp_path):
    path = written(tmp_path, "x,0,1\nx,1,1\ny,0,2\ny,1,2\n")
    assert [link(path, index).up.at(0.0) for index in range(3)] == [1e6, 2e6, 1e6]


def test_a_trace_may_be_scaled_entered_later_and_end(tmp_path):
    path = written(tmp_path, "x,0,1\nx,1,2\nx,2,3\n")
    device = link(path, scale=10.0, offset_s=1.5, after="zero")
    assert [device.up.at(t) for t in (0.0, 0.5, 1.5)] == [20e6, 30e6, 0.0]
    assert link(path, after="hold").up.at(99.0) == 3e6


def test_every_device_may_enter_one_trace_elsewhere(tmp_path):
    """A row a second whose rate is its number: where each begins is told by its first rate; the steps are shared."""
    path = written(tmp_path, "".join(f"x,{t},{t + 1}\n" for t in range(100)))
    keys = TraceLink(path=str(path), offset_s=(0.0, 100.0))
    fleet = [build_behaviour(DevicePlan(name=str(number), link=keys), number, 0) for number in range(20)]
    begun = {device.up.at(0.0) for device in fleet}
    assert len(begun) > 10
    assert {device.down.at(0.0) for device in fleet} == begun
    assert len({id(device.up.values) for device in fleet}) == 1


@pytest.mark.parametrize(
    ("text", "keys", "line", "named"),
    [
        ("", {}, "", ("where",)),
        ("x,0,1\nx,2,1\nx,1,1\n", {}, ":4", ("'x'", "1 s", "2 s")),
        ("x,0,1\nx,1,fast\n", {}, ":3", ("'x'",)),
        ("x,0,1\nx,1,-2\n", {}, ":3", ("'x'",)),
        ("x,0,1\nx,nan,2\n", {}, ":3", ("'x'",)),
        ("x,0,1\nx,1\n", {}, ":3", (2, 3)),
        ("x,0,0\nx,1,0\n", {}, "", ("'x'",)),
        ("x,0,1\n", {"name": "y"}, "", ("y", "x")),
        ("x,0,1\n", {"up_column": "kbps"}, "", ("kbps", "trace, t_s, mbps")),
        ("x,0,1\n", {"where": {"network": "wifi"}}, "", ("network",)),
    ],
)
def test_a_bad_trace_is_one_clear_error(tmp_path, text, keys, line, named):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=naming("a", f"{path}{line}", *named)) as caught:
        link(path, **keys)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_empty_or_no_table_is_one_clear_error(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "torn.csv.gz").write_bytes(gzip.compress(b"trace,t_s,mbps\n" + b"x,0,1\n" * 9999)[:40])
    for name in ("none.csv", "empty.csv", "torn.csv.gz"):
        with pytest.raises(ConfigError, match=naming("a", tmp_path / name)):
            link(tmp_path / name)


def power(path: Path, **keys: object) -> Behaviour:
    """Return the behaviour of a device that draws what was recorded, for ten seconds a task."""
    compute = GivenCompute(seconds=10.0)
    return build_behaviour(DevicePlan(name="a", compute=compute, power=TracePower(path=str(path), **keys)), 0, 0)


def test_a_recorded_power_is_charged_for_the_busy_time(tmp_path):
    """2 W for 1 s and 4 W for 1 s, again and again: 30 J in 10 s, whenever the task begins."""
    path = written(tmp_path, "r,5,2000\nr,6,4000\n", header="run,t_s,power_mw")
    device = power(path, idle_w=1.0)
    assert [device.compute(WORK, t).joules for t in (0.0, 3.3)] == [30.0, 30.0]
    assert device.compute(WORK, 0.0).idle_w == 1.0
    assert device.radio("up", 0.0, 1.0) is None
    assert power(path, after="hold").compute(WORK, 0.0).joules == 2.0 + 9 * 4.0
    assert power(path, tx_name="r").radio("up", 7.0, 8.5) == 4.0
    receiving = power(path, rx_name="r")
    assert (receiving.radio("down", 7.0, 8.5), receiving.radio("up", 7.0, 8.5)) == (4.0, None)


def test_a_pi_s_recorded_powers_are_those_of_its_benchmarks(tmp_path):
    """Means of the file's own description: 1.96, 2.52, 3.14 and 3.62 W with one to four cores busy."""
    path = shared("data", "power-traces", "rpi3b_ina219_benchmarks.csv.gz")
    for cores, watts in enumerate((1.96, 2.52, 3.14, 3.62), 1):
        device = power(path, key_column="workload", name=f"sysbench_cpu_{cores}", offset_s=20.0)
        assert device.compute(WORK, 0.0).joules / 10 == pytest.approx(watts, rel=0.05)


def test_a_power_trace_with_a_gap_is_refused(tmp_path):
    """Zero watts would be a lie, and the last ones a guess."""
    path = written(tmp_path, "r,0,2000\nr,6,4000\n", header="run,t_s,power_mw")
    with pytest.raises(ConfigError, match=naming("'r'", "0 s", "6 s")):
        power(path)

"""Device rows join broker state and history; no figure is invented."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from edge_server.fleet.device_rows import Device, device_rows
from edge_server.fleet.reading_cell import cell
from edge_server.fleet.state import Fleet
from edge_server.fleet.tables import (
    COLUMNS,
    FREE,
    devices_table,
    duration,
    plot_readings,
    readings_table,
    short_text,
    sparkline,
    task_cost_cell,
    throttle_cell,
)
from edge_server.journal.report_history import StoredReport
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, TaskCost
from shared.protocol.messages import Report, Status
from tests.device_agent.sources import report
from tests.naming import names_all

NOW = 1e9


def heard(*messages: Status | Report) -> Fleet:
    fleet = Fleet()
    for message in messages:
        fleet.observe(message)
    return fleet


def here(device: str, *, online: bool = True) -> Status:
    return Status(device=device, session=1, instance=device, online=online)


def test_the_broker_knows_who_is_there_and_the_history_since_when():
    """The same report on both sides has an age; one that the server has not kept yet has none."""
    same, newer = (report(Random(1), at, "a", instance="a") for at in (100.0, 130.0))
    fleet = heard(here("a"), same, here("b", online=False))
    [a, b, c] = device_rows(
        fleet, {"a": StoredReport(NOW - 7, same), "c": StoredReport(NOW - 9, report(Random(2), 1.0, "c"))}, {}, NOW
    )
    assert (a.device, a.online, a.age_s, a.at) == ("a", True, 7.0, 100.0)
    assert (b.device, b.online, b.age_s, b.readings) == ("b", False, None, {})
    assert (c.device, c.online, c.age_s, c.at) == ("c", None, 9.0, 1.0)
    fleet.observe(newer)
    [a, _] = device_rows(fleet, {"a": StoredReport(NOW - 7, same)}, {}, NOW)
    assert (a.age_s, a.at) == (None, 130.0)
    [a, _] = device_rows(fleet, {"a": StoredReport(NOW - 7, same)}, {"a": NOW - 2}, NOW)
    assert (a.age_s, a.at) == (2.0, 130.0)


def test_without_a_broker_nobody_is_said_to_be_there():
    [a] = device_rows(None, {"a": StoredReport(NOW + 5, report(Random(1), 100.0, "a"))}, {}, NOW)
    assert (a.online, a.age_s) == (None, 0.0)
    assert device_rows(None, {}, {}, NOW) == []


def reading(value: float, quality: str = "measured") -> Reading:
    return Reading(value=value, unit="x", source="y", quality=quality, at=1.0)


def device(**fields) -> Device:
    return Device(device="a", online=True, **fields)


@pytest.mark.parametrize(("quality", "text"), [("measured", "1.50"), ("corrected", "1.50~"), ("modelled", "1.50≈")])
def test_every_figure_has_the_mark_of_its_quality(quality, text):
    assert cell(device(readings={"cpu.f_hertz": reading(1.5e9, quality)}), COLUMNS[0]) == text


@pytest.mark.parametrize(
    ("absent", "text"),
    [
        ({}, "-"),
        ({"power": Absent(lack="not_present")}, "-"),
        ({"power": Absent(lack="denied")}, "- denied"),
        ({"power": Absent(lack="denied"), "power.total_watts": Absent(lack="busy")}, "- busy"),
    ],
)
def test_what_is_not_there_says_why_and_is_never_zero(absent, text):
    """A figure's own reason before its probe's."""
    assert cell(device(absent=absent), COLUMNS[1]) == text
    assert cell(device(readings={"power.total_watts": reading(0.0)}), COLUMNS[1]) == "0.00"


def test_free_memory_is_in_mib():
    assert cell(device(readings={FREE.reading: reading(512 * 2**20)}), FREE) == "512"


@pytest.mark.parametrize("value", [1e300, -1e300, math.inf, math.nan])
def test_what_one_device_says_takes_no_room_from_the_others(value):
    """A column is as wide as its widest figure."""
    assert len(cell(device(readings={"power.total_watts": reading(value)}), COLUMNS[1])) < 12
    assert len(short_text("x" * 10**6)) <= 1000


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"now": 1, "since_boot": 1}, "yes"),
        ({"now": 0, "since_boot": 1}, "was"),
        ({"now": 0, "since_boot": 0}, "no"),
        ({"now": 0}, "no"),
        ({"now": 1, "undervoltage": 1}, "volts"),
        ({"since_boot": 1}, "-"),
        ({}, "-"),
    ],
)
def test_throttled_now_or_since_it_booted(flags, text):
    assert (
        throttle_cell(device(readings={f"throttle.{name}_flag": reading(flag) for name, flag in flags.items()})) == text
    )


def test_what_the_last_task_cost():
    """Compute and upload apart; half of it may be unknown."""
    modelled = {"compute_joules": Provenance(source="model", quality="modelled")}
    cost = Cost(compute_s=4.5, compute_joules=31.25, upload_s=0.123456, provenance=modelled)
    one = device(spent=TaskCost(run="run", round=1, cost=cost))
    assert task_cost_cell(one, "compute_s", "upload_s") == "4.5/0.123"
    assert task_cost_cell(one, "compute_joules", "upload_joules") == "31.2≈/-"
    assert task_cost_cell(device(), "compute_s", "upload_s") == "-/-"


def test_a_plot_of_a_figure_over_time():
    """A step from 1 to 3 in the middle, an hour in which nothing came, one value alone."""
    values = [(at, 1.0 if at < 50 else 3.0) for at in range(75)]
    assert sparkline(values, 0, 100, width=8) == "▁▁▁▁██  "
    assert sparkline([(0.0, 5.0), (100.0, 5.0)], 0, 100, width=4) == "▁  ▁"
    assert sparkline([(1.0, 0.0), (30.0, 0.5), (60.0, 1.0)], 0, 90, width=3) == "▁▅█"
    found = [(at, reading(value)) for at, value in values]
    lines = plot_readings("power.total_watts", found, 0.0, 7200.0)
    assert names_all(lines[0], "power.total_watts", "2 h", 75)
    assert names_all(lines[2], "1 W", "3 W")
    [empty] = plot_readings("x", [], 0.0, 86_400.0)
    assert names_all(empty, "x", "24 h")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7200, "2 h"), (2e5, "2 d")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_all_of_a_device_is_shown_in_the_units_of_probe():
    """The same figure on the board and at its server; one of a newer agent has the unit that it sent."""
    figures = {
        "cpu.f_hertz": (1.51e9, "hertz", "1.51 GHz"),
        "memory.available_bytes": (7_990_247_424.0, "bytes", "7.441 GiB"),
        "power.total_watts": (9.0, "watts", "9 W"),
        "throttle.now_flag": (1.0, "flag", "yes"),
        "cpu.online_count": (6.0, "count", "6"),
        "gpu.load_ratio": (0.473, "ratio", "47.3 %"),
        "air.humidity_share": (0.5, "share", "0.5 share"),
        "net.eth0_sent_bytes": (1e300, "bytes", f"{1e300 / 2**30:.4g} GiB"),
    }
    readings = {
        name: Reading(value=value, unit=unit, source="s", quality="measured", at=0.0, uncertainty=0.03 * value)
        for name, (value, unit, _) in figures.items()
    }
    table = readings_table(device(readings=readings))
    assert {row[0]: row[1] for row in table.rows} == {name: shown for name, (_, _, shown) in figures.items()}
    assert {row[0]: row[2] for row in table.rows}["cpu.f_hertz"] == "45.3 MHz"
    assert all(len(cell) < 40 for row in table.rows for cell in row)


def test_a_dash_of_the_link_is_explained_where_there_is_one():
    link = {f"link.{way}_bits_per_s": reading(2e6) for way in ("up", "down")}
    yet = Absent(lack="not_present", cause="no transfer of 256 KiB and 0.5 s yet")
    lacking = device(readings={"cpu.f_hertz": reading(1e9)}, absent=dict.fromkeys(link, yet))
    assert names_all(devices_table([lacking]).caption, "Mbit/s", "device-agent probe --link")
    assert names_all(devices_table([lacking, device(readings=link)]).caption, "Mbit/s", "device-agent probe --link")
    assert not names_all(devices_table([device(readings=link)]).caption, "device-agent probe --link")


def test_a_row_as_json_has_every_unit_and_source():
    """And comes back as it was."""
    [one] = device_rows(None, {"a": StoredReport(NOW, report(Random(1), 100.0, "a"))}, {}, NOW)
    data = msgspec.json.encode(one)
    assert msgspec.json.decode(data, type=Device) == one
    watts = msgspec.json.decode(data)["readings"]["power.total_watts"]
    assert watts.keys() == {"value", "unit", "source", "quality", "at", "uncertainty"}


def test_a_gpu_and_swap_have_columns_where_a_device_has_them():
    """A fleet without either has the room for other figures."""
    jetson = {"gpu.load_ratio": reading(0.473), "memory.swap_used_bytes": reading(512.0 * (1 << 20))}
    pi = {"memory.swap_used_bytes": reading(0.0)}
    headings = [column.heading for column in devices_table([device(readings=pi)]).columns]
    assert not {"GPU\n%", "swap\nMiB"} & set(headings)
    table = devices_table([device(readings=pi), device(readings=jetson)])
    headings = [column.heading for column in table.columns]
    figures = [dict(zip(headings, row, strict=True)) for row in table.rows]
    assert [(one["GPU\n%"], one["swap\nMiB"]) for one in figures] == [("-", "0"), ("47", "512")]


def test_the_table_shows_how_the_versions_that_a_board_serves_do():
    """Milliseconds of nearly all answers, and the share that failed; a dash where it was asked nothing."""
    busy = ModelStatus(name="net", committed=3, figures={"requests": 2000.0, "errors": 20.0, "p95_s": 0.00417})
    idle = ModelStatus(name="pets", committed=1, figures={"requests": 0.0, "errors": 0.0, "p95_s": 0.0})
    table = devices_table([device(models=(busy, idle)), device(models=(ModelStatus(name="new"),)), device()])
    place = next(number for number, column in enumerate(table.columns) if "p95" in column.heading)
    assert [row[place] for row in table.rows] == ["4.17/1.0%, -", "-", "-"]
    assert [row[place - 1] for row in table.rows] == ["net/3, pets/1", "new: none", "-"]
    assert "p95 ms\nerrors" not in [column.heading for column in devices_table([device()]).columns]

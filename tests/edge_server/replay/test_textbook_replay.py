"""A replay's seconds, joules and bytes are those of the textbook, to the last message, over every kind of link."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from edge_server.replay.__main__ import replay
from tests.edge_server.replay.textbook_fleet import COMPUTE, GIVEN, POWER, expected, fleet_of, furthest, plan_of
from tests.edge_server.replay.textbook_replay import Device
from tests.shared_data import shared

PI = 'power = {{ kind = "trace", path = "{}", key_column = "workload", name = "sysbench_cpu_4", tx_name = "iperf3" }}'
LINKS = {
    "given": GIVEN,
    "rounds": 'link = { kind = "ranges", up_mbit_s = [0.1, 0.2], down_mbit_s = [0.3, 0.5], again = "round" }',
    "seconds": 'link = { kind = "ranges", up_mbit_s = [0.1, 0.2], down_mbit_s = [0.3, 0.5], again = 0.05 }',
    "rayleigh": 'link = { kind = "wireless", bandwidth_hz = 2e4, distance_m = [100.0, 300.0], fading = "rayleigh", '
    "again = 0.5, delay_s = 0.001 }",
}
TRACES = {
    "hsdpa3g_norway": ("", 8),
    "fcc_broadband": ("", 8),
    "wifi_cellular_pairs": ('where = { network = "wifi" }, ', 4),  # then an outage lets one device be served alone
}
CLOSE = 1e-6


def require_textbook(plan, folder: Path, fleet: list[Device]) -> None:
    """Replay a plan and compare every figure of every task with the textbook's."""
    _, records = replay(plan, folder)
    assert furthest(records, expected(plan, folder.name, fleet)) < CLOSE


@pytest.mark.parametrize("kind", LINKS)
def test_a_replay_is_the_textbook_over_computed_links(tmp_path, kind):
    plan = plan_of(tmp_path, f"{COMPUTE}\n{LINKS[kind]}\n{POWER}")
    require_textbook(plan, tmp_path / "run", fleet_of(plan))


def test_a_replay_is_the_textbook_when_updates_take_several_frames(tmp_path):
    """Ten thousand parameters, 40 kB: the first frame is one of 16 KiB, larger ones follow."""
    plan = plan_of(tmp_path, f"{COMPUTE}\n{LINKS['seconds']}\n{POWER}", hidden=832)
    require_textbook(plan, tmp_path / "run", fleet_of(plan))


@pytest.mark.parametrize(("family", "where", "rounds"), [(family, *keys) for family, keys in TRACES.items()])
def test_a_replay_is_the_textbook_over_recorded_links_with_a_pi_s_power(tmp_path, family, where, rounds):
    """Rates are walked row by row as the file has them; watts are those of a Pi's benchmarks."""
    path = shared("data", "net-traces", f"{family}.csv.gz")
    watts = PI.format(shared("data", "power-traces", "rpi3b_ina219_benchmarks.csv.gz"))
    link = f'link = {{ kind = "trace", {where}path = "{path}" }}'
    plan = plan_of(tmp_path, f"{COMPUTE}\n{link}\n{watts}", rounds=rounds)
    fleet = fleet_of(plan)
    for device, rows in zip(fleet, rows_of(path), strict=False):
        device.up = device.down = walking(rows)
    require_textbook(plan, tmp_path / "run", fleet)


def rows_of(path: Path) -> list[list[tuple[float, float]]]:
    """Return the traces of a file, in its order: seconds from the first row on, and bit/s."""
    found: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row.get("network", "wifi") == "wifi":
                found.setdefault(row["trace"], []).append((float(row["t_s"]), 1e6 * float(row["mbps"])))
    return [[(t - rows[0][0], rate) for t, rate in rows] for rows in found.values()]


def walking(rows: list[tuple[float, float]]):
    """Return (second, bits) -> the second at which they have passed, adding up row after row."""
    ends = [*(t for t, _ in rows[1:]), rows[-1][0] + min(5.0, rows[-1][0] - rows[-2][0])]
    parts = [(t, min(end, t + 5.0), end, rate) for (t, rate), end in zip(rows, ends, strict=True)]

    def passes(t0: float, bits: float) -> float:
        turn = t0 // ends[-1]
        while True:
            for begin, stop, _, rate in parts:
                start = max(t0, turn * ends[-1] + begin)
                room = turn * ends[-1] + stop - start
                if room > 0 and rate * room >= bits:
                    return start + bits / rate
                bits -= max(0.0, rate * room)
            turn += 1

    return passes

"""Seconds, joules and bytes of a replay equal the textbook's, over each link type."""

from __future__ import annotations

import csv
import gzip
import inspect
import math
from itertools import pairwise
from pathlib import Path

import pytest

from edge_server.journal.records import closed_rounds
from edge_server.replay.run import replay_plan
from tests.edge_server.replay import textbook_fleet, textbook_replay
from tests.edge_server.replay.textbook_fleet import COMPUTE, GIVEN, POWER, expected, fleet_of, furthest, plan_of
from tests.edge_server.replay.textbook_replay import Device
from tests.machine import shared

COMPUTING, SENDING = "sysbench_cpu_4", "iperf3"
PI = (
    'power = {{ kind = "trace", path = "{}", key_column = "workload", '
    f'name = "{COMPUTING}", tx_name = "{SENDING}" }}}}'
)
EACH_ROUND = 'compute = { kind = "ranges", hertz = [1e9, 2e9], cycles_per_step = 2e9, again = "round" }'
BY_WATTS = 'power = { kind = "given", busy_w = 4.5, idle_w = 2.0, tx_w = 3.0, rx_w = 2.5 }'
AS_THE_LINK_SENDS = 'power = { kind = "cycles", kappa = 1e-28, rx_w = 0.3 }'
LINKS = {
    "given": f"{GIVEN}\n{COMPUTE}\n{BY_WATTS}",
    "rounds": 'link = { kind = "ranges", up_mbit_s = [0.1, 0.2], down_mbit_s = [0.3, 0.5], again = "round" }\n'
    f"{EACH_ROUND}\n{POWER}",
    "seconds": 'link = { kind = "ranges", up_mbit_s = [0.1, 0.2], down_mbit_s = [0.3, 0.5], again = 0.05 }\n'
    f"{COMPUTE}\n{POWER}",
    "shannon": 'link = { kind = "wireless", bandwidth_hz = [1e4, 3e4], distance_m = [100.0, 300.0], '
    f"tx_dbm = [10.0, 23.0] }}\n{COMPUTE}\n{AS_THE_LINK_SENDS}",
    "rayleigh": 'link = { kind = "wireless", bandwidth_hz = 2e4, distance_m = [100.0, 300.0], fading = "rayleigh", '
    f"again = 0.5, delay_s = 0.001 }}\n{COMPUTE}\n{POWER}",
}
TRACES = {
    "hsdpa3g_norway": ("", 8),
    "fcc_broadband": ("", 8),
    "wifi_cellular_pairs": ('where = { network = "wifi" }, ', 4),  # then an outage lets one device be served alone
}
CLOSE = 1e-6


def require_textbook(plan, folder: Path, fleet: list[Device]) -> None:
    """Replay a plan and compare every figure of every task with the textbook's."""
    _, records = replay_plan(plan, folder)
    assert furthest(records, expected(plan, folder.name, fleet)) < CLOSE


def test_the_textbook_is_short_and_has_nothing_of_the_replay():
    """It would else repeat a mistake instead of showing it."""
    assert len(inspect.getsource(textbook_replay).splitlines()) <= 60
    for one in (textbook_replay, textbook_fleet):
        assert "edge_server.replay" not in inspect.getsource(one).replace("tests.edge_server.replay", "")


@pytest.mark.parametrize("kind", LINKS)
def test_a_replay_is_the_textbook_over_computed_links(tmp_path, kind):
    plan = plan_of(tmp_path, LINKS[kind])
    require_textbook(plan, tmp_path / "run", fleet_of(plan))


def test_a_replay_charges_the_bytes_that_a_codec_leaves(tmp_path):
    """Half of the values and a bitmap, over a link that takes seconds for them."""
    plan = plan_of(tmp_path, LINKS["given"], codec='name = "topk"\noptions = { share = 0.5 }')
    words = textbook_fleet.Words(plan, "run")
    assert words.up < 0.7 * words.down
    require_textbook(plan, tmp_path / "run", fleet_of(plan))


@pytest.mark.parametrize("kind", ["seconds", "given"])
def test_a_replay_is_the_textbook_when_updates_take_several_frames(tmp_path, kind):
    """Ten thousand parameters, 40 kB: the first frame is one of 16 KiB, larger ones follow where it was quick."""
    plan = plan_of(tmp_path, LINKS[kind], hidden=832)
    require_textbook(plan, tmp_path / "run", fleet_of(plan))


def test_a_replay_is_the_textbook_when_some_miss_every_deadline(tmp_path):
    """They give up a task for the next one; rounds last as long as the deadline, and have the others' updates."""
    slow = f'[[device]]\nname = "slow"\ncount = 2\ncompute = {{ kind = "given", seconds = 500.0 }}\n{GIVEN}\n{BY_WATTS}'
    keys = {"cohort": "min_devices = 5", "round": "deadline_s = 60.0"}
    plan = plan_of(tmp_path, f"{LINKS['given']}\n{slow}", count=3, size=0, **keys)
    _, records = replay_plan(plan, tmp_path / "run")
    assert [(len(one.arrived), one.seconds) for one in closed_rounds(records)] == [(3, 60.0)] * plan.rounds
    assert furthest(records, expected(plan, "run", fleet_of(plan))) < CLOSE


@pytest.mark.parametrize(("family", "where", "rounds"), [(family, *keys) for family, keys in TRACES.items()])
def test_a_replay_is_the_textbook_over_recorded_links_with_a_pi_s_power(tmp_path, family, where, rounds):
    """Rates are walked row by row as the file has them; watts are those of a Pi's benchmarks, added up likewise."""
    path = shared("data", "net-traces", f"{family}.csv.gz")
    watts = shared("data", "power-traces", "rpi3b_ina219_benchmarks.csv.gz")
    link = f'link = {{ kind = "trace", {where}path = "{path}" }}'
    plan = plan_of(tmp_path, f"{COMPUTE}\n{link}\n{PI.format(watts)}", rounds=rounds)
    fleet, pi = fleet_of(plan), curves_of(watts, "workload", "power_mw", 1e-3)
    links = curves_of(path, "trace", "mbps", 1e6)
    for device, (name, rows) in zip(fleet, links.items(), strict=False):
        device.rate = walking(rows)
        device.energy = adding({"compute": pi[COMPUTING], "upload": pi[SENDING]})
        device.known |= dict.fromkeys(("download_s", "upload_s"), f"link trace {name}")
        device.known |= dict.fromkeys(("compute_joules", "upload_joules"), f"power trace {COMPUTING}")
    require_textbook(plan, tmp_path / "run", fleet)


def test_a_replay_is_the_textbook_over_steps_an_outage_and_a_gap(tmp_path):
    """A recorded rate of zero lets nothing pass, nor does a row that would hold for more than five seconds.

    Two rounds later an acknowledgement would fall into the outage, and its device would offer again.
    """
    rows = [(0.0, 0.3), (1.0, 0.004), (6.0, 0.0), (7.0, 0.004), (9.0, 0.2), (21.0, 0.004), (23.0, 0.1)]
    path = tmp_path / "steps.csv"
    path.write_text("trace,t_s,mbps\n" + "".join(f"steps,{t},{mbps}\n" for t, mbps in rows))
    plan = plan_of(tmp_path, f'{COMPUTE}\nlink = {{ kind = "trace", path = "{path}" }}\n{BY_WATTS}', rounds=7)
    fleet = fleet_of(plan)
    for device in fleet:
        device.rate = walking([(t, 1e6 * mbps) for t, mbps in rows])
        device.known |= dict.fromkeys(("download_s", "upload_s"), "link trace steps")
    require_textbook(plan, tmp_path / "run", fleet)


def curves_of(path: Path, key: str, column: str, scale: float) -> dict[str, list[tuple[float, float]]]:
    """Return the series of a file, in its order: seconds from the first row on, and values."""
    found: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row.get("network", "wifi") == "wifi":
                found.setdefault(row[key], []).append((float(row["t_s"]), scale * float(row[column])))
    return {name: [(t - rows[0][0], value) for t, value in rows] for name, rows in found.items()}


def walking(rows: list[tuple[float, float]]):
    """Return (way, second, round) -> a trace's rate and until when: a row holds 5 s at most, and all of it repeats."""
    period = rows[-1][0] + min(5.0, rows[-1][0] - rows[-2][0])
    parts = []
    for (t, rate), (end, _) in pairwise([*rows, (period, 0.0)]):
        parts += [(min(end, t + 5.0), rate), (end, 0.0)]

    def rate(_way: str, t: float, _number: int) -> tuple[float, float]:
        turn = t // period
        return next((rate, turn * period + end) for end, rate in [*parts, (math.inf, 0.0)] if turn * period + end > t)

    return rate


def adding(curves: dict[str, list[tuple[float, float]]]):
    """Return (what, seconds, ...) -> the joules of recorded watts; the last row is as long as the one before."""

    def joules(what: str, seconds: float, *_: float) -> dict[str, float]:
        if what not in curves:
            return {}
        rows, spent = curves[what], 0.0
        period = 2 * rows[-1][0] - rows[-2][0]
        while seconds > 0:
            spent += sum(w * max(0.0, min(end, seconds) - t) for (t, w), (end, _) in pairwise([*rows, (period, 0.0)]))
            seconds -= period
        return {f"{what}_joules": spent}

    return joules

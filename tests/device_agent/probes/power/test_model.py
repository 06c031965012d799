"""Watts computed where no sensor is."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes.power.model import ModelSource, compute_watts
from device_agent.profile.schema import Power, PowerModel, Profile
from shared.errors import NoData
from tests.machine import grow

PI_4B = PowerModel(
    idle_w=2.7,
    max_w=6.4,
    core_joules_per_cycle=0.62e-9,
    max_hertz=1.5e9,
    exponent=1.0,
    tx_w=0.8,
    rx_w=0.4,
    uncertainty=0.3,
    provenance="public figures",
)
TICKS = os.sysconf("SC_CLK_TCK")


class Board:
    """A board of four cores whose counters a test moves on."""

    def __init__(self, root: Path, model: PowerModel | None = PI_4B, *, calibrated: bool = False) -> None:
        self.root, self.now, self.busy, self.sent, self.received = root, 50.0, 1000.0, 0, 0
        self.set()
        profile = Profile(schema=1, id="pi", name="Pi", power=Power(model=model))
        self.source = ModelSource(root, profile, lambda: self.now, model=model, calibrated=calibrated)

    def set(self, khz: int = 1_500_000) -> None:
        ticks = round(self.busy * TICKS)
        policy = "sys/devices/system/cpu/cpufreq/policy0"
        wlan = f"wlan0: {self.received} 0 0 0 0 0 0 0 {self.sent} 0 0 0 0 0 0 0"
        files = {"proc/stat": f"cpu  {ticks} 0 0 {10**6} 0 0 0 0 0 0", "proc/net/dev": f"head\nhead\n{wlan}"}
        files |= {f"{policy}/scaling_cur_freq": str(khz), f"{policy}/affected_cpus": "0 1 2 3"}
        grow(self.root, files | {"sys/devices/system/cpu/online": "0-3"})

    def after(self, seconds: float, *, busy: float = 0.0, khz: int = 1_500_000, sent: int = 0, received: int = 0):
        self.now += seconds
        self.busy += busy
        self.sent, self.received = self.sent + sent, self.received + received
        self.set(khz)
        return self.source.read()

    def first(self) -> None:
        with pytest.raises(NoData) as caught:
            self.source.read()
        assert caught.value.lack == "busy"


@pytest.mark.parametrize(
    ("busy_cores", "hertz", "exponent", "expected"),
    [
        (0, 1.5e9, 1.0, 2.7),  # idle
        (2, 1.5e9, 1.0, 4.56),  # 2.7 + 2 * 0.62 nJ * 1.5 GHz
        (2, 0.75e9, 1.0, 3.63),  # half the clock, half the power over idle
        (2, 0.75e9, 2.0, 3.165),  # a quarter of it, where the voltage follows the clock
        (4, 1.5e9, 1.0, 6.4),  # 6.42 W is more than the board can draw
    ],
)
def test_watts_follow_busy_cores_and_clock(busy_cores, hertz, exponent, expected) -> None:
    model = msgspec.structs.replace(PI_4B, exponent=exponent)
    assert compute_watts(model, busy_cores=busy_cores, hertz=hertz) == pytest.approx(expected)


def test_sending_and_receiving_add_their_shares() -> None:
    """Derivation: 2.7 + 0.5 * 0.8 + 0.25 * 0.4."""
    assert compute_watts(PI_4B, busy_cores=0, hertz=1e9, sending=0.5, receiving=0.25) == pytest.approx(3.2)


@given(
    busy_cores=st.floats(0, 64),
    hertz=st.floats(1e8, 5e9),
    sending=st.floats(0, 1),
    receiving=st.floats(0, 1),
    more=st.floats(0, 8),
)
def test_it_stays_in_bounds_and_never_falls_with_load(busy_cores, hertz, sending, receiving, more) -> None:
    def at(cores: float) -> float:
        return compute_watts(PI_4B, busy_cores=cores, hertz=hertz, sending=sending, receiving=receiving)

    assert PI_4B.idle_w <= at(busy_cores) <= at(busy_cores + more) <= PI_4B.max_w


def test_busy_cores_are_cpu_seconds_between_two_reads(tmp_path) -> None:
    """Derivation: 4 CPU seconds in 2 s are 2 cores; with the clock half way down at the end, 1.125 GHz on average."""
    board = Board(tmp_path)
    board.first()
    reading = board.after(2.0, busy=4.0)
    assert reading.value == pytest.approx(4.56)
    assert (reading.unit, reading.quality, reading.source) == ("watts", "modelled", f"model: {PI_4B.provenance}")
    assert reading.uncertainty == pytest.approx(0.3 * 4.56)
    assert board.after(2.0, busy=4.0, khz=750_000).value == pytest.approx(2.7 + 2 * 0.62e-9 * 1.125e9)


def test_a_mean_loses_no_load_between_reads(tmp_path) -> None:
    """Too short a time is waited out: its load is in the next reading."""
    board = Board(tmp_path)
    board.first()
    with pytest.raises(NoData) as caught:
        board.after(0.05, busy=0.1)
    assert caught.value.lack == "busy"
    assert board.after(0.95, busy=0.9).value == pytest.approx(2.7 + 0.93)


def test_a_radio_at_full_rate_adds_all_of_its_watts_and_no_more(tmp_path) -> None:
    """Wi-Fi tells no speed: 20 Mbit/s count as full; the counters of an interface that restarts add nothing."""
    board = Board(tmp_path)
    board.first()
    assert board.after(1.0, sent=1_250_000).value == pytest.approx(2.7 + 0.5 * 0.8)
    assert board.after(1.0, received=10_000_000).value == pytest.approx(2.7 + 0.4)
    assert board.after(1.0, sent=-1_250_000).value == pytest.approx(2.7)


def test_a_wire_is_full_at_its_own_speed(tmp_path) -> None:
    grow(tmp_path, {"sys/class/net/wlan0/speed": 100})
    board = Board(tmp_path)
    board.first()
    assert board.after(1.0, sent=1_250_000).value == pytest.approx(2.7 + 0.1 * 0.8)


def test_a_board_without_network_sends_nothing(tmp_path) -> None:
    board = Board(tmp_path)
    (tmp_path / "proc/net/dev").unlink()
    board.set = lambda khz=0: grow(tmp_path, {"proc/stat": f"cpu  {round(board.busy * TICKS)} 0 0 5 0 0 0 0 0 0"})  # type: ignore[method-assign, assignment]
    board.first()
    assert board.after(1.0, busy=1.0).value == pytest.approx(2.7 + 0.93)


def test_a_calibrated_model_says_so_and_carries_its_own_uncertainty(tmp_path) -> None:
    model = msgspec.structs.replace(PI_4B, uncertainty=0.06, provenance="2026-01-01")
    board = Board(tmp_path, model, calibrated=True)
    board.first()
    reading = board.after(1.0)
    assert reading.source == "calibrated model: 2026-01-01"
    assert reading.uncertainty == pytest.approx(0.06 * 2.7)
    assert (board.source.kind, board.source.provenance.uncertainty) == ("mean", 0.06)


def test_without_a_model_or_a_clock_there_are_no_watts(tmp_path) -> None:
    with pytest.raises(NoData, match=r"\bpi\b"):
        Board(tmp_path, None)
    board = Board(tmp_path)
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq").unlink()
    with pytest.raises(NoData, match="clock"):
        board.source.read()

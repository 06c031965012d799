"""Calibration against a plug that knows what the training process really computes, and what comes of it."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from device_agent.commands.calibrate import parse_meter, print_fit
from device_agent.config import BoardConfig, MeterConfig
from device_agent.measurement.board import load_measuring, open_board
from device_agent.measurement.calibrate import CalibrationSetup, calibrate, fit_and_save, open_meters
from device_agent.measurement.calibration_file import (
    FILE_NAME,
    Calibration,
    SensorLine,
    apply_calibration,
    load_calibration,
    save_calibration,
)
from device_agent.measurement.core_kinds import describe_core_kinds
from device_agent.measurement.power_fit import MIN_R_SQUARED, Observation
from device_agent.measurement.power_log import PowerLog
from device_agent.probes.power.model import compute_watts
from device_agent.probes.power.rails import Rails
from device_agent.probes.power.source import compute_total, open_source
from device_agent.profile.schema import Cpu, Power, PowerModel, Profile, Rail
from shared.errors import ConfigError, CorruptFile, NoData
from shared.runtime.clock import monotonic
from tests.device_agent.agent_side import start
from tests.device_agent.server_side import plugged
from tests.device_agent.sources import Given
from tests.machine import grow
from tests.naming import names_all, naming

IDLE_W, CORE_W, HERTZ = 3.0, 2.0, 1e9
GAIN, OFFSET_W = 1.15, 0.6
PROFILE = Profile(schema=1, id="bench", name="A bench", cpu=Cpu(sources=(), nominal_hertz=HERTZ))
MODEL = PowerModel(idle_w=2.0, max_w=9.0, core_joules_per_cycle=1e-9, max_hertz=1e9, uncertainty=0.05)
KEPT = Calibration(profile="bench", meter="plug", stamp="20260101T000000Z", residual_w=0.1, r_squared=0.97, model=MODEL)


class Simulated:
    """A board that takes so much a core; as many are busy as it was last told to train with threads.

    It has no jitter of the machine that it runs on: `proc/stat` is exact at every moment that its clock tells.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.threads, self.told = root, 0, list[str]()
        self.computed_s, self._busy_s, self._since = {0: 0.0}, 0.0, monotonic()
        self._lock = threading.Lock()
        (root / "proc").mkdir(parents=True)
        self.clock()

    def say(self, line: str) -> None:
        """Hear which phase begins."""
        self.clock()
        self.told.append(line)
        found = re.search(r"training with (\d+) thread", line)
        self.threads = int(found[1]) if found else 0
        self.computed_s.setdefault(self.threads, 0.0)

    def clock(self) -> float:
        """Return monotonic seconds, having written how busy the board was until then."""
        with self._lock:
            now = monotonic()
            self._busy_s += self.threads * (now - self._since)
            self._since = now
            ticks, partial = round(100 * self._busy_s), self.root / "proc/partial"
            partial.write_text(f"cpu {ticks} 0 0 {10**6 - ticks} 0 0 0 0 0 0\n")
            partial.rename(self.root / "proc/stat")
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    self.computed_s[self.threads] = max(self.computed_s[self.threads], sum(child.cpu_times()[:2]))
            return now

    def watts(self) -> float:
        """Return what the board takes now."""
        return IDLE_W + CORE_W * self.threads


@pytest.mark.slow
def test_the_fit_finds_what_the_board_takes(tmp_path):
    """A real plug on loopback beside real training in a child: idle watts and watts of a core are found, kept and used.

    The board's own sensor sees a part of it; the line from that to the plug is found too.
    """
    board = Simulated(tmp_path / "root")
    seen = Given(lambda _: (board.watts() - OFFSET_W) / GAIN, clock=board.clock, period_s=0.2)
    with plugged(board.watts) as url:
        meter = MeterConfig(kind="shelly", url=url, period_s=0.2)
        plug = open_source(board.root, PROFILE, board.clock, meter=meter)
        bench = CalibrationSetup(board.root, PROFILE, tmp_path, plug, seen, 3.0, 4.0, board.say, board.clock)
        found = asyncio.run(calibrate(bench))
    assert found == load_calibration(tmp_path)
    assert found.profile == "bench"
    assert found.meter == "http shelly"
    assert found.r_squared > 0.99
    assert found.model.idle_w == pytest.approx(IDLE_W, rel=0.05)
    assert found.model.core_joules_per_cycle == pytest.approx(CORE_W / HERTZ, rel=0.05)
    assert found.line.gain == pytest.approx(GAIN, rel=0.05)
    assert found.line.offset_w == pytest.approx(OFFSET_W, abs=0.2)
    assert names_all(board.told[0], "3 s")
    assert any(names_all(line, 1, "4 s") for line in board.told)
    assert board.computed_s[1] > board.computed_s[0] + 0.05, "nothing was trained"
    assert not [child for child in psutil.Process().children() if "exercise" in " ".join(child.cmdline())]


def test_a_fit_that_is_none_leaves_the_old_one(tmp_path):
    """A plug that feeds something else: its watts have nothing to do with the load, and nothing is kept."""
    save_calibration(tmp_path, KEPT)
    bench = CalibrationSetup(tmp_path, PROFILE, tmp_path, Given(), None)
    with pytest.raises(NoData, match=f"{MIN_R_SQUARED:.0%}"):
        fit_and_save(
            bench,
            [Observation(watts, load, HERTZ) for watts, load in ((3, 0), (9, 0.1), (4, 1), (8, 1.1), (5, 2), (6, 2))],
        )
    assert load_calibration(tmp_path) == KEPT


BOARD_W = 2.4
SEEN = [(load, BOARD_W + CORE_W * load) for load in (0.05, 0.05, 1.0, 1.0, 2.0, 2.0, 3.9, 3.9)]


@pytest.mark.parametrize("error_w", [1.0, -1.0])
def test_a_model_carries_the_error_of_its_meter(tmp_path, error_w):
    """A plug of ±1 W that is off by 1 W fits perfectly and is wrong at every load: by 42 % at rest, 10 % when busy."""
    Simulated(tmp_path / "root")
    with plugged(lambda: 4.0) as url:
        plug = open_source(
            tmp_path / "root", PROFILE, monotonic, meter=MeterConfig(kind="shelly", url=url, period_s=0.2)
        )
    seen = [Observation(watts + error_w, load, HERTZ, sensed_w=0.8 * watts) for load, watts in SEEN]
    bench = CalibrationSetup(tmp_path / "root", PROFILE, tmp_path, plug, Given())
    found = fit_and_save(bench, seen)
    assert load_calibration(tmp_path) == found
    profile = apply_calibration(PROFILE, found)
    for busy, watts in SEEN:
        fitted = compute_watts(found.model, busy_cores=busy, hertz=HERTZ)
        sigma_w = math.hypot(found.model.uncertainty * fitted, found.model.uncertainty_w)
        assert abs(fitted - watts) <= 1.001 * sigma_w < 1.1
        rails = Rails(watts={"IN": 0.8 * watts})
        power = msgspec.structs.replace(profile.power, rails=(Rail(label="IN"),), total=("IN",))
        total = compute_total("ina3221", power, rails, 0.0)
        assert abs(total.value - watts) <= 1.001 * total.uncertainty < 1.1


def test_what_a_calibrated_model_reads_and_integrates_says_the_meters_error(tmp_path):
    board = Simulated(tmp_path / "root")
    fitted = msgspec.structs.replace(MODEL, uncertainty=0.005, uncertainty_w=1.0)
    profile = msgspec.structs.replace(PROFILE, power=Power(sources=("model",), model=fitted))
    with PowerLog(open_source(tmp_path / "root", profile, board.clock, calibrated=fitted), board.clock) as log:
        asyncio.run(asyncio.sleep(2.6))
        energy, latest = log.energy(board.clock() - 1.5, board.clock()), log.latest()
    assert latest.uncertainty == pytest.approx(1.0, rel=0.01)
    assert energy.uncertainty * energy.joules / energy.seconds == pytest.approx(1.0, rel=0.1)


BIG_LITTLE = {
    "parts": {
        "proc/cpuinfo": "processor: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n\n"
        "processor: 4\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"
    },
    "clocks": {
        f"sys/devices/system/cpu/cpufreq/policy{cpu}/cpuinfo_max_freq": khz
        for cpu, khz in ((0, 1_800_000), (4, 2_400_000))
    },
    "capacities": {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": share for cpu, share in ((0, 414), (1, 1024))},
    "hybrid": {"sys/devices/cpu_atom/cpus": "16-31"},
}
EQUAL_CORES = {
    "one part": {"proc/cpuinfo": "CPU implementer\t: 0x41\nCPU part\t: 0xd42\n" * 8},
    "turbo": {
        f"sys/devices/system/cpu/cpufreq/policy{cpu}/cpuinfo_max_freq": khz
        for cpu, khz in ((0, 4_700_000), (1, 4_900_000))
    },
    "capacities": {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": 1024 for cpu in range(4)},
}


@pytest.mark.parametrize("kind", BIG_LITTLE)
def test_cores_of_several_kinds_get_no_model(tmp_path, kind):
    """One figure a core was 96 % off for a trainer on the small ones; a line from the board's own sensor holds."""
    Simulated(tmp_path / "root")
    grow(tmp_path / "root", BIG_LITTLE[kind])
    bench = CalibrationSetup(tmp_path / "root", PROFILE, tmp_path, Given(), None)
    with pytest.raises(NoData, match=r"\[board.meter\]"):
        asyncio.run(calibrate(bench))
    assert load_calibration(tmp_path) is None
    seen = [Observation(watts, load, HERTZ, sensed_w=0.8 * watts) for load, watts in SEEN]
    found = fit_and_save(CalibrationSetup(tmp_path / "root", PROFILE, tmp_path, Given(), Given()), seen)
    assert found.model is None
    assert found.line.gain == pytest.approx(1.25)


@pytest.mark.parametrize("kind", EQUAL_CORES)
def test_equal_cores_get_a_model(tmp_path, kind):
    root = grow(tmp_path, EQUAL_CORES[kind])
    assert describe_core_kinds(root) == ""


async def test_without_a_meter_it_says_what_to_do(tmp_path):
    """Exit code 1, one line, nothing written."""
    root = tmp_path / "root"
    root.mkdir()
    config = tmp_path / "agent.toml"
    config.write_text(
        f'device = "board"\nsite = "lab"\nstate_dir = "{tmp_path}/state"\n[data]\nsource = "digits"\n'
        f'[board]\nroot = "{root}"\nprofile = "generic-arm"\n'
    )
    process = await start(config, "calibrate")
    _, err = await process.communicate()
    assert process.returncode == 1
    (line,) = err.decode().splitlines()
    assert names_all(line, "--meter", "[board.meter]")
    assert not list((tmp_path / "state").glob(FILE_NAME))


def test_a_plug_comes_before_the_board_and_a_model_is_no_sensor(tmp_path):
    """The reference is the plug; a board that only has a model has no sensor of its own to draw a line from."""
    Simulated(tmp_path / "root")
    modelled = msgspec.structs.replace(PROFILE, power=msgspec.structs.replace(PROFILE.power, model=MODEL))
    with plugged(lambda: 4.0) as url:
        reference, own = open_meters(
            tmp_path / "root", modelled, MeterConfig(kind="shelly", url=url, period_s=0.2), monotonic
        )
        assert reference.read().value == 4.0
    assert own is None
    with pytest.raises(NoData, match=naming("--meter", "[board.meter]")):
        open_meters(tmp_path / "root", modelled, None, monotonic)


def test_a_kept_fit_stands_for_the_profiles_own(tmp_path):
    """Model and line replace the profile's; those of another profile do not."""
    line = SensorLine(gain=1.2, offset_w=0.5, uncertainty=0.04)
    found = apply_calibration(PROFILE, msgspec.structs.replace(KEPT, line=line)).power
    assert (found.model, found.gain, found.offset_w, found.uncertainty) == (MODEL, 1.2, 0.5, 0.04)
    other = msgspec.structs.replace(KEPT, profile="another", line=line)
    assert apply_calibration(PROFILE, other) == PROFILE
    assert apply_calibration(PROFILE, None) == PROFILE


def test_a_file_that_is_none_is_refused_and_the_agent_goes_on_without(tmp_path):
    """Measuring then knows no fit; cut and rotten files are in the table of damaged inputs."""
    path = save_calibration(tmp_path, KEPT)
    assert load_calibration(tmp_path) == KEPT
    path.write_bytes(b"\xff")
    with pytest.raises(CorruptFile, match=naming(path)):
        load_calibration(tmp_path)
    assert load_measuring(BoardConfig(), tmp_path).calibration is None
    path.unlink()
    assert load_calibration(tmp_path) is None


def test_a_board_without_any_source_has_no_power_and_no_joules(tmp_path):
    """This is what most machines are: the meter of a task works, its joules are None."""
    (tmp_path / "proc").mkdir()
    board = open_board(load_measuring(BoardConfig(root=str(tmp_path), profile="generic-arm"), tmp_path))
    assert board.power is None or board.power.source.provenance.quality == "modelled"
    with board.meter(idle_w=None).task() as spent:
        pass
    assert spent.compute_s is not None
    assert spent.joules is None
    assert "compute_joules" not in spent.provenance


def test_a_fit_of_another_board_is_left_aside(tmp_path, caplog):
    """Whoever moves the state folder to another board is told; the other board's model is not used."""
    (tmp_path / "proc").mkdir()
    save_calibration(tmp_path, KEPT)
    board = open_board(load_measuring(BoardConfig(root=str(tmp_path), profile="generic-arm"), tmp_path))
    assert board.profile.power.model != MODEL
    [told] = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert told == (KEPT.profile, "generic-arm")


@pytest.mark.parametrize("words", ["shelly", "kettle=http://192.0.2.7", "shelly=ftp://192.0.2.7"])
def test_a_meter_that_is_none_is_refused_with_an_example(words):
    with pytest.raises(ConfigError, match=naming("KIND=URL", words)):
        parse_meter(words)


def test_what_was_found_is_shown_with_its_units(capsys):
    """Watts of rest and of a core, the line, the residual as watts and as a share."""
    print_fit(
        msgspec.structs.replace(KEPT, line=SensorLine(gain=1.2, offset_w=0.5, uncertainty=0.04)), Path("kept.json")
    )
    shown = capsys.readouterr().out
    assert names_all(shown, "2.00 W", "1.00 W", "1000 MHz", "1.00 nJ", "1.70", "1.200", "0.50 W")
    assert names_all(shown, "0.100 W", "0.970", "±4.0%", "kept.json")
    line = SensorLine(gain=1.2, offset_w=0.5, uncertainty=0.04, uncertainty_w=1.0)
    print_fit(msgspec.structs.replace(KEPT, line=line, model=None), Path("kept.json"))
    shown = capsys.readouterr().out
    assert names_all(shown, "±4.0%", "1 W")
    assert "nJ" not in shown

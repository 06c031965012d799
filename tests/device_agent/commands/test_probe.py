"""`device-agent probe` as an operator meets it: a process, what it prints, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from device_agent.commands import doctor
from device_agent.commands import probe as command
from device_agent.measurement.board import Board
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.power_log import PowerLog
from device_agent.probes.power.source import TOTAL_WATTS
from device_agent.profile.load import UNKNOWN_PROFILE
from shared.errors import ConfigError, NoData
from shared.protocol.measurements import Provenance, Reading
from shared.runtime.clock import VirtualLoop, monotonic
from tests.device_agent.server_side import plugged
from tests.machine import grow

BOARDS = Path(__file__).parents[2] / "fixtures" / "boards"
ORIN = BOARDS / "jetson-orin-nx" / "root"
LIMIT_S = 300.0
CLEAR = b"\x1b[H\x1b[J"


async def start(*arguments: object, stdout: int = PIPE) -> asyncio.subprocess.Process:
    words = (sys.executable, "-m", "device_agent", "probe", *map(str, arguments))
    return await asyncio.create_subprocess_exec(*words, stdout=stdout, stderr=PIPE)


@pytest.fixture
def printed(capsys) -> Callable[..., str]:
    """Run the command in this process, which is quicker, and return what it printed."""

    def run(*arguments: object) -> str:
        parser = argparse.ArgumentParser()
        command.add(parser)
        assert command.run(parser.parse_args(list(map(str, arguments)))) == 0
        return capsys.readouterr().out

    return run


def probe(*arguments: object) -> tuple[int, str, str]:
    """Run the command to its end: exit code, what it printed, what it complained of."""

    async def story() -> tuple[int, str, str]:
        async with asyncio.timeout(LIMIT_S):
            process = await start(*arguments)
            out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    return asyncio.run(story())


def test_the_table_of_a_recorded_board() -> None:
    code, out, err = probe("--root", ORIN)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["board", "jetson-orin-nx", "Jetson", "Orin", "NX"] in lines
    assert ["power.total_watts", "9", "W", "0.27", "W", "measured", "ina3221", "VDD_IN"] in lines
    assert any(line[:2] == ["thermal.gpu-thermal_celsius", "busy"] for line in lines)


def test_json_says_the_same_in_si_units(printed) -> None:
    said = msgspec.json.decode(printed("--root", ORIN, "--format", "json"))
    assert said["board"] == "jetson-orin-nx"
    assert said["readings"]["cpu.f_hertz"]["value"] == 1036.8e6
    assert said["readings"]["power.total_watts"]["quality"] == "measured"
    assert said["absent"]["thermal.gpu-thermal_celsius"]["lack"] == "busy"
    assert said["facts"]["mode"] == "15W"


def test_on_this_machine_it_says_what_is_absent_and_succeeds() -> None:
    """Whatever sensors it has: memory and CPU time are always there, and every other figure or its lack."""
    code, out, err = probe("--format", "json")
    said = msgspec.json.decode(out)
    assert (code, err) == (0, "")
    assert {"memory.total_bytes", "cputime.busy_seconds"} <= said["readings"].keys()
    names = said["readings"].keys() | said["absent"].keys()
    assert {name.partition(".")[0] for name in names} >= {"cpu", "power", "thermal", "wifi", "memory"}


async def test_a_watch_that_is_piped_gives_a_line_of_json_each_time_with_the_load() -> None:
    """From the second on there are rates of this machine's counters; a SIGINT ends it without a traceback."""
    async with asyncio.timeout(LIMIT_S):
        process = await start("--watch", "0.2")
        lines = [msgspec.json.decode(await process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    code = process.returncode
    assert "cputime.load_ratio" not in lines[0]["readings"]
    assert 0 <= lines[-1]["readings"]["cputime.load_ratio"]["value"] <= 1
    assert lines[-1]["readings"]["cputime.total_seconds"]["at"] > lines[0]["readings"]["cputime.total_seconds"]["at"]
    assert (code, err) == (130, b"")


async def test_a_watch_that_is_piped_gives_tables_where_they_are_asked_for() -> None:
    """The whole of each, with its rates from the second one on."""
    async with asyncio.timeout(LIMIT_S):
        process = await start("--root", ORIN, "--watch", "0.2", "--format", "table")
        seen = [await process.stdout.readuntil(b"\n\nboard ") for _ in range(2)]
        process.kill()
        await process.communicate()
    for table in seen:
        assert b"power.total_watts" in table
        assert b"thermal.hottest_celsius" in table
        assert b"{" not in table


async def test_a_watch_on_a_terminal_is_drawn_in_place_and_cuts_nothing() -> None:
    """Cursor to the corner, rest of the screen cleared, and every figure, also on a terminal that is too low."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 6, 110, 0, 0))
    async with asyncio.timeout(LIMIT_S):
        process = await start("--root", ORIN, "--watch", "0.2", stdout=theirs)
        os.close(theirs)
        seen = b""
        while seen.count(CLEAR) < 3:
            seen += await asyncio.to_thread(os.read, ours, 1 << 16)
        process.kill()
        await process.communicate()
    os.close(ours)
    before, screen, *_ = seen.split(CLEAR)
    lines = screen.decode().splitlines()
    assert before == b""
    assert lines[0].split() == ["board", "jetson-orin-nx", "Jetson", "Orin", "NX"]
    text = " ".join(lines)
    for name in ("cpu.f_hertz", "memory.total_bytes", "power.total_watts", "thermal.hottest_celsius", "wifi"):
        assert name in text


async def test_a_reader_that_goes_away_ends_a_watch_quietly() -> None:
    ours, theirs = os.pipe()
    async with asyncio.timeout(LIMIT_S):
        process = await start("--watch", "0.2", stdout=theirs)
        os.close(theirs)
        await asyncio.to_thread(os.read, ours, 100)
        os.close(ours)
        _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"")


def test_a_record_is_a_fixture_at_once(tmp_path, printed) -> None:
    """The folder holds the tree and what the probes made of it; probing the tree gives the same figures."""
    out = printed("--root", ORIN, "--record", tmp_path / "copy")
    assert re.search("^sys/class/thermal/thermal_zone1/temp .*busy$", out, re.MULTILINE)
    expected = msgspec.json.decode((tmp_path / "copy" / "expected.json").read_bytes())
    assert expected["board"] == "jetson-orin-nx"
    assert expected["readings"]["power.total_watts"] == 9.0
    for named in (tmp_path / "copy" / "root", tmp_path / "copy"):
        again = printed("--root", named, "--format", "json")
        figures = {name: one["value"] for name, one in msgspec.json.decode(again)["readings"].items()}
        assert figures == expected["readings"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--root", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--profile", "no-such-board"], "no-such-board"),
        (["--watch", "0"], "0.2"),
        (["--watch", "nan"], "3600"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--root", str(ORIN), "--record", str(BOARDS)], str(BOARDS)),
    ],
)
def test_what_cannot_be_done_is_for_the_operator_to_edit(arguments, complaint) -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        command.run(parser.parse_args(arguments))


def test_what_is_to_be_edited_comes_with_exit_code_2_and_no_traceback() -> None:
    code, out, err = probe("--root", "/nowhere/at/all")
    assert (code, out) == (2, "")
    assert err.startswith("device-agent: /nowhere/at/all ")
    assert len(err.splitlines()) == 1


def test_the_board_of_the_agents_file_is_probed(tmp_path, printed) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        f'device = "d"\nsite = "lab"\nstate_dir = "{tmp_path}"\n[data]\nsource = "digits"\n'
        f'[board]\nroot = "{ORIN}"\nprofile = "jetson-orin-nano"\n'
    )
    assert msgspec.json.decode(printed("--config", config, "--format", "json"))["board"] == "jetson-orin-nano"
    said = msgspec.json.decode(printed("--config", config, "--format", "json", "--profile", "jetson-tx2"))
    assert said["board"] == "jetson-tx2"
    assert said["readings"]["cpu.online_count"]["value"] == 6


POLICY = "sys/devices/system/cpu/cpufreq/policy0"
CAPPED = {
    "proc/cpuinfo": "processor : 0\nCPU implementer : 0x41\n",
    f"{POLICY}/affected_cpus": "0",
    f"{POLICY}/scaling_cur_freq": 1_200_000,
    f"{POLICY}/scaling_max_freq": 1_200_000,
    f"{POLICY}/cpuinfo_max_freq": 1_800_000,
}


@pytest.mark.parametrize(("target", "flag"), [("[board.target]\nmax_hertz = 1.2e9\n", 0), ("", 1)])
def test_the_agents_own_highest_clock_is_not_throttling(tmp_path, printed, target, flag) -> None:
    root = grow(tmp_path / "root", CAPPED)
    config = tmp_path / "agent.toml"
    config.write_text(
        f'device = "d"\nsite = "lab"\nstate_dir = "{tmp_path}"\n[data]\nsource = "digits"\n'
        f'[board]\nroot = "{root}"\n{target}'
    )
    found = msgspec.json.decode(printed("--config", config, "--format", "json"))
    assert found["readings"]["throttle.now_flag"]["value"] == flag
    findings = {check.name: check.finding for check in doctor.run_checks(config, root)}
    assert re.findall(r"\d+", findings["throttle: clock"]) == (["1200", "1800"] if flag else [])


def test_the_meter_of_the_agents_file_is_the_total(tmp_path, printed) -> None:
    """What the agent itself would go by: the plug's 12.5 W, and not the module's 9 W; the rails stay."""
    with plugged(lambda: 12.5) as url:
        config = tmp_path / "agent.toml"
        config.write_text(
            f'device = "d"\nsite = "lab"\nstate_dir = "{tmp_path}"\n[data]\nsource = "digits"\n'
            f'[board]\nroot = "{ORIN}"\n[board.meter]\nkind = "shelly"\nurl = "{url}"\n'
        )
        readings = msgspec.json.decode(printed("--config", config, "--format", "json"))["readings"]
    assert readings["power.total_watts"]["value"] == 12.5
    assert readings["power.VDD_IN_watts"]["value"] == 9.0


def test_a_silent_meter_is_not_replaced_by_what_sees_less(tmp_path, printed) -> None:
    """The module's 9 W would pass for the wall's: for a plug that is gone, and for a chip that nobody has."""
    for meter in ('kind = "shelly"\nurl = "http://127.0.0.1:9"', 'kind = "chip"\nchip = "ina226"'):
        config = tmp_path / "agent.toml"
        config.write_text(
            f'device = "d"\nsite = "lab"\nstate_dir = "{tmp_path}"\n[data]\nsource = "digits"\n'
            f'[board]\nroot = "{ORIN}"\n[board.meter]\n{meter}\n'
        )
        found = msgspec.json.decode(printed("--config", config, "--format", "json"))
        assert "power.total_watts" not in found["readings"]
        assert found["absent"]["power.total_watts"]["lack"] in ("busy", "not_present")
        assert found["readings"]["power.VDD_IN_watts"]["value"] == 9.0


class Counter:
    """Energy that a counter adds up: watts are known from the second read on."""

    kind = "mean"
    provenance = Provenance(source="counter", quality="measured")
    period_s, cost_s, uncertainty_w = 1.0, 0.0, 0.0
    reads = 0

    def read(self) -> Reading:
        self.reads += 1
        if self.reads == 1:
            raise NoData("the first read", lack="busy")
        return Reading(value=7.0, unit="watts", source="counter", quality="measured", at=0.0)


@pytest.mark.parametrize(("root", "reads", "said"), [(Path("/"), 2, 7.0), (ORIN.parent, 1, "busy")])
def test_a_counter_is_read_a_second_time_on_the_board_itself(root, reads, said) -> None:
    """A second later; a recorded counter stands still, and nobody waits for it."""
    source = Counter()
    board = Board(MeasurementSettings(), root, UNKNOWN_PROFILE, PowerLog(source, monotonic), monotonic)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(command.read_twice(board))
    assert source.reads == reads
    assert (
        found.readings[TOTAL_WATTS].value if TOTAL_WATTS in found.readings else found.absent[TOTAL_WATTS].lack
    ) == said

"""`device-agent doctor` on this machine, on a recorded board, without privileges."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess  # noqa: TID251 - the command as an operator runs it
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from device_agent.commands import doctor as command
from device_agent.commands.diagnosis import examine
from device_agent.commands.diagnosis.checks import SIGILL_REMEDIES, Check, check_broker
from device_agent.config import BoardConfig
from device_agent.probes import runtime
from edge_server.fleet.broker import run_private_broker
from shared.runtime.folder_lock import hold_lock
from shared.transport.base import Broker
from tests.device_agent.agent_side import write_config
from tests.machine import as_nobody, free_port, grow, open_to_all

SIGILL = "import os; os.kill(os.getpid(), 4)"
FINE = {
    "torch/__init__.py": """
from types import SimpleNamespace as N
__version__, version, cuda = "2.9.1", N(cuda=None), N(is_available=lambda: False)
losses = iter([3.0, 2.0, 1.0])
class Conv:
    def to(self, _): return self
    def parameters(self): return []
    def __call__(self, _): return self
    square = mean = backward = lambda self: self
    __float__ = lambda self: next(losses)
nn, ones = N(Conv2d=lambda *_: Conv()), lambda *_, **__: None
optim = N(SGD=lambda *_, **__: N(zero_grad=int, step=int))
""",
    "onnxruntime/__init__.py": "raise ModuleNotFoundError(name='onnxruntime')",
}
"""Libraries that answer at once: that the real ones do is shown in test_runtime.py."""

RAPL = "sys/class/powercap/intel-rapl:0"
LAPTOP = {
    f"{RAPL}/name": "package-0",
    f"{RAPL}/energy_uj": 1000000,
    f"{RAPL}/max_energy_range_uj": 262143328850,
    "proc/cpuinfo": "processor : 0\ncpu MHz : 1500.000\n",
    "sys/class/thermal/thermal_zone0/type": "x86_pkg_temp",
    "sys/class/thermal/thermal_zone0/temp": 61000,
}


@pytest.fixture
def libraries(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(grow(tmp_path / "libraries", FINE)))
    return tmp_path / "libraries"


def run(*options: object) -> tuple[int, str, str]:
    line = [sys.executable, "-m", "device_agent", "doctor", *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - ours
    return done.returncode, done.stdout, done.stderr


def checked(*options: object) -> tuple[int, dict[str, Check]]:
    code, printed, said = run("--format", "json", *options)
    assert said == ""
    return code, {check.name: check for check in msgspec.json.decode(printed, type=list[Check])}


@pytest.mark.broker
async def test_where_all_is_well_it_ends_with_0(tmp_path, libraries) -> None:
    """A real broker, a folder that can be written; the folder is left to the agent to make."""
    async with run_private_broker(tmp_path) as broker:
        code, checks = await asyncio.to_thread(checked, "--config", write_config(tmp_path, broker.port))
    assert code == 0, checks
    assert {name for name, check in checks.items() if check.state == "ok"} >= {"config", "disk", "broker", "torch"}
    assert checks["onnxruntime"].state == "warn"
    assert not (tmp_path / "state").exists()


def test_what_keeps_it_from_training_ends_with_1(tmp_path, libraries) -> None:
    """No broker, and a library that dies: a process of its own does, the doctor goes on and says what helps."""
    grow(libraries, {"torch/__init__.py": SIGILL})
    (tmp_path / "state").mkdir()
    config = write_config(tmp_path, free_port(), data='source = "folder"\npath = "/srv/nowhere"')
    code, checks = checked("--config", config)
    assert code == 1
    assert [name for name, check in checks.items() if check.state == "bad"] == ["torch", "data", "broker"]
    assert "/srv/nowhere" in checks["data"].finding
    assert "SIGILL" in checks["torch"].finding
    assert checks["torch"].remedy == SIGILL_REMEDIES["torch"]
    assert checks["broker"].remedy == check_broker(Broker(), "Connection refused").remedy
    assert runtime.read_verdicts(tmp_path / "state")["torch"].state == "sigill"


@pytest.mark.parametrize(
    ("content", "words"),
    [("device = 7\n", "device"), (None, "agent.toml"), ("devise = 'a'\n", "devise")],
)
def test_a_configuration_with_a_mistake_ends_with_2_and_the_board_is_examined_all_the_same(
    tmp_path, capsys, content, words
) -> None:
    path = tmp_path / "agent.toml"
    if content is not None:
        path.write_text(content)
    options = argparse.Namespace(config=path, root=grow(tmp_path / "board", LAPTOP), format="json", fix=False)
    assert command.run(options) == 2
    checks = {check.name: check for check in msgspec.json.decode(capsys.readouterr().out, type=list[Check])}
    assert checks["config"].state == "bad"
    assert words in checks["config"].finding + checks["config"].remedy
    assert checks["thermal"].finding == "61 °C, measured"


def test_the_table_has_a_line_for_each_check_and_one_for_its_fix(tmp_path) -> None:
    """Colours are for a terminal alone."""
    code, printed, said = run("--root", grow(tmp_path, LAPTOP))
    assert (code, said) == (0, "")
    assert "\nOK    thermal                 61 °C, measured\n" in printed
    assert re.search(r"^ +-> .*--config FILE$", printed, re.MULTILINE)
    assert "\x1b" not in printed
    states = [line.split()[0] for line in printed.splitlines()[:-1] if not line.startswith(" ")]
    counts = [str(states.count(state)) for state in ("BAD", "WARN", "OK")]
    assert re.findall(r"\d+", printed.splitlines()[-1]) == counts
    (line,) = command.format_check(Check(name="disk", state="bad", finding="full"), 80, in_colour=True)
    assert line.startswith("\x1b[31mBAD \x1b[0m  disk")


def test_a_root_that_is_none_and_a_profile_that_is_none(tmp_path) -> None:
    code, printed, said = run("--root", tmp_path / "none")
    assert (code, str(tmp_path / "none") in said) == (2, True)
    assert len(printed.splitlines()) == 2
    (check,) = examine.examine_board(tmp_path, BoardConfig(profile="none-such"))
    assert (check.name, check.state) == ("profile", "bad")


def test_a_calibration_that_rotted_is_told(tmp_path) -> None:
    grow(tmp_path / "state", {"calibration.json": "{"})
    first = next(examine.examine_board(grow(tmp_path / "board", LAPTOP), BoardConfig(), tmp_path / "state"))
    assert (first.name, first.state, "calibrate" in first.remedy) == ("calibration", "warn", True)


def test_a_running_agent_is_no_fault(tmp_path, libraries) -> None:
    config = write_config(tmp_path, free_port())
    (tmp_path / "state").mkdir()
    with hold_lock(tmp_path / "state"):
        during = {check.name: check for check in until_libraries(config)}
    after = {check.name: check for check in until_libraries(config)}
    assert during["agent"].state == "ok"
    assert "agent" not in after


def until_libraries(config: Path) -> list[Check]:
    checks = []
    for check in command.run_checks(config, None):
        if check.name == "torch":
            break
        checks.append(check)
    return checks


def test_it_asks_the_kernel_whether_the_calendar_is_right() -> None:
    assert examine.is_disciplined() in (True, False)


def test_who_may_not_read_a_sensor_gets_the_commands_that_mend_it() -> None:
    """Mode 0400 of root, as RAPL counters are: root's own doctor sees nothing of it."""
    with open_to_all() as folder:
        root = grow(folder, LAPTOP)
        (root / RAPL / "energy_uj").chmod(0o400)
        for_root = {check.name: check for check in examine.examine_board(root, BoardConfig(profile="generic-x86"))}
        with as_nobody():
            checks = {check.name: check for check in examine.examine_board(root, BoardConfig(profile="generic-x86"))}
    assert for_root["power: rapl"].state == "ok"
    rapl = checks["power: rapl"]
    assert (rapl.state, rapl.finding.startswith("denied")) == ("warn", True)
    assert "usermod -aG powercap nobody" in rapl.remedy
    assert "0440 root powercap" in rapl.remedy  # a line for tmpfiles.d


def test_who_may_not_write_the_folder_is_told_how_to_get_it() -> None:
    with open_to_all() as folder:
        (folder / "mine").mkdir(mode=0o700)
        (folder / "taken").write_text("")
        with as_nobody():
            for name in ("mine/state", "mine", "new", "taken"):
                (check,) = islice(examine.examine_state_folder(folder / name, 0), 1)
                assert (check.name, check.state) == ("disk", "bad"), name
                assert "install -d -o USER" in check.remedy

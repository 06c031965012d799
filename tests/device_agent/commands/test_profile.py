"""`device-agent profile` as people use it, and what is left of it after a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess  # noqa: TID251 - the command as a process
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from device_agent.__main__ import main
from device_agent.measurement.tuning.apply import JOURNAL_NAME
from tests.device_agent.agent_side import write_config
from tests.device_agent.sources import JETSON, clocks, content, with_clocks, with_modes
from tests.machine import free_port, grow
from tests.naming import names_all

LIMIT_S = 300
COMMAND = (sys.executable, "-m", "device_agent")


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Return what runs the command in this process: its exit code, and what it printed."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["device-agent", "profile", *(str(word) for word in words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {"proc/device-tree/compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0"}
    return grow(with_clocks(tmp_path / "root"), files)


def test_show_prints_the_file_or_all_values(call, root):
    """As written, comments and all; or with every default, for programs."""
    code, shown, _ = call("show", "--root", root)
    assert code == 0
    assert 'id = "raspberry-pi-4b"' in shown
    assert re.search("^ *# ", shown, re.MULTILINE)
    values = json.loads(call("show", "--root", root, "--format", "json")[1])
    assert (values["id"], values["power"]["sample_hz"]) == ("raspberry-pi-4b", 5.0)


def test_list_marks_this_boards_and_says_what_it_goes_by(call, root):
    lines = call("list", "--root", root)[1].splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["raspberry-pi-4b"]
    assert lines[-1].endswith(": raspberrypi,4-model-b, brcm,bcm2711")


def test_check_says_what_is_wrong_and_ends_with_1(call, tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(JETSON)
    bad.write_text(JETSON + '[power]\ntotal = ["IN"]\n')
    code, praise, complaint = call("check", good)
    assert (code, str(good) in praise, complaint) == (0, True, "")
    code, said, _ = call("check", good, bad)
    assert (code, said.startswith(praise)) == (1, True)
    assert names_all(said.removeprefix(praise), bad, "power.total", "IN", "power.rails")


def test_check_lists_every_fault_of_a_file(call, tmp_path):
    """Keys of a wrong form and figures that cannot be true; of a table of a wrong form its form alone."""
    bad = tmp_path / "bad.toml"
    bad.write_text(
        'schema = 1\nid = "My Board"\nnam = "x"\n'
        '[cpu]\nsources = []\n[power]\ntotal = 3\nsources = ["modle"]\n[memory]\nshared = 2\n'
    )
    code, said, _ = call("check", bad)
    assert code == 1
    lines = [line.removeprefix(f"{bad}: ") for line in said.splitlines()]
    assert len(lines) == 7
    for key in ("`nam`", "power.total", "power.sources[0]", "memory", "`name`", "id", "cpu.sources"):
        assert any(names_all(line, key) for line in lines), key


def test_plan_prints_steps_and_does_none(call, root):
    before = content(root)
    code, said, _ = call("plan", "--root", root, "--governor", "powersave", "--max-mhz", "1000")
    assert (code, content(root)) == (0, before)
    assert said.splitlines() == [
        "policy0: ondemand, 600 to 1500 MHz",
        "  /sys/devices/system/cpu/cpufreq/policy0/scaling_governor = powersave",
        "  /sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq = 900000",
    ]
    assert not any("=" in line for line in call("plan", "--root", root, "--governor", "ondemand")[1].splitlines())


def test_plan_of_a_power_mode_names_the_tool_and_the_modes(call, tmp_path):
    path, root = tmp_path / "jetson.toml", with_modes(tmp_path / "root", 0)
    path.write_text(JETSON)
    said = call("plan", "--root", root, "--profile", path, "--power-mode", "25W")[1].splitlines()
    assert re.findall(r"\d+W", said[0]) == ["15W", "15W", "25W", "7W"]
    assert said[1] == "  nvpmodel -m 1"
    assert len(said) == 3, "that the clocks follow, which only that mode tells"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), ["--governor", "--max-mhz", "--power-mode"]),
        (("plan", "--power-mode", "25W"), ["'25W'"]),
        (("plan", "--governor", "turbo"), ["'turbo'", "policy0", "ondemand, performance, powersave"]),
        (("show", "--profile", "nobody"), ["'nobody'"]),
        (("show", "--profile", "nobody.toml"), ["nobody.toml"]),
        (("apply", "--governor", "powersave", "--state-dir", "/proc/nowhere"), ["/proc/nowhere", "--state-dir"]),
        (("apply", "--governor", "powersave", "--for", "-1"), ["--for -1", "1e+06"]),
        (("apply", "--governor", "powersave", "--for", "nan"), ["--for nan"]),
        (("apply", "--governor", "powersave", "--for", "1e30"), ["--for 1e+30"]),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(call, root, words, said):
    before = content(root)
    code, out, err = call(*words, "--root", root)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert names_all(err, *said)
    assert content(root) == before


@contextmanager
def process(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Run a command of the agent while the block lasts."""
    command = [*COMMAND, *(str(word) for word in words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, bufsize=1) as running:  # noqa: S603
        watchdog = threading.Timer(LIMIT_S, running.kill)  # so that a test waits for no line for ever
        watchdog.start()
        try:
            yield running
        finally:
            watchdog.cancel()
            running.kill()


def said(running: subprocess.Popen[str], words: str) -> str:
    """Return the line that holds these words, once it was said."""
    assert running.stdout
    line = next((line for line in running.stdout if words in line), "")
    assert line, f"it never said {words!r}"
    return line


def apply(root: Path, state: Path, *more: object) -> tuple[object, ...]:
    return ("profile", "apply", "--root", root, "--state-dir", state, "--governor", "powersave", *more)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_apply_holds_until_it_is_told_to_stop_and_puts_back(root, tmp_path, number):
    before = content(root)
    with process(*apply(root, tmp_path / "state")) as running:
        said(running, "Ctrl-C")
        assert clocks(root)[0] == "powersave"
        running.send_signal(number)
        assert running.wait(LIMIT_S) == 0
    assert content(root) == before


def test_apply_ends_by_itself_after_its_time(call, root, tmp_path):
    """In this process: it blocks the stop signals, which is undone here."""
    before, mask = content(root), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        code, out, _ = call(*apply(root, tmp_path / "state", "--for", "0.05")[1:])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert code == 0
    assert "0.05 s" in out
    assert content(root) == before


def test_two_may_not_set_one_board_at_once(root, tmp_path):
    """The second is refused, and the first one's settings stay."""
    with process(*apply(root, tmp_path / "state")) as running:
        said(running, "Ctrl-C")
        with process(*apply(root, tmp_path / "state", "--max-mhz", "900")) as second:
            said(second, f"{tmp_path / 'state'}")
            assert second.wait(LIMIT_S) == 2
        assert clocks(root) == ("powersave", 600_000, 1_500_000)


def test_what_a_killed_one_left_the_agents_next_start_puts_back(root, tmp_path):
    """kill -9: nothing of its own can run any more; an agent without any target starts in the same state_dir."""
    before, state = content(root), tmp_path / "state"
    with process(*apply(root, state)) as running:
        said(running, "Ctrl-C")
        running.kill()
        running.wait(LIMIT_S)
    assert clocks(root)[0] == "powersave"
    config = write_config(tmp_path, port := free_port())
    config.write_text(config.read_text() + f'[board]\nroot = "{root}"\n')
    with process("run", "--config", config) as agent:
        said(agent, f":{port}")
        assert content(root) == before
        assert not (state / JOURNAL_NAME).exists()


def test_an_agent_has_its_target_while_it_runs_and_after_a_kill_again(root, tmp_path):
    """Killed with -9 it leaves the cap and the journal; started again it caps anew, and told to stop it puts back."""
    before = content(root)
    config = write_config(tmp_path, port := free_port())
    config.write_text(config.read_text() + f'[board]\nroot = "{root}"\n[board.target]\nmax_hertz = 1e9\n')
    with process("run", "--config", config) as agent:
        said(agent, f":{port}")
        assert clocks(root)[2] == 900_000
        agent.kill()
        agent.wait(LIMIT_S)
    assert clocks(root)[2] == 900_000
    with process("run", "--config", config) as agent:
        said(agent, f":{port}")
        assert clocks(root)[2] == 900_000
        agent.terminate()
        assert agent.wait(LIMIT_S) == 0
    assert content(root) == before


def test_a_target_the_board_refuses_is_a_warning_and_not_the_agents_end(root, tmp_path):
    config = write_config(tmp_path, port := free_port())
    config.write_text(config.read_text() + f'[board]\nroot = "{root}"\n[board.target]\npower_mode = "25W"\n')
    with process("run", "--config", config) as agent:
        assert "WARNING" in said(agent, "'25W'")
        said(agent, f":{port}")

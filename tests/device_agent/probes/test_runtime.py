"""Whether a library runs here: real child processes, and real deaths of theirs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from device_agent.hardware.tools import run_module
from device_agent.probes import runtime
from device_agent.probes.runtime import Verdict
from device_agent.profile.schema import Cpu
from shared.errors import NoData
from tests.machine import grow, profile, shared

DEATHS = {
    "import os; os.kill(os.getpid(), 4)": ("sigill", "SIGILL"),
    "import os; os.kill(os.getpid(), 9)": ("out_of_memory", "memory"),
    "raise MemoryError": ("out_of_memory", "memory"),
    "import os; os.abort()": ("broken", "signal 6 (Aborted)"),
    "raise OSError('libopenblas.so.0: cannot open shared object file')": ("broken", "libopenblas.so.0"),
    "import os; os._exit(7)": ("broken", "exit code 7"),
    "raise ModuleNotFoundError(name='torch')": ("missing", ""),
    "import no_such_part": ("broken", "no_such_part"),
    "import time; time.sleep(60)": ("timeout", "1 s"),
}


def fake(folder: Path, library: str, code: str, monkeypatch) -> None:
    """Make a library whose import is that code, and let children find it first."""
    grow(folder, {f"{library}/__init__.py": code})
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("code", DEATHS)
def test_each_death_of_the_child_is_told_apart(tmp_path, monkeypatch, code) -> None:
    """The process that asks lives on, whatever the import does."""
    fake(tmp_path, "torch", code, monkeypatch)
    verdict = runtime.smoke_test("torch", 1.0 if "sleep" in code else 30.0, board="pi")
    state, words = DEATHS[code]
    assert (verdict.library, verdict.state, verdict.board) == ("torch", state, "pi")
    assert words in verdict.finding


def test_a_library_that_imports_and_dies_at_its_first_convolution(tmp_path, monkeypatch) -> None:
    """As torch 2.10 does on a CPU without LSE atomics."""
    code = "import os\nclass nn:\n    def Conv2d(*_): os.kill(os.getpid(), 4)"
    fake(tmp_path, "torch", code, monkeypatch)
    assert runtime.smoke_test("torch").state == "sigill"


def test_the_real_libraries_compute_here() -> None:
    """A convolution there and back, an ONNX session; then it is the version that pip knows."""
    for library in runtime.PACKAGES:
        if not runtime.find_version(library):
            pytest.skip(f"{library} is not installed")
        verdict = runtime.smoke_test(library)
        assert (verdict.state, verdict.version) == ("usable", runtime.find_version(library)), verdict


def test_the_child_offers_itself_to_the_killer_of_processes(tmp_path, monkeypatch) -> None:
    """Where memory is short the kernel takes the trial, not the agent."""
    fake(tmp_path, "torch", "print(open('/proc/self/oom_score_adj').read()); raise OSError('seen')", monkeypatch)
    ended = run_module("device_agent.hardware.library_smoke_test", "torch", timeout_s=30.0)
    assert ended.stdout.split() == ["500"]


def test_a_verdict_is_remembered_for_its_version_and_board(tmp_path, monkeypatch) -> None:
    """Not for another board, nor for another version, nor out of a torn file."""
    fake(tmp_path / "bad", "torch", "import os; os.kill(os.getpid(), 4)", monkeypatch)
    first = runtime.smoke_test("torch", 30.0, board="pi-4")
    runtime.store_verdict(tmp_path, first)
    assert first.state == "sigill"
    assert first.version == runtime.find_version("torch") != ""
    monkeypatch.delenv("PYTHONPATH")
    assert runtime.load_verdicts(tmp_path, "pi-4") == {"torch": first}
    assert runtime.load_verdicts(tmp_path, "pi-5") == {}
    runtime.store_verdict(tmp_path, Verdict(library="torch", state="usable", version="1.0", board="pi-4"))
    assert runtime.load_verdicts(tmp_path, "pi-4") == {}
    (tmp_path / runtime.CACHE_NAME).write_bytes(b'{"torch": {"lib')
    assert runtime.load_verdicts(tmp_path, "pi-4") == {}


def test_what_the_next_try_may_find_otherwise_is_not_remembered(tmp_path) -> None:
    for state in ("timeout", "out_of_memory", "missing"):
        runtime.store_verdict(tmp_path, Verdict(library="torch", state=state, version="2.8.0"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_nothing_costs_only_the_memory(tmp_path) -> None:
    runtime.store_verdict(tmp_path / "none", Verdict(library="torch", state="usable", version="2.8.0"))


def test_verdicts_as_facts() -> None:
    verdicts = {
        "torch": Verdict(library="torch", state="sigill", version="2.10.0"),
        "onnxruntime": Verdict(library="onnxruntime", state="usable", version="1.20.1"),
    }
    assert runtime.verdict_facts(verdicts) == {"torch": "2.10.0 sigill", "onnxruntime": "1.20.1"}
    assert runtime.verdict_facts({"torch": Verdict(library="torch", state="missing")}) == {"torch": "missing"}


@pytest.mark.parametrize(("board", "token"), [("rpi-4b", "atomics"), ("rpi-5", "")])
def test_the_instruction_set_of_recorded_boards(tmp_path, board, token) -> None:
    """A Pi 4 has no LSE atomics, a Pi 5 has them; nothing is imported to know it."""
    cpuinfo = shared("reference/boards", board, "proc_cpuinfo.txt").read_text()
    told = profile(cpu=Cpu(isa={"torch": "atomics"}))
    root = grow(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert runtime.find_missing_isa(root, "torch", told) == token
    assert runtime.find_missing_isa(root, "onnxruntime", told) == ""
    assert runtime.find_missing_isa(tmp_path / "none", "torch", told) == ""


def test_looking_imports_nothing_and_reads_below_the_root(tmp_path) -> None:
    """Versions are those of this machine, so that a recorded board has none."""
    release = "# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic, EABI: aarch64, DATE: Fri Sep 13"
    files = {
        "proc/sys/kernel/osrelease": "5.15.148-tegra",
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0",
        "etc/nv_tegra_release": release,
    }
    expected = {"kernel": "5.15.148-tegra", "model": "NVIDIA Jetson Orin Nano", "l4t": "36.4.0"}
    assert runtime.read(grow(tmp_path, files), profile(), 0).facts == expected
    with pytest.raises(NoData):
        runtime.read(tmp_path / "none", profile(), 0)
    live = runtime.read(Path("/"), profile(), 0).facts
    assert live["kernel"] == os.uname().release
    assert live.get("torch", "") == runtime.find_version("torch")


def test_the_probe_of_a_light_agent_stays_light() -> None:
    """A fresh interpreter that looks at its libraries has none of them."""
    code = (
        "import sys; from pathlib import Path; from device_agent.probes import runtime as r;"
        "from device_agent.profile.schema import Profile as P;"
        "r.read(Path('/'), P(schema=1, id='x', name='x'), 0.0); r.find_version('torch');"
        "sys.exit(bool({'torch', 'numpy', 'onnxruntime'} & set(sys.modules)))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0  # noqa: S606 - this interpreter

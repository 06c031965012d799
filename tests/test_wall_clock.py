"""Clock jumps of hours change no deadline and no measured duration."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess  # noqa: TID251 - the system is processes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import Evaluated, RoundClosed, RunOpened, UpdateAccepted, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, ROOT, TINY, final, folder_of, started
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto

WAIT_S, MISSED = 2.0, 2
JUMPING = '''
import os, pathlib, time

begin, real, gmtime, localtime, strftime = time.monotonic(), time.time, time.gmtime, time.localtime, time.strftime

def jumping():
    """Up to five hours ahead, then as far back, another step every tenth of a second."""
    step = int((time.monotonic() - begin) * 10)
    return real() + (-1) ** step * (1 + step % 5) * 3600

time.time, time.time_ns = jumping, lambda: int(jumping() * 1e9)
time.gmtime = lambda seconds=None: gmtime(jumping() if seconds is None else seconds)
time.localtime = lambda seconds=None: localtime(jumping() if seconds is None else seconds)
time.strftime = lambda form, at=None: strftime(form, time.localtime() if at is None else at)
words = pathlib.Path(f"/proc/{os.getpid()}/cmdline").read_bytes().split(b"\\0")
(pathlib.Path(__file__).parent / f"jumped-{os.getpid()}").write_bytes(b" ".join(words))
'''


def test_the_clocks_of_this_test_jump(clocks):
    """Hours, both ways, within a second; else the test below would show nothing."""
    code = """
import time
seen, began = [], time.monotonic()
jumps = []
while not all(jumps) or not jumps:
    assert time.monotonic() < began + 60
    seen.append((time.time(), time.mktime(time.localtime())))
    jumps = [max(clock) - min(clock) > 7200 for clock in zip(*seen)]
print(jumps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout == "[True, True]\n"


@pytest.fixture
def clocks(tmp_path, monkeypatch) -> Path:
    """Let the wall clock of every Python process started from here jump; return where each leaves word of it."""
    folder = tmp_path / "clocks"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    return folder


@contextmanager
def a_server_without_devices(folder: Path) -> Iterator[Callable[[], list[RoundClosed]]]:
    """Run a server that waits for devices as long as its plan says, in vain; yield what gives its rounds."""
    folder.mkdir()
    cohort, rule = f"min_devices = 1\nwait_s = {WAIT_S}", 'on_missed = "continue"'
    plan = load(write_plan(folder, rounds=1 + MISSED, cohort=cohort, round=rule), folder)
    store = SqliteStore(folder / "runs" / "alone")
    store.append(RunOpened(run="alone", plan=plan, started="20261122T000000Z"))  # before round 1 it would wait for ever
    store.append(RoundClosed(round=1, outcome="missed", arrived=(), seconds=WAIT_S))
    store.close()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        running = runner.run(stack.enter_async_context(broker.run_private_broker(folder)))
        keys = {
            "plan": "plan.toml",
            "site": "lab",
            "data_dir": str(folder / "runs"),
            "data_root": str(folder),
            "run": "alone",
        }
        (folder / "server.json").write_text(json.dumps({"broker": {"port": running.port}, **keys}))

        def ended() -> list[RoundClosed]:
            assert server.wait(PATIENCE_S) == 1, "no round had an update"
            return closed_rounds(read_records(folder_of(folder / "runs")))

        try:
            with started("edge_server", "run", "--config", folder / "server.json", log=folder / "log") as server:
                yield ended
        finally:
            runner.run(stack.aclose())


def module(word: Path) -> str:
    """Return which of our modules a process ran as, by the word it left."""
    command = word.read_bytes().decode().split(" ")
    return command[command.index("-m") + 1] if "-m" in command else ""


@pytest.mark.slow
@pytest.mark.broker
@needs_mosquitto
def test_a_live_trial_under_jumping_clocks_is_as_any_other(clocks, tmp_path):
    """Server, agents and trainers: every update counts, the model has the replay's bits, no second is an hour."""
    plan = write_plan(tmp_path, rounds=2, cohort="min_devices = 1", **TINY)
    command = ["-m", "edge_server", "trial", "run", plan, "--local", 1, "--data-dir", tmp_path / "runs"]
    began = time.monotonic()
    with a_server_without_devices(tmp_path / "alone") as alone:
        done = subprocess.run(  # noqa: S603 - ours
            [sys.executable, *map(str, command), "--data-root", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        missed = alone()
    took_s = time.monotonic() - began
    modules = {module(path) for path in clocks.glob("jumped-*")}
    assert modules >= {"edge_server", "device_agent", "device_agent.trainer.main"}
    folder = folder_of(tmp_path / "runs")
    records = read_records(folder)
    rounds = closed_rounds(records)
    assert [(one.outcome, one.arrived, one.failed) for one in rounds] == [("aggregated", ("device-0",), {})] * 2
    require_equal(final(folder, 2), replay_plan(load(plan, tmp_path), tmp_path / "replay", 1)[0].tree)
    assert sum(one.seconds for one in rounds) < took_s
    costs = [one.update.cost for one in records if isinstance(one, UpdateAccepted)]
    seconds = [figure for cost in costs for figure in (cost.download_s, cost.compute_s, cost.cpu_s)]
    assert all(0 <= figure < took_s for figure in seconds)
    assert any(isinstance(one, Evaluated) for one in records)
    assert [one.outcome for one in missed] == ["missed"] * (1 + MISSED)
    assert all(WAIT_S <= one.seconds < WAIT_S + 600 for one in missed)

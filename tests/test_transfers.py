"""Transfers over a link that breaks and between processes that are killed: what has come need not come again."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.journal.records import RoundClosed
from edge_server.journal.sqlite import read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.benchmarks.counter import Counted, counting
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, final, forked, started, until
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]

HIDDEN, MODEL_BYTES = 6_660, 4 * (6_660 * 75 + 10)
RATE = 1e6
FRAME_BYTES, WINDOW = 32 * 1024, 4
LINK = {"frame_bytes": FRAME_BYTES, "window": WINDOW}
CHATTER_BYTES = 40_000
"""What connects, offers, asks and acknowledges, over all connections of the test."""


@contextmanager
def relayed(port: int) -> Iterator[tuple[Counted, asyncio.AbstractEventLoop]]:
    """Put a counted link of `RATE` bytes a second before a port, on a thread of its own."""
    ready, ended = threading.Event(), asyncio.Event()
    found: list[tuple[Counted, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with counting(port, RATE) as counted:
            found.append((counted, asyncio.get_running_loop()))
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(300)
    try:
        yield found[0]
    finally:
        found[0][1].call_soon_threadsafe(ended.set)
        thread.join(300)


@dataclass
class Pair:
    """A server and one agent as processes; either may be killed and is started again by the same command."""

    folder: Path
    stack: ExitStack
    configs: dict[str, Path]

    def start(self, name: str) -> None:
        log, words = self.folder / f"{name}.log", ("run", "--config", self.configs[name])
        begun = forked(*words, log=log) if name == "server" else started("device_agent", *words, log=log)
        self.processes = getattr(self, "processes", {})
        self.processes[name] = self.stack.enter_context(begun)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        assert self.processes[name].wait() == -signal.SIGKILL
        self.start(name)


def configured(folder: Path, name: str, **keys: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(keys))
    return path


def test_what_has_come_does_not_come_again(tmp_path):
    """2 MB each way at 1 MB/s; the link breaks, the agent is killed, the server is killed, on the way down and up.

    At the device's socket each way carries the payload, and one window for each of the three interruptions at most; the
    model is that of an undisturbed run, trained once.
    """
    plan = write_plan(
        tmp_path,
        rounds=1,
        model=f'name = "mlp"\noptions = {{ features = 64, hidden = {HIDDEN}, classes = 10 }}',
        data='source = "digits"\nlimit = 64',
        more='[[device]]\nname = "a"',
        cohort="min_devices = 1",
        round="deadline_s = 80",
    )
    with asyncio.Runner() as runner, ExitStack() as stack:
        context = broker.run_private_broker(tmp_path)
        real = runner.run(context.__aenter__())
        stack.callback(lambda: runner.run(context.__aexit__(None, None, None)))
        counted, loop = stack.enter_context(relayed(real.port))
        told = {"broker": {"port": counted.port}, "link": LINK}
        agent = {
            "device": "a",
            "site": "lab",
            "state_dir": str(tmp_path / "a"),
            "data": {"source": "digits", "limit": 64},
        }
        server = {
            "plan": plan.name,
            "site": "lab",
            "run": "run",
            "data_dir": str(tmp_path),
            "data_root": str(tmp_path),
            "threads": 1,
        }
        pair = Pair(
            tmp_path,
            stack.enter_context(ExitStack()),
            {
                "a": configured(tmp_path, "a", **agent, **told, trainer={"threads": 1}),
                "server": configured(tmp_path, "server", **server, broker={"port": real.port}, link=LINK),
            },
        )
        pair.start("a")
        pair.start("server")
        for way in ("received", "sent"):
            until(lambda way=way: getattr(counted, way) > 0.3 * MODEL_BYTES, f"a third {way}")
            loop.call_soon_threadsafe(counted.sever)
            until(lambda way=way: getattr(counted, way) > 0.5 * MODEL_BYTES, f"half {way}")
            pair.kill("a")
            until(lambda way=way: getattr(counted, way) > 0.75 * MODEL_BYTES, f"three quarters {way}")
            pair.kill("server")
        assert pair.processes["server"].wait(PATIENCE_S) == 0
        limit = MODEL_BYTES * 1.01 + 3 * WINDOW * FRAME_BYTES + CHATTER_BYTES
        assert MODEL_BYTES < counted.received < limit
        assert MODEL_BYTES < counted.sent < limit
    [closed] = [one for one in read_records(tmp_path / "run") if isinstance(one, RoundClosed)]
    assert closed.arrived == ("a",)
    assert "run=run round=1 seconds=" in (tmp_path / "a.log").read_text(), "trained"
    state, _ = replay_plan(load(plan, tmp_path), tmp_path / "replay", 1)
    require_equal(final(tmp_path / "run", 1), state.tree)

"""A hundred agents reconnect at once in the middle of a round.

`python -m tests.edge_server.fleet.test_stampede AGENTS PROCESSES` prints the figures.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.fleet.hub import Server
from edge_server.journal.checkpoints import SqliteStore
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_plan import load
from edge_server.rounds.run import run_plan
from shared.protocol.topics import SERVER
from shared.runtime.executor import in_thread
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from tests.edge_server.harness import RUN, SITE, write_examples, write_plan
from tests.machine import free_port

AGENTS = 100


@pytest.mark.broker
@pytest.mark.slow
def test_all_are_back_and_the_server_answers_meanwhile(tmp_path, record_property):
    """kill -9 of the broker and a start on the same port: the server hears every agent's new session.

    The server, which gives each its task again, lets no timer wait until the herd is back: how long is in the record,
    as are the attempts in time. That these are spread by jitter is shown in virtual time, by `test_backoff`.
    """
    if not broker.find_mosquitto():
        pytest.skip("mosquitto is not installed")
    figures = asyncio.run(stampede(tmp_path, AGENTS))
    record_property("figures", repr(figures))
    assert sum(figures.tenths) >= AGENTS
    assert figures.stall_s < 60.0


ROOT = Path(__file__).parents[3]
AWAY_S = 0.5
PATIENCE_S = 300.0
SAMPLE_S = 0.002


@dataclass(frozen=True)
class Figures:
    """What a stampede took.

    Attributes:
        back_s: From the broker's start until the server had heard every agent again.
        stall_s: The longest that the server's event loop let a timer wait, from the broker's death until then.
        tenths: Attempts to connect in each tenth of a second after the broker's death.
    """

    back_s: float
    stall_s: float
    tenths: list[int]

    @property
    def crowd(self) -> float:
        """Return the share of all attempts that fell into the busiest 0.3 s."""
        return max(sum(self.tenths[start : start + 3]) for start in range(len(self.tenths))) / sum(self.tenths)


async def stampede(folder: Path, agents: int, processes: int = 1) -> Figures:
    """Kill the broker of a site with an open round, start it again on the same port, wait for all."""
    port = free_port()
    async with AsyncExitStack() as stack:
        async with broker.run_private_broker(folder, port=port) as first:
            attempts = await stack.enter_async_context(_herd(port, folder, agents, processes))
            server = await stack.enter_async_context(_serving(port, folder, agents))
            await _until(lambda: len(server.rounds.tasks) == agents)
            before = {device: status.session for device, status in server.fleet.statuses.items()}
            stalls: list[float] = []
            watching = asyncio.create_task(_watch(stalls))
            stack.callback(watching.cancel)
            first.process.kill()
            await first.process.wait()
        killed = time.monotonic()
        await asyncio.sleep(AWAY_S)
        await stack.enter_async_context(broker.run_private_broker(folder, port=port))
        there = time.monotonic()
        await _until(lambda: all(server.fleet.statuses[d].session > number for d, number in before.items()))
        back_s = time.monotonic() - there
        assert len(server.fleet.online) == agents
        assert not server.flood.refused
    lines = [line for file in attempts for line in file.read_text().splitlines()]
    moments = [int(10 * (float(line.split()[1]) - killed)) for line in lines if float(line.split()[1]) > killed]
    return Figures(back_s, max(stalls), [moments.count(tenth) for tenth in range(max(moments) + 1)])


@asynccontextmanager
async def _herd(port: int, folder: Path, agents: int, processes: int) -> AsyncIterator[list[Path]]:
    """Run the agents while the block lasts; yield the files of their attempts to connect."""
    each, files, started = agents // processes, [], []
    with (folder / "herd.log").open("wb") as log:
        for first in range(0, agents, each):
            files.append(folder / f"attempts-{first}")
            with files[-1].open("wb") as output:
                command = [
                    sys.executable,
                    "-m",
                    "tests.edge_server.herd",
                    *map(str, (port, first, each, folder / "herd")),
                ]
                started.append(
                    await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=DEVNULL, stdout=output, stderr=log)
                )
    try:
        yield files
    finally:
        for process in started:
            process.kill()
        for process in started:
            await process.wait()


@asynccontextmanager
async def _serving(port: int, folder: Path, agents: int) -> AsyncIterator[Server]:
    """Run the server on a plan that needs all agents, while the block lasts."""
    sections = {"cohort": f"min_devices = {agents}\nwait_s = 600.0", "round": "deadline_s = 600.0"}
    plan = load(write_plan(folder, data=write_examples(folder), **sections), folder)
    session = Session(folder / "session", SERVER, SITE, "server")
    transport = MqttTransport(Broker(port=port), f"{SITE}.{SERVER}", session.presence)
    server = Server(SITE, transport, time.monotonic, in_thread, broker=transport.connected)
    async with AsyncExitStack() as stack:
        store = SqliteStore(folder / RUN, durable=False)
        stack.callback(store.close)
        await stack.enter_async_context(transport.running())
        await stack.enter_async_context(server.listening())
        run = asyncio.create_task(run_plan(plan, RUN, server, store, LinkConfig(), started=""))
        try:
            yield server
        finally:
            run.cancel()
            ended = await asyncio.gather(run, return_exceptions=True)
            assert isinstance(ended[0], asyncio.CancelledError), ended


async def _watch(stalls: list[float]) -> None:
    """Note how much longer than asked a short sleep takes, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(SAMPLE_S)
        stalls.append(loop.time() - before - SAMPLE_S)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        done = asyncio.run(stampede(Path(place), int(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.write(f"back_s={done.back_s:.2f} stall_ms={1000 * done.stall_s:.0f} attempts={sum(done.tenths)} ")
    sys.stdout.write(f"busiest_300_ms={done.crowd:.0%}\nin each 100 ms: {done.tenths}\n")

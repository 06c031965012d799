"""Two servers exchange a payload through the one sender and the one receiver: in virtual time, and as two processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random

import pytest

from edge_server.fleet import broker
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background
from shared.transfer.frames import HEADER_BYTES
from shared.transfer.to_file import view
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate
from tests.edge_server.processes import PATIENCE_S, started, until
from tests.shared.transfer.peers import FRAME_BYTES, RATE, fetch, offer

SIZE = (3 << 20) + 777
MODULE = "tests.shared.transfer.peers"


@pytest.fixture
def north(tmp_path) -> Path:
    """What the server in the north has."""
    path = tmp_path / "north"
    path.write_bytes(Random(8).randbytes(SIZE))
    return path


def exchanged(north: Path, south: Path, rate: Rate, *, outage_s: float = 0.0) -> tuple[int, int, float]:
    """Exchange a file in one loop of virtual time; return bytes sent, bytes received and seconds."""

    async def routine() -> tuple[int, int, float]:
        transport, clock = MemoryTransport(), asyncio.get_running_loop().time
        links = [Link(transport, rate, clock, seed) for seed in (1, 2)]

        async def breaks() -> None:
            await asyncio.sleep(1.0)
            links[0].connected.clear()
            await asyncio.sleep(outage_s)
            links[0].connected.set()
            await asyncio.Event().wait()

        for link in links:
            link.connected.set()
        async with background(*([breaks()] if outage_s else [])):
            sent, receiver = await asyncio.gather(offer(links[0], north), fetch(links[1], south, clock))
        return sent, receiver.bytes_received, clock()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(routine(), 3600))


def test_two_servers_in_one_replay_exchange_a_payload_at_the_rate_of_the_link(north, tmp_path):
    """Nothing is sent twice; 3 MiB at 8 Mbit/s take 3.15 s and little more; the same again, the same to the bit."""
    first, again = (exchanged(north, tmp_path / name, Rate(RATE, RATE, 0.01)) for name in ("south", "east"))
    assert first == again
    sent, received, seconds = first
    assert view(tmp_path / "south") == north.read_bytes()
    assert sent == received
    assert SIZE < sent < SIZE + (SIZE // FRAME_BYTES + 20) * HEADER_BYTES
    assert 8 * SIZE / RATE < seconds < 1.5 * 8 * SIZE / RATE


@pytest.mark.parametrize(("rate", "outage_s"), [(Rate(RATE, RATE, 0.01, 0.05), 0.0), (Rate(RATE, RATE, 0.01), 30.0)])
def test_what_a_link_between_servers_loses_is_asked_for_again(north, tmp_path, rate, outage_s):
    """One frame in twenty each way, and half a minute without a link: all comes, less than half as much again."""
    sent, received, seconds = exchanged(north, tmp_path / "south", rate, outage_s=outage_s)
    assert view(tmp_path / "south") == north.read_bytes()
    assert SIZE < received <= sent < 1.5 * SIZE
    assert seconds > 8 * SIZE / RATE + outage_s / 2


@pytest.mark.broker
@pytest.mark.skipif(broker.mosquitto() is None, reason="mosquitto is not installed")
def test_two_servers_as_processes_exchange_a_payload_through_a_broker(north, tmp_path):
    """The one that receives is killed on the way, and goes on with what its file has."""
    south = tmp_path / "south"

    async def routine() -> None:
        async with broker.running(tmp_path) as real:
            await asyncio.to_thread(between, real.port)

    def between(port: int) -> None:
        with started(MODULE, "offer", port, north, log=tmp_path / "north.log") as sender:
            with started(MODULE, "fetch", port, south, log=tmp_path / "south.log") as receiver:
                until(lambda: blocks_here(tmp_path / ".south") > 200, "some of it")
                receiver.kill()
                assert receiver.wait(PATIENCE_S) == -signal.SIGKILL
            before = blocks_here(tmp_path / ".south")
            assert before < SIZE // 1024
            with started(MODULE, "fetch", port, south, log=tmp_path / "south.log") as receiver:
                assert receiver.wait(PATIENCE_S) == 0
            assert sender.wait(PATIENCE_S) == 0

    asyncio.run(routine())
    assert view(south) == north.read_bytes()


def blocks_here(note: Path) -> int:
    """Return how many blocks the note beside a file says are here."""
    return note.read_bytes()[24:].count(1) if note.exists() else 0

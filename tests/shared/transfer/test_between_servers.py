"""Payload exchange of two servers, in virtual time and as processes.

One offers a file and answers; the other asks until it has it, each by
`python -m tests.shared.transfer.test_between_servers offer|fetch PORT FILE`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from edge_server.fleet import broker
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Ack, Update, Want
from shared.protocol.topics import topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.frames import HEADER_BYTES
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from shared.transfer.to_file import FileSink, view
from shared.transport.base import Broker, Inbox, Transport
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from shared.transport.simulated_link import Link, Rate
from tests.machine import needs_mosquitto

REGION, NORTH = "region", "north"
FRAME_BYTES, OFFER_S, RATE = 32 * 1024, 1.0, 8e6
POLICY = Policy(window=8, patience_s=1.0, limit=64 << 20, frame_bytes=FRAME_BYTES)
UP, DOWN = topic(REGION, NORTH, "update"), topic(REGION, NORTH, "ack")


async def offer(transport: Transport, path: Path) -> int:
    """Offer a file until it is acknowledged; return the bytes of frames that it took."""
    sender, sent = Sender.of_parts([view(path)], FRAME_BYTES), 0
    update = Update(run="region", round=1, device=NORTH, params=sender.transfer)
    async with transport.subscribe(DOWN) as inbox:
        while True:
            await _publish(transport, wire.encode(update))
            while (data := await _next(inbox, OFFER_S)) is not None:
                match wire.decode(data):
                    case Ack():
                        return sent
                    case Want() as want if want.digest == sender.transfer.digest:
                        for frame in sender.answer(want, transport.max_payload_bytes):
                            await _publish(transport, frame)
                            sent += len(frame)


async def fetch(transport: Transport, path: Path, clock: Callable[[], float]) -> Receiver[FileSink]:
    """Receive what is offered into a file, acknowledge it, and return its receiver."""
    receiver: Receiver[FileSink] | None = None
    async with transport.subscribe(UP) as inbox:
        while receiver is None or not receiver.complete:
            data = await _next(inbox, receiver.remaining_s(clock()) if receiver else None)
            if data is None:
                receiver.time_out(clock())
            elif frames.is_frame(data):
                if receiver:
                    receiver.take(frames.decode(data), clock())
            elif receiver is None:
                transfer, now = wire.decode_as(Update, data).params, clock()
                pace = POLICY.pace(now, transfer.frame_bytes)
                receiver = Receiver(transfer, partial(FileSink, path), POLICY, pace, now)
            if want := receiver and receiver.want():
                await _publish(transport, wire.encode(want), DOWN)
        receiver.finish()
        ack = Ack(run="region", round=1, device=NORTH, verdict="accepted")
        await transport.publish(DOWN, wire.encode(ack))
    return receiver


async def _publish(transport: Transport, data: bytes, name: str = UP) -> None:
    try:
        await transport.publish(name, data, assured=False)
    except Unreachable:
        await asyncio.sleep(OFFER_S)


async def _next(inbox: Inbox, seconds: float | None) -> bytes | None:
    """Return the next message; None after so many seconds without one."""
    try:
        async with asyncio.timeout(seconds):
            return (await anext(inbox))[1]
    except TimeoutError:
        return None


async def main(role: str, port: str, path: str) -> None:
    """Do one side's part over a broker."""
    async with MqttTransport(Broker(port=int(port)), f"{REGION}-{role}").running() as transport:
        await transport.connected.wait()
        if role == "offer":
            await offer(transport, Path(path))
        else:
            clock = asyncio.get_running_loop().time
            rate = RATE / 4 if role == "fetch-slowly" else RATE  # slow enough to be killed on the way
            link = Link(transport, Rate(rate, rate), clock)
            link.connected.set()
            await fetch(link, Path(path), clock)


SIZE = (3 << 20) + 777
MODULE = "tests.shared.transfer.test_between_servers"


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
@needs_mosquitto
def test_two_servers_as_processes_exchange_a_payload_through_a_broker(north, tmp_path):
    """The one that receives is killed on the way, and goes on with what its file has."""
    from tests.edge_server.processes import PATIENCE_S, started, until  # noqa: PLC0415 - those need no torch

    south = tmp_path / "south"

    async def routine() -> None:
        async with broker.run_private_broker(tmp_path) as real:
            await asyncio.to_thread(between, real.port)

    def between(port: int) -> None:
        with started(MODULE, "offer", port, north, log=tmp_path / "north.log") as sender:
            with started(MODULE, "fetch-slowly", port, south, log=tmp_path / "south.log") as receiver:
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


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

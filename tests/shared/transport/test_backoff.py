"""Reconnection back-off: quick after a restart, slower after refusals."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random
from types import SimpleNamespace

import pytest

from shared.errors import Unreachable
from shared.transport import mqtt
from shared.transport.base import Broker
from shared.transport.mqtt import FIRST_S, LAST_S, UNIQUE_NAME, MqttTransport, next_backoff_limit
from tests.machine import configured
from tests.naming import names_all


def test_waits_grow_to_a_cap_and_begin_anew():
    """Doubling from half a second to half a minute; after a connection that lasted, half a second again."""
    bounds = list(accumulate(range(9), lambda before, _: next_backoff_limit(before, anew=False), initial=0.0))[1:]
    assert bounds == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert next_backoff_limit(LAST_S, anew=True) == FIRST_S


FLEET = 100


class Bound(Random):
    """Jitter that is none: each wait is the longest that it may be."""

    def uniform(self, a: float, b: float) -> float:
        del a
        return b


@dataclass
class Lost(MqttTransport):
    """A client whose broker went away at 0 s, and is back after a while; it notes when it tries to connect.

    Attributes:
        back_s: When the broker is back.
        attempts: Moments, this client's after each other.
    """

    back_s: float = 0.0
    attempts: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[SimpleNamespace]:
        self.attempts.append(asyncio.get_running_loop().time())
        if self.attempts[-1] < self.back_s:
            raise Unreachable("it is away")
        yield SimpleNamespace(lost=asyncio.Event().wait())


async def attempts_of_a_fleet(back_s: float) -> list[list[float]]:
    """Have a fleet lose its broker at once; return each client's attempts from then on until all are back."""
    fleet = [Lost(Broker(), f"device-{number}", back_s=back_s) for number in range(FLEET)]
    async with AsyncExitStack() as stack:
        for one in fleet:
            await stack.enter_async_context(one.running())
        while not all(one.attempts and one.attempts[-1] >= back_s for one in fleet):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
    return [one.attempts[1:] for one in fleet]


def crowd(moments: list[float], seconds: float) -> float:
    """Return the share of moments in the busiest stretch of so many seconds."""
    return max(sum(start <= one < start + seconds for one in moments) for start in moments) / len(moments)


@pytest.mark.parametrize(("away_s", "stretch_s", "most"), [(0.5, 0.3, 0.5), (3.0, 0.1, 0.25)])
def test_a_fleet_is_spread(virtually, monkeypatch, away_s, stretch_s, most):
    """A hundred lose their broker at once and get it back: they do not fall upon it together, nor try in step before.

    Each waits a random time below its bound, so that even the first attempts do not fall together. In virtual time, by
    the client's own loop: without jitter all of them come back at one moment.
    """
    seeds = count()
    monkeypatch.setattr(mqtt, "Random", lambda: Random(next(seeds)))
    attempts = virtually(attempts_of_a_fleet(away_s))
    assert crowd([moment for each in attempts for moment in each], stretch_s) < most
    assert crowd([each[-1] for each in attempts], stretch_s) < most
    assert max(each[-1] for each in attempts) < 10 * away_s
    monkeypatch.setattr(mqtt, "Random", Bound)
    in_step = virtually(attempts_of_a_fleet(away_s))
    assert crowd([each[-1] for each in in_step], stretch_s) == 1.0


async def test_a_broker_that_accepts_and_drops_is_not_hammered():
    """Every CONNECT is accepted and the connection closed: a handful of attempts in 2.5 s, not four a second."""
    attempts: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        attempts.append(time.monotonic())
        writer.write(b"\x20\x03\x00\x00\x00")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port), "device").running():
        while len(attempts) < 2:  # noqa: ASYNC110 - what is waited for is at the other end
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
    assert 2 <= len(attempts) <= 7


async def test_one_id_used_twice_is_told_with_the_remedy(caplog):
    """MQTT 5, DISCONNECT 0x8E: who is thrown out says what to mend, once, and leaves the other in peace."""
    attempts: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.append(await reader.read(1000))
        writer.write(b"\x20\x03\x00\x00\x00\xe0\x02\x8e\x00")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port), "attic.pi-4").running():
        while not any(record.levelname == "ERROR" for record in caplog.records):  # noqa: ASYNC110 - a line of the log
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
    [error] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert names_all(error, "attic.pi-4", UNIQUE_NAME)
    assert len(attempts) <= 3  # the next but one waits up to half a minute


@pytest.mark.broker
@pytest.mark.parametrize("version", [5, 3])
async def test_two_boards_of_one_name_on_a_real_broker_say_why_they_are_thrown_out(tmp_path, caplog, version):
    """mosquitto 2.0.11, and each with 3.1.1, says nothing when it closes; `no broker` was all that boards said."""
    async with configured(tmp_path, "allow_anonymous true") as broker:
        where = Broker(port=broker.port, version=version)
        one, other = MqttTransport(where, "attic.pi-4"), MqttTransport(where, "attic.pi-4")
        async with one.running(), other.running():
            while UNIQUE_NAME not in caplog.text:  # noqa: ASYNC110 - what is waited for is a line of the log
                await asyncio.sleep(0.05)
    assert "`device`" in UNIQUE_NAME
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert names_all(told, "attic.pi-4", UNIQUE_NAME)
    losses = [
        record.args for record in caplog.records if record.name == mqtt.__name__ and record.levelname == "WARNING"
    ]
    assert losses
    assert all(isinstance(lasted_s, float) for _, lasted_s, _ in losses), "no attempt to connect failed"


@pytest.fixture
def black_hole() -> Iterator[socket.socket]:
    """Return a listener whose queue is full, so that nobody gets through to it, nor is told."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        filling = [socket.socket() for _ in range(4)]
        for one in filling:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        time.sleep(0.05)  # noqa: TID251 - the kernel fills its queue
        yield listener
        for one in filling:
            one.close()
    for thread in threading.enumerate():
        if thread.name == "dial":
            thread.join()  # its attempt is refused now


async def test_stops_at_once_where_nobody_answers(black_hole):
    """No TCP connection comes to be for seconds: leaving does not wait for it, nor does the loop's end."""
    async with MqttTransport(Broker(port=black_hole.getsockname()[1]), "device").running():
        await asyncio.sleep(0.2)
        assert any(thread.name == "dial" for thread in threading.enumerate())
    assert any(thread.name == "dial" for thread in threading.enumerate()), "leaving waited for the attempt"


async def test_what_is_reached_too_late_is_hung_up(black_hole):
    """The connection that comes to be after everybody has left is closed politely; its socket does not stay open."""
    async with MqttTransport(Broker(port=black_hole.getsockname()[1], version=3), "device").running():
        await asyncio.sleep(0.2)
    heard, nears = b"", list[socket.socket]()
    while not heard:
        ready, _, _ = select.select([black_hole, *nears], [], [], 60.0)  # those that fill the queue say nothing
        assert ready, "it does not come"
        if black_hole in ready:
            nears.append(black_hole.accept()[0])
            continue
        while data := ready[0].recv(1000):  # until it hangs up
            heard += data
    for near in nears:
        near.close()
    assert heard[:1] == b"\x10"
    assert heard[-2:] == b"\xe0\x00"

"""A flooding device at a real broker: bounded memory, others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from edge_server.fleet import admission, answers, broker, subscriptions
from edge_server.fleet.admission import MOST_BYTES
from edge_server.fleet.flood_control import FloodLimits
from edge_server.fleet.hub import Server
from shared.protocol import wire
from shared.protocol.messages import Report, Status, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.clock import monotonic
from shared.runtime.executor import inline
from shared.transfer import frames
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport
from tests.benchmarks.flooder import connected, packet
from tests.edge_server.harness import SITE

pytestmark = pytest.mark.broker

PATIENCE_S = 300.0
QUEUED = 200
WINDOW = 1 << 20
FRAME = frames.encode(Transfer(digest=bytes(16), size=1 << 18, frame_bytes=1 << 18), 0, [memoryview(bytes(1 << 18))])
OFFER = wire.encode(Update(run="stranger", round=1, device="flood", params=None))
LARGE_OFFER = wire.encode(Update(run="stranger", round=1, device="flood", params=None, failure="x" * 900_000))
LARGE_WANT = wire.encode(Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)] * 300_000))


@dataclass
class Flooded:
    """A server that listens, and a member and an honest device at its broker."""

    server: Server
    flood: MqttTransport
    honest: MqttTransport
    acks: Inbox
    port: int


@pytest.fixture(params=["mosquitto", "embedded"])
def kind(request) -> str:
    if request.param == "mosquitto" and not broker.find_mosquitto():
        pytest.skip("mosquitto is not installed")
    return request.param


@asynccontextmanager
async def flooded(folder, kind: str, clock=monotonic) -> AsyncIterator[Flooded]:
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        running = await stack.enter_async_context(broker.run_private_broker(folder, embedded=kind == "embedded"))
        place = Broker(port=running.port, version=3 if kind == "embedded" else 5)
        clients = [MqttTransport(place, name) for name in ("server", "flood", "honest")]
        for client in clients:
            await stack.enter_async_context(client.running())
            await client.connected.wait()
        server = Server(SITE, clients[0], clock, inline, limits=FloodLimits(WINDOW, clients[0].closed))
        server.rounds.runs.add("run")
        clients[0].admits = server.flood.admits
        await stack.enter_async_context(server.listening())
        acks = await stack.enter_async_context(clients[1].subscribe(topic(SITE, "flood", "ack")))
        yield Flooded(server, *clients[1:], acks, running.port)


async def pour(here: Flooded, channel: str, data: bytes, times: int) -> int:
    """Send the same again and again, and a last honest word; return the most bytes that waited until it was heard."""
    most = 0
    for number in range(times):
        await here.flood.publish(topic(SITE, "flood", channel), data, assured=False)
        if number % 16 == 0:
            await asyncio.sleep(0)
            most = max(most, here.server.flood.admission.queue.waiting_bytes)
    await here.honest.publish(topic(SITE, "honest", "report"), wire.encode(Report(device="honest", at=1.0)))
    while "honest" not in here.server.fleet.reports:
        most = max(most, here.server.flood.admission.queue.waiting_bytes)
        await asyncio.sleep(0.001)
    return most


@pytest.mark.parametrize(
    ("channel", "data", "times"),
    [("update", OFFER, 2500), ("update", LARGE_OFFER, 40), ("want", LARGE_WANT, 40)],
    ids=["small offers", "large offers", "large wants"],
)
async def test_a_flood_is_answered_rarely_and_little_of_it_is_kept(tmp_path, kind, channel, data, times, caplog):
    async with flooded(tmp_path, kind) as here:
        began = monotonic()
        most = await pour(here, channel, data, times)
        seconds = monotonic() - began
        assert most <= 2 * WINDOW + sum(MOST_BYTES.values())
        await asyncio.sleep(0.2)
        assert len(list(here.acks.drain())) <= answers.BURST + answers.PER_S * (seconds + 1)
        assert sum(here.server.flood.refused.values()) <= times
    warnings = [one for one in caplog.records if (one.name, one.levelname) == (admission.__name__, "WARNING")]
    assert 1 <= len(warnings) <= 3


async def test_a_flood_of_frames_that_nobody_asked_for_is_not_held(tmp_path, kind):
    """They pass by while they come, on both channels of frames; nothing of them waits."""
    async with flooded(tmp_path, kind) as here:
        for channel in ("update", "features"):
            assert await pour(here, channel, FRAME, 40) <= len(OFFER) + sum(MOST_BYTES.values())
        assert not here.server.flood.refused


async def until_answered(client: MqttTransport, device: str) -> None:
    """Be born, and offer an update of no run until the server answers."""
    birth = Status(device=device, session=1, instance="a", online=True)
    offer = wire.encode(Update(run="stranger", round=1, device=device, params=None))
    async with client.subscribe(topic(SITE, device, "ack")) as acks:
        await client.publish(topic(SITE, device, "status"), wire.encode(birth), retain=True)
        while not list(acks.drain()):
            await client.publish(topic(SITE, device, "update"), offer)
            await asyncio.sleep(0.1)


class Awaiting:
    """A round that awaits frames of every device, and finds none of what comes of use."""

    run, number = "run", 1
    expected = accepted = failed = starts = {}  # noqa: RUF012 - nobody writes them

    async def watch(self) -> None:
        """Nothing is asked for."""

    def awaits(self, _device: str) -> bool:
        return True

    async def frame(self, _device: str, _data: bytes) -> bool:
        return False

    def handle_disconnect(self, device: str) -> None:
        """It awaits him all the same."""


@pytest.mark.parametrize("is_awaited", [False, True], ids=["unasked", "of another update"])
async def test_the_broker_forwards_no_more_of_who_floods_with_frames(tmp_path, kind, monkeypatch, is_awaited):
    """Others are heard meanwhile, also who is born only then; the flooder is when his time is over."""
    monkeypatch.setattr(subscriptions, "LOOK_S", 0.1)
    passed_s = 0.0
    async with flooded(tmp_path, kind, lambda: passed_s) as here, AsyncExitStack() as stack:
        came, admits = [], here.server.flood.admits
        if is_awaited:
            await stack.enter_async_context(here.server.round(Awaiting(), {}, []))
        here.server.transport.admits = lambda name, size: came.append(size) or admits(name, size)
        await until_answered(here.honest, "honest")
        for _ in range(5):
            await pour(here, "update", FRAME, 60)
        await until_answered(here.honest, "honest")
        await until_answered(here.honest, "late")
        assert sum(came) < 150 * len(FRAME)
        passed_s = admission.CLOSED_S
        await until_answered(here.flood, "flood")


@pytest.mark.parametrize("number", [0, 1], ids=["unconfirmed", "confirmed"])
async def test_of_small_messages_as_fast_as_they_go_few_are_looked_at(tmp_path, kind, number, monkeypatch):
    """The broker is told to forward no more of them, and what it has forwarded by then is dropped unread.

    A busy machine takes as long as it takes to tell it: what counts is what is looked at from then on.
    """
    name = topic(SITE, "flood", "update").encode()
    offer = packet(0x30 | number << 1, len(name).to_bytes(2, "big") + name + b"\0\1" * number + OFFER)
    put, looked_at = admission.Admission.put, []
    monkeypatch.setattr(admission.Admission, "put", lambda one, came: looked_at.append(came[0]) or put(one, came))
    async with flooded(tmp_path, kind, lambda: 0.0) as here:  # a channel that is closed stays so
        loop = asyncio.get_running_loop()
        await until_answered(here.honest, "honest")
        with connected(here.port, "raw") as line:
            line.setblocking(False)
            while name not in here.server.flood.limits.closed_topics:
                await loop.sock_sendall(line, offer * 100)
                await asyncio.sleep(0.01)
            await until_answered(here.honest, "honest")
            by_then = looked_at.count(name.decode())
            for _ in range(40):
                await loop.sock_sendall(line, offer * 500)
                await asyncio.sleep(0)
            await until_answered(here.honest, "honest")
            await until_answered(here.honest, "late")
        assert looked_at.count(name.decode()) - by_then < 1000


async def test_retained_reports_beyond_all_measure_are_not_kept(tmp_path, kind):
    """They come at once when a server starts; the honest one among them is heard."""
    async with flooded(tmp_path, kind) as here:
        large = wire.encode(Report(device="flood", at=1.0, facts={f"{number}": "x" * 9000 for number in range(100)}))
        for number in range(30):
            await here.flood.publish(topic(SITE, f"flood-{number}", "report"), large, retain=True)
        await pour(here, "status", b"", 1)
        assert set(here.server.fleet.reports) == {"honest"}
        assert here.server.flood.admission.queue.waiting_bytes == 0


async def test_births_of_names_that_nobody_has_seen(tmp_path):
    """Two thousand of them are heard, each once, in the time of two thousand: no message costs more than the first."""
    folder = tmp_path
    async with flooded(folder, "embedded" if not broker.find_mosquitto() else "mosquitto") as here:
        for number in range(2000):
            name = f"device-{number}"
            birth = Status(device=name, session=1, instance="a", online=True, version="v" * 500)
            await here.flood.publish(topic(SITE, name, "status"), wire.encode(birth), assured=False)
            while len(here.server.fleet.statuses) < number - QUEUED:  # noqa: ASYNC110 - beyond it brokers drop
                await asyncio.sleep(0.001)
        await pour(here, "status", b"", 1)
        assert len(here.server.fleet.online) >= 1900
        assert max(len(one.version) for one in here.server.fleet.statuses.values()) < 500

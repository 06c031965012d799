"""Test a broker's capabilities: QoS 1, large messages, retained messages, wills."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.errors import Unreachable
from shared.runtime import backports
from shared.transport.base import Broker, Presence
from shared.transport.mqtt_connection import NO_ANSWER, Connection, Incoming
from shared.transport.packet_limit import LEAST_BYTES, MOST_PACKET_BYTES
from shared.transport.reach import PATIENCE_S, requires_mqtt_3
from shared.transport.tcp_info import Traffic

TOKEN_BYTES = 16
LEAST_TRIED = LEAST_BYTES >> 4
"""Smallest message size to try when larger ones fail."""
QOS, SIZE, RETAIN, WILL = "QoS 1", "message size", "retained messages", "will"
SETTINGS = {
    QOS: "allow QoS 1: `max_qos 2` (mosquitto)",
    SIZE: f"allow it: `max_packet_size {MOST_PACKET_BYTES}`, and no smaller `message_size_limit` (mosquitto), or the "
    "limits of packets, messages and bytes a second of another broker",
    RETAIN: "allow retained messages: `retain_available true` (mosquitto)",
    WILL: "allow wills, and that this account publishes to that topic",
}
"""Broker setting that enables each capability."""


class Lack(msgspec.Struct, frozen=True):
    """A capability that a broker lacks.

    Attributes:
        what: `QoS 1`, `message size`, `retained messages` or `will`.
        setting: Broker setting that corrects it.
    """

    what: str
    found: str
    setting: str


@dataclass
class _Trial:
    """A broker, and a private topic that this client may publish and subscribe to."""

    broker: Broker
    client_id: str
    topic: str
    patience_s: float
    dates: bool
    received: list[bytes] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    connection: Connection | None = None

    async def connect(self, will: bytes = b"") -> Connection:
        """Open a new connection; raise Unreachable."""
        presence = Presence(self.topic, b"", will) if will else None
        self.received.clear()
        self.connection = connection = Connection(
            self.broker, self.client_id, presence, Incoming(self._take, Traffic()), dates=self.dates
        )
        await connection.open(self.patience_s)
        return connection

    def _take(self, _topic: str, payload: bytes) -> None:
        self.received.append(payload)
        self.arrived.set()

    async def wait_for(self, payload: bytes) -> bool:
        """Wait for a payload; return whether it arrived."""
        loop, connection = asyncio.get_running_loop(), self.connection
        assert connection
        until = loop.time() + self.patience_s
        while payload not in self.received and loop.time() < until and not connection.lost.done():
            self.arrived.clear()
            coming = asyncio.ensure_future(self.arrived.wait())
            futures: set[asyncio.Future[Any]] = {coming, connection.lost}
            await asyncio.wait(futures, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            coming.cancel()
        return payload in self.received

    async def publish(self, payload: bytes, *, retain: bool = False) -> str:
        """Publish with QoS 1 on the open connection; return the error, or an empty string."""
        connection = self.connection
        assert connection
        try:
            async with backports.timeout(self.patience_s):
                answer = connection.send(self.topic, payload, qos=1, retain=retain)
                assert answer
                return (await connection.wait_answer(answer))[0]
        except TimeoutError:
            return f"{NO_ANSWER} within {self.patience_s:g} s"
        except (Unreachable, ValueError) as error:
            return connection.lost.result() if connection.lost.done() else str(error)

    async def subscribe(self) -> str:
        """Subscribe again on the open connection; return the error, or an empty string."""
        connection = self.connection
        assert connection
        try:
            async with backports.timeout(self.patience_s):
                await connection.wait_answer(connection.unsubscribe([self.topic]))
                return (await connection.wait_answer(connection.subscribe([self.topic])))[0]
        except TimeoutError:
            return f"{NO_ANSWER} within {self.patience_s:g} s"
        except Unreachable as error:
            return str(error)

    async def reconnect(self) -> None:
        """Reconnect and subscribe if the broker has hung up; raise Unreachable."""
        if self.connection is None or self.connection.lost.done():
            await self.connect()
            await self.subscribe()


async def find_lacks(
    broker: Broker,
    client_id: str,
    topic: str,
    size: int,
    *,
    patience_s: float = PATIENCE_S,
    dates: bool = True,
) -> list[Lack]:
    """Test the capabilities that fieldfleet needs; return the missing ones. No message stays retained.

    Args:
        client_id: A name that no other client uses.
        topic: A private topic that this client may publish and subscribe to.
        size: Size of the largest message in use, in bytes.
        patience_s: Timeout of each answer in seconds.
        dates: Whether to check certificate dates by this machine's clock.

    Raises:
        Unreachable: The broker no longer accepts this client.
    """
    once = msgspec.structs.replace(broker, session_expiry_s=0)
    if await requires_mqtt_3(once, client_id, topic, patience_s, dates=dates):
        once = msgspec.structs.replace(once, version=3)
    trial = _Trial(once, client_id, topic, patience_s, dates)
    try:
        if lack := await _find_small_lack(trial):
            return [lack]
        lacks = [await _try_size(trial, size), await _try_retain(trial), await _try_will(trial)]
        return [lack for lack in lacks if lack]
    finally:
        if trial.connection:
            trial.connection.close()


def _make_lack(what: str, finding: str) -> Lack:
    return Lack(what, finding, SETTINGS[what])


async def _find_small_lack(trial: _Trial) -> Lack | None:
    """Try a small message with QoS 1, the precondition of all other tests."""
    await trial.connect()
    refused = await trial.subscribe()
    token = os.urandom(TOKEN_BYTES)
    refused = refused or await trial.publish(token)
    if refused:
        return _make_lack(QOS, f"a message of QoS 1 to {trial.topic} is refused: {refused}")
    if not await trial.wait_for(token):
        return _make_lack(QOS, f"a message to {trial.topic} was acknowledged and not delivered")
    return None


async def _try_size(trial: _Trial, size: int) -> Lack | None:
    """Send a message of the size in use; if it does not arrive, find a size that does."""
    problem = await _try_payload(trial, size)
    if not problem:
        return None
    passing = size >> 1
    while passing >= LEAST_TRIED and await _try_payload(trial, passing):
        passing >>= 1
    most = f"messages of {passing >> 10} KiB pass" if passing >= LEAST_TRIED else "nor do smaller ones pass"
    return _make_lack(SIZE, f"a message of {size >> 10} KiB {problem}; {most}")


async def _try_payload(trial: _Trial, size: int) -> str:
    """Return why a message of a size does not arrive; empty where it does."""
    await trial.reconnect()
    payload = os.urandom(TOKEN_BYTES).ljust(size, b"\0")
    if refused := await trial.publish(payload):
        return f"is refused: {refused}"
    return "" if await trial.wait_for(payload) else "was acknowledged and not delivered"


async def _try_retain(trial: _Trial) -> Lack | None:
    await trial.reconnect()
    token = os.urandom(TOKEN_BYTES)
    if refused := await trial.publish(token, retain=True):
        return _make_lack(RETAIN, f"a retained message is refused: {refused}")
    await trial.wait_for(token)
    trial.received.clear()
    refused = await trial.subscribe()
    retained = not refused and await trial.wait_for(token)
    await trial.reconnect()
    await trial.publish(b"", retain=True)
    return None if retained else _make_lack(RETAIN, "a message was accepted and not retained")


async def _try_will(trial: _Trial) -> Lack | None:
    """Break a connection with a will, and check whether the broker has published it."""
    if trial.connection:
        trial.connection.close()
    token = os.urandom(TOKEN_BYTES)
    try:
        connection = await trial.connect(token)
    except Unreachable as error:
        return _make_lack(WILL, f"a connection with a will is refused: {error}")
    connection.break_off()
    await trial.connect()
    await trial.subscribe()
    published = await trial.wait_for(token)
    await trial.publish(b"", retain=True)
    return None if published else _make_lack(WILL, "a connection broke off, and its will was not published")

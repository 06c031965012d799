"""Connect to a running broker once, for its answers: the transport's client would hide them and reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import Unreachable
from shared.transport.base import Broker
from shared.transport.mqtt_connection import Connection, Incoming
from shared.transport.tcp_info import Traffic
from shared.transport.tls import TlsSettings

ANSWER_S = 15.0
"""A broker that is silent for so long counts as unreachable; a busy gateway's takes a second."""
T = TypeVar("T")


@dataclass(frozen=True)
class BrokerEndpoint:
    """Address of a broker's TLS listener, and the file of trusted certificates: the site's root and CA."""

    host: str
    port: int
    trusted: Path

    def tls(self, pair: Path | None) -> TlsSettings:
        """Return the settings of a client with a key and certificate in `pair`, without suffix; None for neither."""
        cert, key = (str(pair.with_suffix(suffix)) if pair else "" for suffix in (".crt", ".key"))
        return TlsSettings(ca=str(self.trusted), cert=cert, key=key)


@dataclass(frozen=True)
class ProbeConnection:
    """A connection that the broker accepted; its methods raise Unreachable once it is lost or silent."""

    connection: Connection
    topics: asyncio.Queue[str]

    async def publish(self, topic: str, payload: bytes = b"?") -> str:
        """Publish with QoS 1; return the broker's reason of refusal, empty if it accepted."""
        answer = self.connection.send(topic, payload, qos=1, retain=False)
        assert answer
        return (await _wait(self.connection.wait_answer(answer)))[0]

    async def subscribe(self, topic: str) -> str:
        """Subscribe; return the broker's reason of refusal, empty if it accepted."""
        return (await _wait(self.connection.wait_answer(self.connection.subscribe([topic]))))[0]

    async def receive_topic(self) -> str:
        """Return the topic of the next publication."""
        return await _wait(self.topics.get())


async def _wait(answer: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(answer, ANSWER_S)
    except TimeoutError:
        raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None


@asynccontextmanager
async def open_probe(
    endpoint: BrokerEndpoint, pair: Path | None, client_id: str = "probe"
) -> AsyncIterator[ProbeConnection]:
    """Connect during the block, with a name that a site's broker replaces by the common name. Raises Unreachable."""
    broker = Broker(host=endpoint.host, port=endpoint.port, session_expiry_s=0, tls=endpoint.tls(pair))
    topics = asyncio.Queue[str]()
    incoming = Incoming(lambda topic, _payload: topics.put_nowait(topic), Traffic())
    connection = Connection(broker, client_id, None, incoming)
    try:
        await connection.open(ANSWER_S)
        yield ProbeConnection(connection, topics)
    finally:
        connection.close()

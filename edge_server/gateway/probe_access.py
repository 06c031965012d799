"""Probe a running broker: which clients it admits and what they may do.

The few MQTT 5 packets are built by hand: the client of `shared.transport` reconnects, which would hide the answers.
MQTT 5.0, OASIS Standard, https://docs.oasis-open.org/mqtt/mqtt/v5.0/mqtt-v5.0.html
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from edge_server.gateway.broker_files import forbidden_topic, probe_topic
from edge_server.gateway.certificate_files import split_certificates
from shared.errors import Unreachable

ANSWER_S = 15.0
"""A broker that is silent for so long counts as unreachable; a busy gateway's takes a second."""
CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
QOS_1, NOT_AUTHORIZED, REFUSED = 0x02, 0x87, 0x80
CLEAN_START, KEEPALIVE_S = 0x02, 60
_LOW7, _MORE = 0x7F, 0x80


@dataclass(frozen=True)
class BrokerEndpoint:
    """Address and trusted certificates of a broker.

    Attributes:
        port: Port of a TLS listener.
        trusted: Certificates of the site's root and CA.
        alone: Send the client's certificate without its CA's, which a broker that knows the site CA does not need; no
            CA's may be in `trusted` then, for OpenSSL would send that too.
    """

    host: str
    port: int
    trusted: Path
    alone: bool = False

    def context(self, pair: Path | None) -> ssl.SSLContext:
        """Return the TLS context of a connection.

        Args:
            pair: Client's key and certificate in `gateway/`, without suffix; None for no certificate.
        """
        context = ssl.create_default_context(cafile=str(self.trusted))
        if pair and self.alone:
            with NamedTemporaryFile() as file:  # OpenSSL reads files alone; this one holds no secret
                file.write(split_certificates(pair.with_suffix(".crt").read_bytes())[0])
                file.flush()
                context.load_cert_chain(file.name, pair.with_suffix(".key"))
        elif pair:
            context.load_cert_chain(pair.with_suffix(".crt"), pair.with_suffix(".key"))
        return context


class ProbeConnection:
    """A connection that the broker accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._received: list[bytes] = []

    async def publish(self, topic: str, payload: bytes = b"?") -> int:
        """Publish with QoS 1; return the broker's reason code, 0x80 and above if refused.

        Raises:
            Unreachable: The connection was lost.
        """
        self._writer.write(_packet(PUBLISH | QOS_1, _text(topic.encode()) + b"\0\1" + b"\0" + payload))
        answer = await self._answer(PUBACK)
        return answer[2] if len(answer) > len(b"id") else 0

    async def subscribe(self, topic: str) -> int:
        """Subscribe; return the broker's reason code, 0x80 and above if refused.

        Raises:
            Unreachable: The connection was lost.
        """
        self._writer.write(_packet(SUBSCRIBE, b"\0\1" + b"\0" + _text(topic.encode()) + b"\0"))
        return (await self._answer(SUBACK))[-1]

    def forget(self) -> None:
        """Discard received publications that were not read."""
        self._received.clear()

    async def receive_topic(self) -> str:
        """Return the topic of the next publication, QoS 0.

        Raises:
            Unreachable: None arrived in time.
        """
        packet = self._received.pop(0) if self._received else await self._answer(PUBLISH)
        return packet[2 : 2 + int.from_bytes(packet[:2], "big")].decode()

    async def _answer(self, kind: int) -> bytes:
        """Return the body of the next packet of a kind; store publications that arrive before it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    received, body = await self._packet()
                    if received == kind:
                        return body
                    if received == PUBLISH:
                        self._received.append(body)
        except TimeoutError:
            raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
        except (OSError, EOFError) as error:
            raise Unreachable(_reason(error)) from error

    async def _packet(self) -> tuple[int, bytes]:
        [head] = await self._reader.readexactly(1)
        size = shift = 0
        while True:
            [part] = await self._reader.readexactly(1)
            size, shift = size | (part & _LOW7) << shift, shift + 7
            if not part & _MORE:
                return head & 0xF0, await self._reader.readexactly(size)


@asynccontextmanager
async def open_probe(
    endpoint: BrokerEndpoint, pair: Path | None, client_id: str = "probe"
) -> AsyncIterator[ProbeConnection]:
    """Open a connection for the duration of the block.

    Args:
        pair: Client's key and certificate, without suffix; None for no certificate.
        client_id: Brokers of a site replace it with the common name.

    Raises:
        Unreachable: The broker does not answer, or refuses this client.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.context(pair))
    except TimeoutError:
        raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(_reason(error)) from error
    try:
        connection = ProbeConnection(reader, writer)
        flags = bytes((5, CLEAN_START)) + KEEPALIVE_S.to_bytes(2, "big")
        writer.write(_packet(CONNECT, _text(b"MQTT") + flags + b"\0" + _text(client_id.encode())))
        code = (await connection._answer(CONNACK))[1]  # noqa: SLF001 - constructor of it
        if code >= REFUSED:
            raise Unreachable(f"refused with reason {code:#x}")
        yield connection
    finally:
        writer.transport.abort()


async def fetch_certificate(endpoint: BrokerEndpoint) -> bytes:
    """Return the broker's certificate, DER, after verification.

    Raises:
        Unreachable: The broker does not answer, or the site's root does not vouch for its certificate.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.context(None))
    except TimeoutError:
        raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(_reason(error)) from error
    certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return certificate


async def find_access_faults(
    endpoint: BrokerEndpoint, gateway: Path, site: str, generation: int, *, local: bool = False
) -> list[str]:
    """Return the broker's deviations from its access rules; empty if there are none.

    Args:
        gateway: Folder of the pairs `probe` and `revoked`.
        generation: Generation of the access list that must be active.
        local: Probe the loopback listener, with the pair `own-probe`.
    """
    problems = []
    try:
        async with open_probe(endpoint, gateway / ("own-probe" if local else "probe")) as probe:
            problems += await _find_acl_faults(probe, site, generation)
    except Unreachable as error:
        problems.append(f"it rejects a client with a valid certificate ({error})")
    return problems + await find_open_logins(endpoint, gateway, local=local)


class OpenFault(str):
    """A fault by which a broker admits a client or a message that it must reject."""

    __slots__ = ()


async def find_open_logins(endpoint: BrokerEndpoint, gateway: Path, *, local: bool = False) -> list[str]:
    """List the clients that a broker admits although it must not.

    Args:
        gateway: Folder of the pairs `revoked` and `probe`.
        local: Probe the loopback listener.
    """
    problems = list[str]()
    pairs = [(gateway / "revoked", "a revoked certificate"), (None, "no certificate")]
    if local:
        pairs.append((gateway / "probe", "a board's certificate, signed by the site CA"))
    for pair, client in pairs:
        with suppress(Unreachable):
            async with open_probe(endpoint, pair):
                problems.append(OpenFault(f"it admits a client with {client}"))
    return problems


async def _find_acl_faults(probe: ProbeConnection, site: str, generation: int) -> list[str]:
    """Return deviations from the access list, by publishing: mosquitto accepts any subscription, but filters."""
    allowed, forbidden = probe_topic(site, generation), forbidden_topic(site)
    problems = []
    if await probe.subscribe(allowed) >= REFUSED or await probe.publish(allowed) >= REFUSED:
        problems.append("it refuses a message that the access list allows")
    elif await probe.receive_topic() != allowed:
        problems.append(OpenFault("it delivers a message that was not requested"))
    if await probe.publish(forbidden) != NOT_AUTHORIZED:
        problems.append(OpenFault("it accepts a message that the access list forbids"))
    return problems


def _packet(kind: int, body: bytes) -> bytes:
    size, length = len(body), b""
    while True:
        part, size = size & _LOW7, size >> 7
        length += bytes((part | (_MORE if size else 0),))
        if not size:
            return bytes((kind,)) + length + body


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _reason(error: BaseException) -> str:
    return getattr(error, "reason", None) or str(error) or "it hung up"

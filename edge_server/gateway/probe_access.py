"""Ask a running broker whom it lets in and what they may do: what must pass has to, what must not, not.

A few packets of MQTT 5, by hand: the client of `shared.transport` goes on trying and hides what is asked about here.
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
"""A broker that is silent for so long is none; a busy gateway's takes a second."""
CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x82, 0x90
QOS_1, NOT_AUTHORIZED, REFUSED = 0x02, 0x87, 0x80
CLEAN_START, KEEPALIVE_S = 0x02, 60
_LOW7, _MORE = 0x7F, 0x80


@dataclass(frozen=True)
class Door:
    """Where a broker is, and whom to trust there.

    Attributes:
        port: Of its TLS listener.
        trusted: Certificates of the site's root and CA.
        alone: Whether a certificate is shown without its CA's, which a broker that knows the site CA has itself; no
            CA's may be in `trusted` then, for OpenSSL would send that along.
    """

    host: str
    port: int
    trusted: Path
    alone: bool = False

    def context(self, pair: Path | None) -> ssl.SSLContext:
        """Return what a connection is made with: a pair of `gateway/`, named without its ending, or none."""
        made = ssl.create_default_context(cafile=str(self.trusted))
        if pair and self.alone:
            with NamedTemporaryFile() as file:  # OpenSSL reads files alone; this one holds no secret
                file.write(split_certificates(pair.with_suffix(".crt").read_bytes())[0])
                file.flush()
                made.load_cert_chain(file.name, pair.with_suffix(".key"))
        elif pair:
            made.load_cert_chain(pair.with_suffix(".crt"), pair.with_suffix(".key"))
        return made


class Caller:
    """A connection that the broker accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._heard: list[bytes] = []

    async def publish(self, topic: str, payload: bytes = b"?") -> int:
        """Publish with QoS 1; return the broker's reason code, 0x80 and above for a refusal.

        Raises:
            Unreachable: The connection is gone.
        """
        self._writer.write(_packet(PUBLISH | QOS_1, _text(topic.encode()) + b"\0\1" + b"\0" + payload))
        answer = await self._answer(PUBACK)
        return answer[2] if len(answer) > len(b"id") else 0

    async def subscribe(self, topic: str) -> int:
        """Subscribe; return the broker's reason code, 0x80 and above for a refusal.

        Raises:
            Unreachable: The connection is gone.
        """
        self._writer.write(_packet(SUBSCRIBE, b"\0\1" + b"\0" + _text(topic.encode()) + b"\0"))
        return (await self._answer(SUBACK))[-1]

    def forget(self) -> None:
        """Forget the publications that came and were not asked for yet."""
        self._heard.clear()

    async def heard(self) -> str:
        """Return the topic of the next publication, QoS 0.

        Raises:
            Unreachable: None came.
        """
        packet = self._heard.pop(0) if self._heard else await self._answer(PUBLISH)
        return packet[2 : 2 + int.from_bytes(packet[:2], "big")].decode()

    async def _answer(self, kind: int) -> bytes:
        """Return the body of the next packet of a kind; publications that come before it are kept."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    found, body = await self._packet()
                    if found == kind:
                        return body
                    if found == PUBLISH:
                        self._heard.append(body)
        except TimeoutError:
            raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
        except (OSError, EOFError) as error:
            raise Unreachable(_why(error)) from error

    async def _packet(self) -> tuple[int, bytes]:
        [head] = await self._reader.readexactly(1)
        size = shift = 0
        while True:
            [part] = await self._reader.readexactly(1)
            size, shift = size | (part & _LOW7) << shift, shift + 7
            if not part & _MORE:
                return head & 0xF0, await self._reader.readexactly(size)


@asynccontextmanager
async def call(door: Door, pair: Path | None, client_id: str = "probe") -> AsyncIterator[Caller]:
    """Connect while the block lasts.

    Args:
        pair: By which certificate, without its ending; None for none.
        client_id: Brokers of a site put the common name in its place.

    Raises:
        Unreachable: The broker is not there, or does not let this one in.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(door.host, door.port, ssl=door.context(pair))
    except TimeoutError:
        raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(_why(error)) from error
    try:
        caller = Caller(reader, writer)
        flags = bytes((5, CLEAN_START)) + KEEPALIVE_S.to_bytes(2, "big")
        writer.write(_packet(CONNECT, _text(b"MQTT") + flags + b"\0" + _text(client_id.encode())))
        code = (await caller._answer(CONNACK))[1]  # noqa: SLF001 - its own maker
        if code >= REFUSED:
            raise Unreachable(f"refused with reason {code:#x}")
        yield caller
    finally:
        writer.transport.abort()


async def shown_certificate(door: Door) -> bytes:
    """Return the certificate that a broker shows, DER, once it was checked.

    Raises:
        Unreachable: There is none that the site's root vouches for.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(door.host, door.port, ssl=door.context(None))
    except TimeoutError:
        raise Unreachable(f"no answer within {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise Unreachable(_why(error)) from error
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return shown


async def faults(door: Door, gateway: Path, site: str, generation: int, *, own: bool = False) -> list[str]:
    """Return what a broker does that it must not, or does not that it must; nothing where all is well.

    Args:
        gateway: Folder of the pairs `probe` and `revoked`.
        generation: Of the access list that it must have.
        own: Whether this is the listener for the server's own processes, with the pair `own-probe`.
    """
    found = []
    try:
        async with call(door, gateway / ("own-probe" if own else "probe")) as probe:
            found += await _faults_of_access(probe, site, generation)
    except Unreachable as error:
        found.append(f"it does not let in who has a good certificate ({error})")
    return found + await strangers(door, gateway, own=own)


class OpenFault(str):
    """A fault by which a broker lets in or lets pass what it must not."""

    __slots__ = ()


async def strangers(door: Door, gateway: Path, *, own: bool = False) -> list[str]:
    """List the clients that a broker lets in although it must not.

    Args:
        door: Address of the broker.
        gateway: Folder of the pairs `revoked` and `probe`.
        own: Whether this is the listener for the server's own processes.
    """
    found = list[str]()
    pairs = [(gateway / "revoked", "a revoked certificate"), (None, "no certificate")]
    if own:
        pairs.append((gateway / "probe", "a certificate of the site CA, as boards have"))
    for pair, who in pairs:
        with suppress(Unreachable):
            async with call(door, pair):
                found.append(OpenFault(f"it lets in who has {who}"))
    return found


async def _faults_of_access(probe: Caller, site: str, generation: int) -> list[str]:
    """Publishing tells: mosquitto lets anybody subscribe to anything, and delivers by the access list."""
    allowed, forbidden = probe_topic(site, generation), forbidden_topic(site)
    found = []
    if await probe.subscribe(allowed) >= REFUSED or await probe.publish(allowed) >= REFUSED:
        found.append("it refuses what the access list allows")
    elif await probe.heard() != allowed:
        found.append(OpenFault("it delivers what was not asked for"))
    if await probe.publish(forbidden) != NOT_AUTHORIZED:
        found.append(OpenFault("it takes what the access list forbids"))
    return found


def _packet(kind: int, body: bytes) -> bytes:
    size, length = len(body), b""
    while True:
        part, size = size & _LOW7, size >> 7
        length += bytes((part | (_MORE if size else 0),))
        if not size:
            return bytes((kind,)) + length + body


def _text(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _why(error: BaseException) -> str:
    return getattr(error, "reason", None) or str(error) or "it hung up"

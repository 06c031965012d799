"""Transport interface: publish and subscribe by topic; all networking goes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from shared.transport.tls import TlsSettings, resolve_tls_paths

Delivery: TypeAlias = tuple[str, bytes]
"""Topic and payload."""

UInt16: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]
"""Nonzero 16-bit value of MQTT and TCP."""

ENTRY_BYTES = 1 << 10
"""Approximate memory of a delivery besides its payload."""


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MQTT broker and how to log in to it.

    Attributes:
        host: Host name or address.
        port: Usually 1883, and 8883 with TLS.
        version: 5, or 3 for MQTT 3.1.1; 5 falls back to 3 if the broker does not support it.
        keepalive_s: Longest time without a message after which the broker closes the connection.
        session_expiry_s: How long the broker keeps our session and its messages while we are not connected.
        user: User name, if the broker asks for one.
        password_file: File with the password on one line.
        tls: Certificates; absent for a connection without TLS.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: UInt16 = 1883
    version: Literal[3, 5] = 5
    keepalive_s: UInt16 = 60
    session_expiry_s: Annotated[int, Meta(ge=0, lt=1 << 32)] = 86_400
    user: str = ""
    password_file: str = ""
    tls: TlsSettings | None = None

    def __post_init__(self) -> None:
        """Refuse a password without a user."""
        if self.password_file and not self.user:
            raise ValueError("password_file is set without user: add the user name")

    @property
    def has_account(self) -> bool:
        """True if the broker can identify us, and may take a second connection with our id for the end of the first."""
        return bool(self.user or (self.tls and self.tls.cert))


def resolve_broker_paths(broker: Broker, folder: Path) -> Broker:
    """Resolve a broker's relative paths against the folder of its configuration file."""
    password_file = str(folder / broker.password_file) if broker.password_file else ""
    tls = resolve_tls_paths(broker.tls, folder) if broker.tls else None
    return msgspec.structs.replace(broker, password_file=password_file, tls=tls)


@dataclass(frozen=True)
class Login:
    """User name and password for a broker."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Presence:
    """Retained messages of a session: birth when it begins, will when it dies."""

    topic: str
    birth: bytes
    will: bytes


class Inbox:
    """Deliveries of one subscription, in order. Waiting for the next one may be cancelled without loss.

    Args:
        most_bytes: Limit of the queue; further deliveries are dropped. None for no limit.
    """

    def __init__(self, *, most_bytes: int | None = None) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self._most_bytes, self._bytes = most_bytes, 0
        self.put: Callable[[Delivery], None] = self._put

    def _put(self, delivery: Delivery) -> None:
        size = len(delivery[1]) + ENTRY_BYTES
        if self._most_bytes is None or self._bytes + size <= self._most_bytes:
            self._bytes += size
            self._queue.put_nowait(delivery)

    def _release(self, delivery: Delivery) -> Delivery:
        self._bytes -= len(delivery[1]) + ENTRY_BYTES
        return delivery

    def divert(self, take: Callable[[Delivery], None]) -> None:
        """Pass queued and all future deliveries to a function at once."""
        for delivery in self.drain():
            take(delivery)
        self.put = take

    def drain(self) -> Iterator[Delivery]:
        """Yield queued deliveries without waiting."""
        while not self._queue.empty():
            yield self._release(self._queue.get_nowait())

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery; iteration never ends."""
        return self._release(await self._queue.get())


class Transport(Protocol):
    """Delivery of opaque payloads by topic."""

    @property
    def max_payload_bytes(self) -> int:
        """Current limit of one publication; may change with every connection and refusal."""
        ...

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        """Publish one payload.

        Args:
            payload: An empty retained payload removes the retained message.
            retain: Whether later subscribers get it too.
            assured: At least once if true; if false it may be lost, for frames that receivers request again.

        Raises:
            TooLarge: More than `max_payload_bytes`; nothing was sent, the connection stays open.
            Unreachable: Not accepted; the caller keeps it and tries again later.
        """
        ...

    def subscribe(self, *patterns: str) -> AbstractAsyncContextManager[Inbox]:
        """Subscribe while the block lasts; iterate over deliveries in order.

        The subscription is renewed after a reconnect. Where patterns of one client overlap, a delivery may come once
        for each.
        """
        ...

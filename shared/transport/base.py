"""Transport interface: publish and subscribe by topic; the one seam to any network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from shared.transport.tls import Tls, placed_tls

Delivery: TypeAlias = tuple[str, bytes]
"""Topic and payload."""

UInt16: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]
"""What MQTT and TCP write in 16 bits, and is not zero."""

ENTRY_BYTES = 1 << 10
"""What a delivery takes in memory besides its payload, roughly."""


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MQTT broker and how to log in to it.

    Attributes:
        host: Its name or address.
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
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Refuse a password of nobody."""
        if self.password_file and not self.user:
            raise ValueError("password_file stands without user: add who it is the password of")

    @property
    def has_account(self) -> bool:
        """Whether the broker knows us by name, and may take a second connection of ours for the first one's end."""
        return bool(self.user or (self.tls and self.tls.cert))


def placed_broker(broker: Broker, folder: Path) -> Broker:
    """Return a broker with the paths in it taken from the folder of the file that it stands in."""
    password_file = str(folder / broker.password_file) if broker.password_file else ""
    tls = placed_tls(broker.tls, folder) if broker.tls else None
    return msgspec.structs.replace(broker, password_file=password_file, tls=tls)


@dataclass(frozen=True)
class Login:
    """By what a broker that wants to know it knows a client."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True)
class Presence:
    """What a session says of itself, retained, when it begins and when it dies."""

    topic: str
    birth: bytes
    will: bytes


class Inbox:
    """What arrived for one subscription, in order. Waiting for the next delivery may be cancelled without loss.

    Args:
        most_bytes: What may wait here; more is dropped. None for no bound.
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

    def _took(self, delivery: Delivery) -> Delivery:
        self._bytes -= len(delivery[1]) + ENTRY_BYTES
        return delivery

    def divert(self, take: Callable[[Delivery], None]) -> None:
        """Hand what is here, and whatever comes from now on, to a function at once."""
        for delivery in self.taken():
            take(delivery)
        self.put = take

    def taken(self) -> Iterator[Delivery]:
        """Take what is here, without waiting for more."""
        while not self._queue.empty():
            yield self._took(self._queue.get_nowait())

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery; it never ends."""
        return self._took(await self._queue.get())


class Transport(Protocol):
    """Delivery of opaque payloads by topic."""

    @property
    def max_payload_bytes(self) -> int:
        """What one publication may carry now; it may change with every connection and every refusal."""
        ...

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        """Hand over one payload.

        Args:
            payload: What; an empty retained payload removes what was retained.
            retain: Whether later subscribers get it too.
            assured: At least once if true; if false it may be lost, for frames whose loss the receiver repairs.

        Raises:
            TooLarge: More than `max_payload_bytes`; nothing was sent, the connection stands.
            Unreachable: Not accepted; the caller keeps it and tries again later.
        """
        ...

    def subscribe(self, *patterns: str) -> AbstractAsyncContextManager[Inbox]:
        """Open a subscription; iterate deliveries in order until the block is left.

        It outlives the connection: after a reconnect it is renewed. Where the patterns of one client overlap, a
        delivery may come once for each.
        """
        ...

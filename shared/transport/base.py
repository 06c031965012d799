"""The one seam between this project and any network."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import msgspec

Delivery: TypeAlias = tuple[str, bytes]
"""Topic and payload."""


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the broker is. `version` is 5 or 3 (MQTT 3.1.1); 5 falls back to 3 where the broker knows no better."""

    host: str = "127.0.0.1"
    port: int = 1883
    version: Literal[3, 5] = 5
    keepalive_s: int = 60
    session_expiry_s: int = 86_400

    def __post_init__(self) -> None:
        """Refuse what MQTT has no room for."""
        if not self.host or not 1 <= self.port <= 0xFFFF:
            raise ValueError("host must not be empty, port must be 1 to 65535")
        if not 1 <= self.keepalive_s <= 0xFFFF or not 0 <= self.session_expiry_s <= 0xFFFF_FFFF:
            raise ValueError("keepalive_s must be 1 to 65535, session_expiry_s 0 to 4294967295")


@dataclass(frozen=True)
class Presence:
    """What a session says of itself, retained, when it begins and when it dies."""

    topic: str
    birth: bytes
    will: bytes


class Inbox:
    """What arrived for one subscription, in order. Waiting for the next delivery may be cancelled without loss."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()
        self.put = self._queue.put_nowait

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery; it never ends."""
        return await self._queue.get()


class Transport(Protocol):
    """Delivery of opaque payloads by topic."""

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        """Hand over one payload.

        Args:
            topic: Where to.
            payload: What; an empty retained payload removes what was retained.
            retain: Whether later subscribers get it too.
            assured: At least once if true; at most once if false, for frames whose loss the receiver repairs.

        Raises:
            Unreachable: Not accepted; the caller keeps it and tries again later.
        """
        ...

    def subscribe(self, *patterns: str) -> AbstractAsyncContextManager[Inbox]:
        """Open a subscription; iterate deliveries in order until the block is left.

        It outlives the connection: after a reconnect it is renewed.
        """
        ...

"""A broker in a dict: the transport of replay, and the twin of MQTT in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.topics import matches
from shared.transport.base import Inbox
from shared.transport.limit import MOST_BYTES


class MemoryTransport:
    """Topic semantics of MQTT (wildcards, retained messages), no network; one instance is shared by all sides."""

    max_payload_bytes = MOST_BYTES

    def __init__(self) -> None:
        self._inboxes: list[tuple[tuple[str, ...], Inbox]] = []
        self._retained: dict[str, bytes] = {}

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        del assured  # nothing is ever lost here
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        for patterns, inbox in self._inboxes:
            if any(matches(pattern, topic) for pattern in patterns):
                inbox.put((topic, payload))

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        inbox = Inbox()
        for topic, payload in self._retained.items():
            if any(matches(pattern, topic) for pattern in patterns):
                inbox.put((topic, payload))
        entry = (patterns, inbox)
        self._inboxes.append(entry)
        try:
            yield inbox
        finally:
            self._inboxes.remove(entry)

"""In-memory broker with MQTT semantics, for replay and tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from shared.protocol.topics import ALL_BELOW, ANY, matches, parse_channel
from shared.transport.base import Inbox
from shared.transport.packet_limit import MOST_BYTES


class MemoryTransport:
    """Topic semantics of MQTT (wildcards, retained messages) without a network; one instance is shared by all clients.

    The cost of publishing grows with the subscribers of that topic, not with the fleet.
    """

    max_payload_bytes = MOST_BYTES

    def __init__(self) -> None:
        self._exact: defaultdict[str, list[Inbox]] = defaultdict(list)
        self._filters: defaultdict[str, list[tuple[str, Inbox]]] = defaultdict(list)
        self._retained: dict[str, bytes] = {}
        self._away: dict[str, Inbox] = {}

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        del assured  # nothing is ever lost
        if retain and payload:
            self._retained[topic] = payload
        elif retain:
            self._retained.pop(topic, None)
        for inbox in self.listening(topic):
            inbox.put((topic, payload))

    def listening(self, topic: str) -> list[Inbox]:
        """Return the inboxes that a topic is delivered to, each once."""
        inboxes = [*self._exact.get(topic, ())]
        for last in (parse_channel(topic), ANY, ALL_BELOW):
            inboxes += [inbox for pattern, inbox in self._filters.get(last, ()) if matches(pattern, topic)]
        return list(dict.fromkeys(inboxes))

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        inbox = Inbox()
        for topic in dict.fromkeys(name for pattern in patterns for name in self._retained_topics(pattern)):
            inbox.put((topic, self._retained[topic]))
        for pattern in patterns:
            self._hand_over(pattern, inbox)
        for pattern in patterns:
            if _is_filter(pattern):
                self._filters[parse_channel(pattern)].append((pattern, inbox))
            else:
                self._exact[pattern].append(inbox)
        try:
            yield inbox
        finally:
            for pattern in patterns:
                if _is_filter(pattern):
                    self._filters[parse_channel(pattern)].remove((pattern, inbox))
                else:
                    self._forget(pattern, inbox)

    def keep(self, topic: str) -> None:
        """Queue a topic's messages for its next subscriber, like a broker for an offline session."""
        if topic not in self._away:
            self._away[topic] = Inbox()
            self._exact[topic].append(self._away[topic])

    def _hand_over(self, topic: str, inbox: Inbox) -> None:
        if stored := self._away.pop(topic, None):
            self._forget(topic, stored)
            for delivery in stored.drain():
                inbox.put(delivery)

    def _retained_topics(self, pattern: str) -> Iterator[str]:
        """Return the topics of retained messages that match a pattern."""
        if _is_filter(pattern):
            return (topic for topic in self._retained if matches(pattern, topic))
        return iter([pattern] if pattern in self._retained else [])

    def _forget(self, pattern: str, inbox: Inbox) -> None:
        if inbox in (listening := self._exact.get(pattern, [])):
            listening.remove(inbox)
            if not listening:
                del self._exact[pattern]


def _is_filter(pattern: str) -> bool:
    return ANY in pattern or ALL_BELOW in pattern

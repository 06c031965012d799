"""Inboxes of an MQTT client by topic pattern."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.protocol.topics import matches
from shared.transport.base import Inbox

MOST_TOPICS = 1024
MOST_WAITING_BYTES = 256 << 20
"""Queue limit of one subscription; further messages are dropped, as a broker drops what it cannot deliver."""


@dataclass
class Inboxes:
    """Open subscriptions of this process.

    Attributes:
        ended: Topics that are left, or that an earlier process subscribed to, until the broker has confirmed it.
    """

    ended: set[str] = field(default_factory=set)
    _inboxes: list[tuple[tuple[str, ...], Inbox]] = field(default_factory=list)
    _by_topic: dict[str, list[Inbox]] = field(default_factory=dict)

    @property
    def patterns(self) -> set[str]:
        """Patterns of all inboxes."""
        return {pattern for patterns, _ in self._inboxes for pattern in patterns}

    def open(self, patterns: tuple[str, ...]) -> Inbox:
        """Return a new inbox for messages on topics of these patterns."""
        inbox = Inbox(most_bytes=MOST_WAITING_BYTES)
        self._inboxes.append((patterns, inbox))
        self._by_topic.clear()
        return inbox

    def close(self, closed: Inbox) -> None:
        """Remove an inbox."""
        self._inboxes = [(patterns, inbox) for patterns, inbox in self._inboxes if inbox is not closed]
        self._by_topic.clear()

    def find(self, topic: str) -> list[Inbox]:
        """Return the inboxes of a topic; cached, since topics recur."""
        if (inboxes := self._by_topic.get(topic)) is None:
            if len(self._by_topic) >= MOST_TOPICS:
                self._by_topic.clear()
            hears = (inbox for patterns, inbox in self._inboxes if any(matches(pattern, topic) for pattern in patterns))
            self._by_topic[topic] = inboxes = list(hears)
        return inboxes

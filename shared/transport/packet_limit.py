"""Largest payload that a broker takes: what it announces, or what is learnt from how it refuses.

MQTT 5 brokers announce their largest packet in CONNACK. Others say nothing and close the connection when a packet is
too large, just as a link does that breaks: one such end proves nothing, two in a row are taken for a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.transfer.frames import MAX_FRAME_BYTES

ROOM_BYTES = 256
"""What a packet needs besides its payload: MQTT's header and the topic."""
MOST_BYTES = (1 << 28) - 1 - ROOM_BYTES
"""MQTT writes a packet's length in 28 bits."""
MOST_RECEIVED_BYTES = MAX_FRAME_BYTES + (1 << 16)
"""The longest packet that is taken: the largest frame, its header, and MQTT's."""
MOST_PACKET_BYTES = 8 << 20
"""The longest packet that a site's broker should accept (mosquitto's `max_packet_size`): twice the largest frame."""
LEAST_BYTES = (1 << 14) + ROOM_BYTES
"""No guess goes below this; a broker that takes less must say so."""


@dataclass(frozen=True)
class Limit:
    """What is known of the broker.

    Attributes:
        announced: Largest payload by its own word; None if it said nothing.
        learnt: Largest payload that it has not yet refused.
        suspect: Size of the payload that the last connection may have ended of; 0 for none.
    """

    announced: int | None = None
    learnt: int = MOST_BYTES
    suspect: int = 0

    @property
    def payload_bytes(self) -> int:
        """Return the largest payload that may be sent now."""
        return self.learnt if self.announced is None else self.announced


def apply_connack(limit: Limit, packet_bytes: int | None) -> Limit:
    """Return the limit on a new connection, whose CONNACK named the largest packet, or none."""
    announced = None if packet_bytes is None else min(MOST_BYTES, max(0, packet_bytes - ROOM_BYTES))
    return replace(limit, announced=announced)


def apply_delivery(limit: Limit, size: int) -> Limit:
    """Return the limit after a payload of `size` has been acknowledged: it cannot have been the cause of an end."""
    return replace(limit, suspect=0) if size >= limit.suspect else limit


def apply_refusal(limit: Limit, size: int) -> Limit:
    """Return the limit after the broker has called a payload of `size` too large."""
    return replace(limit, learnt=min(limit.learnt, max(LEAST_BYTES, size // 2)), suspect=0)


def apply_connection_end(limit: Limit, size: int) -> Limit:
    """Return the limit after the broker has closed a connection before a payload of `size` was acknowledged.

    Nothing is held against a payload that the broker allows by its own word, or that is too small for a guess.
    """
    if limit.announced is not None or size <= LEAST_BYTES:
        return limit
    return apply_refusal(limit, size) if limit.suspect else replace(limit, suspect=size)


@dataclass
class Carried:
    """The payloads of one connection, of which each larger than any before is watched until it has arrived.

    Attributes:
        acknowledged: Size of the largest that has arrived for certain; 0 for none.
    """

    acknowledged: int = 0
    _largest: int = LEAST_BYTES
    _doubtful: dict[int, int] = field(default_factory=dict)

    @property
    def doubtful(self) -> int:
        """Return the size of the largest of which the broker has not said that it has it; 0 for none."""
        return max(self._doubtful.values(), default=0)

    def is_larger(self, size: int) -> bool:
        """Tell whether a payload is to be watched."""
        return size > self._largest

    def sent(self, number: int, size: int) -> None:
        """Watch the message of that number."""
        self._largest = self._doubtful[number] = size

    def arrived(self, number: int) -> None:
        """Note the broker's answer to a message, watched or not."""
        self.acknowledged = max(self.acknowledged, self._doubtful.pop(number, 0))

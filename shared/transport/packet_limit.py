"""Largest payload that a broker accepts: announced, or inferred from its refusals.

MQTT 5 brokers announce their largest packet in CONNACK. Others just close the connection when a packet is too large,
as a broken link does: one such end proves nothing, two in a row count as a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shared.transfer.frames import MAX_FRAME_BYTES

ROOM_BYTES = 256
"""Size of a packet besides its payload: MQTT's header and the topic."""
MOST_BYTES = (1 << 28) - 1 - ROOM_BYTES
"""MQTT writes a packet's length in 28 bits."""
MOST_RECEIVED_BYTES = MAX_FRAME_BYTES + (1 << 16)
"""The longest accepted packet: the largest frame, its header, and MQTT's."""
MOST_PACKET_BYTES = 8 << 20
"""The longest packet that a site's broker should accept (mosquitto's `max_packet_size`): twice the largest frame."""
LEAST_BYTES = (1 << 14) + ROOM_BYTES
"""Lower limit of the inferred size; a broker that accepts less must announce it."""


@dataclass(frozen=True)
class Limit:
    """Known limits of a broker.

    Attributes:
        announced: Largest payload that it announced; None for none.
        learnt: Largest payload that it has not refused so far.
        suspect: Size of the payload that may have ended the last connection; 0 for none.
    """

    announced: int | None = None
    learnt: int = MOST_BYTES
    suspect: int = 0

    @property
    def payload_bytes(self) -> int:
        """Largest payload that may be sent now."""
        return self.learnt if self.announced is None else self.announced


def apply_connack(limit: Limit, packet_bytes: int | None) -> Limit:
    """Return the limit on a new connection, whose CONNACK announced the largest packet, or none."""
    announced = None if packet_bytes is None else min(MOST_BYTES, max(0, packet_bytes - ROOM_BYTES))
    return replace(limit, announced=announced)


def apply_delivery(limit: Limit, size: int) -> Limit:
    """Return the limit after a payload of `size` was acknowledged: it cannot be what ended a connection."""
    return replace(limit, suspect=0) if size >= limit.suspect else limit


def apply_refusal(limit: Limit, size: int) -> Limit:
    """Return the limit after the broker has refused a payload of `size` as too large."""
    return replace(limit, learnt=min(limit.learnt, max(LEAST_BYTES, size // 2)), suspect=0)


def apply_connection_end(limit: Limit, size: int) -> Limit:
    """Return the limit after the broker has closed a connection before a payload of `size` was acknowledged.

    A payload within the announced limit, or too small for inference, is not suspected.
    """
    if limit.announced is not None or size <= LEAST_BYTES:
        return limit
    return apply_refusal(limit, size) if limit.suspect else replace(limit, suspect=size)


@dataclass
class PayloadWatch:
    """Payloads of one connection; each that is larger than all before is watched until it is acknowledged.

    Attributes:
        acknowledged: Size of the largest acknowledged payload; 0 for none.
    """

    acknowledged: int = 0
    _largest: int = LEAST_BYTES
    _doubtful: dict[int, int] = field(default_factory=dict)

    @property
    def doubtful(self) -> int:
        """Size of the largest unacknowledged payload; 0 for none."""
        return max(self._doubtful.values(), default=0)

    def is_larger(self, size: int) -> bool:
        """Check whether a payload is to be watched."""
        return size > self._largest

    def sent(self, number: int, size: int) -> None:
        """Watch the message with this number."""
        self._largest = self._doubtful[number] = size

    def note_answer(self, number: int) -> None:
        """Note the broker's answer to a message, watched or not."""
        self.acknowledged = max(self.acknowledged, self._doubtful.pop(number, 0))

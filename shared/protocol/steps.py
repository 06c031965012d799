"""The messages of a split session, whose every step goes through the server; they carry no tensors either."""

from __future__ import annotations

import msgspec

from shared.protocol.messages import BLOCK_BYTES, Message, Transfer


class Room(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a receiver takes unasked of the next payload: so many blocks, in frames of so many bytes at most."""

    blocks: int = 0
    frame_bytes: int = BLOCK_BYTES


class OfSession(Message, frozen=True, kw_only=True):
    """What every message of a session says first.

    Attributes:
        start: Digest of the parameters that the session began with: it tells a round that is repeated from itself.
        step: Of the session, from 1.
    """

    run: str
    round: int
    device: str
    start: bytes
    step: int


class Features(OfSession, frozen=True, kw_only=True):
    """Device -> server: one step's activations at the cut, with labels, offered.

    Attributes:
        params: The payload.
        pushed: Blocks of it that come right behind this, unasked; the rest is asked for.
        room: What may come unasked the other way, of the gradient.
    """

    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Gradient(OfSession, frozen=True, kw_only=True):
    """Server -> device: the answer to one step's features, offered; fields as there.

    Attributes:
        answers: Digest of those features: a session begun anew has others at the same step.
        room: What may come unasked of the next step's features.
    """

    answers: bytes
    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Skip(OfSession, frozen=True, kw_only=True):
    """Server -> device: that step went on without you, or is over; the next one that is open to you is `step`.

    Beyond the last step it says that the session is over, before the device's own that the server has lost it and
    the device is to begin it anew.

    Attributes:
        offered: The step of the features that it answers, or would have: an older one's is of no concern any more.
    """

    offered: int


class Missed(msgspec.Struct, frozen=True):
    """Given to a split device half in place of a gradient: its step, and so many in all, went on without it."""

    steps: int

"""Messages of collaborative inference: features at a release's cut go up, what they come to at the server comes down.

They say nothing of labels, and hold no example: what leaves a device is what its half of the network puts out.
"""

from __future__ import annotations

import math

import msgspec

from shared.errors import WireError
from shared.protocol.messages import Message, Room, Transfer
from shared.protocol.topics import is_name

FROM_DEVICE, TO_DEVICE = "infer", "inferred"
"""The channels."""
MAX_DEADLINE_S = 60.0
MAX_OUTPUT_BYTES = 256 << 10
"""Of the outputs of one request, which travel in one message."""
MAX_DETAIL = 300
"""Characters of why a request was refused."""


class TopRequest(Message, frozen=True, kw_only=True):
    """Device -> server: features of one request, offered; said again, it is the same request.

    Attributes:
        instance: Of the device's process, as in its Status.
        number: Of the request, counted up by that process: an older one is given up by a newer.
        parameters: SHA-256 of the parameters that the device's half is bound to, 32 bytes: the server's are to be them.
        pushed: Blocks of it that come right behind this, unasked; the rest is asked for.
        deadline_s: Seconds that the device still waits.
    """

    device: str
    instance: str
    number: int
    name: str
    version: int
    parameters: bytes
    params: Transfer
    pushed: int = 0
    deadline_s: float


class TopTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the server's seconds went.

    Attributes:
        waited_s: From all features being there until they were worked on.
        compute_s: Of decoding, of the network's half, of encoding.
    """

    waited_s: float = 0.0
    compute_s: float = 0.0


class TopAnswer(Message, frozen=True, kw_only=True):
    """Server -> device: what a request's features came to.

    Attributes:
        instance: As in the request.
        number: As in the request.
        answers: Digest of its features.
        outputs: A payload in one piece, of codec `dense`, with one tensor named as the graph names its output; empty
            where the request is refused.
        reason: One word for why it is refused: `busy`, `unknown-release`, `other-release`, `oversized`, `codec`,
            `dtype`, `shape`, `not-finite`, `late`, `failed`, and what damaged payloads are counted by; empty where it
            is not.
        detail: The same for people.
        timing: Where its seconds went at the server.
        room: What may come unasked of the next request's features.
    """

    device: str
    instance: str
    number: int
    answers: bytes
    outputs: bytes = b""
    reason: str = ""
    detail: str = ""
    timing: TopTiming = TopTiming()
    room: Room = Room()


def check_request(request: TopRequest) -> None:
    """Refuse a request that names nothing, or has no time.

    Raises:
        WireError: It says what no device of ours would.
    """
    if not is_name(request.name) or request.version < 1 or request.number < 1:
        raise WireError("a request names a release by a version, and has a number, both from 1")
    if not 0 < request.deadline_s <= MAX_DEADLINE_S:
        raise WireError(f"deadline_s of {request.deadline_s}: above 0, and at most {MAX_DEADLINE_S:g}")


def check_answer(answer: TopAnswer) -> None:
    """Refuse an answer whose seconds are none, or that holds more than one message is to.

    Raises:
        WireError: It says what no server of ours would.
    """
    if not all(0 <= one < math.inf for one in (answer.timing.waited_s, answer.timing.compute_s)):
        raise WireError(f"seconds of {answer.timing.waited_s} and {answer.timing.compute_s}")
    if len(answer.outputs) > MAX_OUTPUT_BYTES:
        raise WireError(f"outputs of {len(answer.outputs)} bytes, at most {MAX_OUTPUT_BYTES}", reason="oversized")

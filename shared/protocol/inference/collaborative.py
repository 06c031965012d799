"""Messages of collaborative inference: features up, outputs down.

They carry no labels and no examples: only the outputs of the device's half of the network leave the device.
"""

from __future__ import annotations

import math

import msgspec

from shared.errors import WireError
from shared.protocol.messages import Message, Room, Transfer
from shared.protocol.topics import is_name

FROM_DEVICE, TO_DEVICE = "infer", "inferred"
"""Channels of requests and answers."""
MAX_DEADLINE_S = 60.0
MAX_OUTPUT_BYTES = 256 << 10
"""Limit of one request's outputs, which travel in one message."""
MAX_DETAIL = 300
"""Most characters of a refusal's message."""


class TopRequest(Message, frozen=True, kw_only=True):
    """Device -> server: offer the features of one request; a repeated message is the same request.

    Attributes:
        instance: Id of the device's process, as in its Status.
        number: Request number, counted by that process: a newer request cancels older ones.
        parameters: SHA-256 of the parameters of the device's half, 32 bytes: the server must use the same.
        pushed: Blocks that follow at once, unrequested; the server requests the others.
        deadline_s: Seconds that the device will still wait.
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
    """Seconds spent at the server.

    Attributes:
        waited_s: From the arrival of all features to the start of processing.
        compute_s: Decoding, the network's half, encoding.
    """

    waited_s: float = 0.0
    compute_s: float = 0.0


class TopAnswer(Message, frozen=True, kw_only=True):
    """Server -> device: outputs for a request's features.

    Attributes:
        instance: Copied from the request.
        number: Copied from the request.
        answers: Digest of its features.
        outputs: A payload in one piece, of codec `dense`, with one tensor named as the graph names its output; empty
            where the request is refused.
        reason: Category of a refusal: `busy`, `unknown-release`, `other-release`, `oversized`, `codec`, `dtype`,
            `shape`, `not-finite`, `late`, `failed`, or that of a damaged payload; empty where it is not refused.
        detail: Reason of a refusal as a message for people.
        timing: Seconds spent at the server.
        room: Credit for unrequested blocks of the next request's features.
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
    """Refuse a request without a valid release, number or deadline.

    Raises:
        WireError: A field is out of range.
    """
    if not is_name(request.name) or request.version < 1 or request.number < 1:
        raise WireError("a request names a release by a version, and has a number, both from 1")
    if not 0 < request.deadline_s <= MAX_DEADLINE_S:
        raise WireError(f"deadline_s of {request.deadline_s}: above 0, and at most {MAX_DEADLINE_S:g}")


def check_answer(answer: TopAnswer) -> None:
    """Refuse an answer with invalid times or too much output.

    Raises:
        WireError: A field is out of range.
    """
    if not all(0 <= seconds < math.inf for seconds in (answer.timing.waited_s, answer.timing.compute_s)):
        raise WireError(f"seconds of {answer.timing.waited_s} and {answer.timing.compute_s}")
    if len(answer.outputs) > MAX_OUTPUT_BYTES:
        raise WireError(f"outputs of {len(answer.outputs)} bytes, at most {MAX_OUTPUT_BYTES}", reason="oversized")

"""Encode and decode messages (MessagePack); the only module that knows the encoding.

A message is `F M <major version> <MessagePack map>`. Messages are small: parameters travel separately, in frames.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from shared.errors import WireError, escape_text
from shared.protocol.inference.collaborative import TopAnswer, TopRequest
from shared.protocol.inference.rollout import Ahead, Bundle, Lacks, Offer, Releases, Withdraw
from shared.protocol.messages import Ack, Features, Gradient, Leave, Message, Report, Skip, Status, Task, Update, Want
from shared.protocol.peers import AtRound, EdgeWord, Hello, ModelOffer, Ruling, Telemetry

AnyMessage: TypeAlias = (
    Status
    | Report
    | Task
    | Update
    | Want
    | Features
    | Gradient
    | Skip
    | Leave
    | Ack
    | Offer
    | Ahead
    | Lacks
    | Bundle
    | Withdraw
    | Releases
    | TopRequest
    | TopAnswer
    | Hello
    | AtRound
    | ModelOffer
    | EdgeWord
    | Telemetry
    | Ruling
)

MAJOR = 1
MAX_MESSAGE_BYTES = 1 << 20
_PREFIX = b"FM" + bytes([MAJOR])

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Encode one message; text that is not UTF-8, such as a file's name, is escaped."""
    try:
        return _PREFIX + _encoder.encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview))
        return _PREFIX + _encoder.encode(_escape_texts(plain))


def _escape_texts(value: Any) -> Any:
    match value:
        case str():
            return escape_text(value)
        case dict():
            return {_escape_texts(key): _escape_texts(item) for key, item in value.items()}
        case list() | tuple():
            return [_escape_texts(item) for item in value]
    return value


def is_message(data: bytes) -> bool:
    """Distinguish a message from a frame by its first two bytes."""
    return data[:2] == _PREFIX[:2]


def decode(data: bytes) -> AnyMessage:
    """Decode and validate one message.

    Raises:
        WireError: It is too long, of another major version, of an unknown type, or a field is invalid.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}", reason="oversized")
    if not is_message(data) or len(data) < len(_PREFIX):
        raise WireError(f"{len(data)} bytes are not a fieldfleet message")
    if data[2] != MAJOR:
        raise WireError(
            f"protocol version {data[2]}, this side speaks {MAJOR}: update the older side", reason="version"
        )
    try:
        return _decoder.decode(memoryview(data)[len(_PREFIX) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"undecodable message of {len(data)} bytes: {error}") from error


def decode_as(kind: type[M], data: bytes) -> M:
    """Decode one message of an expected kind.

    Raises:
        WireError: It is invalid, or of another kind.
    """
    message = decode(data)
    if not isinstance(message, kind):
        raise WireError(f"expected {kind.__name__}, got {type(message).__name__}", reason="unexpected")
    return message

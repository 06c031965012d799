"""Versioned JSON documents: the field `format` is read before all others."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from shared.errors import ConfigError, CorruptFile

T = TypeVar("T")


class _FormatField(msgspec.Struct):
    format: int


def decode_versioned(data: bytes, kind: type[T], newest: int, most: int, place: str, remedy: str = "update it") -> T:
    """Decode a document.

    Args:
        newest: Newest format that this version reads.
        most: Size limit in bytes.
        place: Path or name of the document, for messages.
        remedy: What to do about a newer format.

    Raises:
        ConfigError: It has a newer format.
        CorruptFile: It is malformed or too long.
    """
    if len(data) > most:
        raise CorruptFile(f"{place}: {len(data)} bytes or more, the limit is {most}")
    try:
        number = msgspec.json.decode(data, type=_FormatField).format
        if number > newest:
            raise ConfigError(f"{place}: format {number} is newer than this version reads ({newest}); {remedy}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        name = re.sub("(?<!^)(?=[A-Z])", " ", kind.__name__).lower()
        raise CorruptFile(f"{place}: malformed {name} ({str(error)[:200]})") from error

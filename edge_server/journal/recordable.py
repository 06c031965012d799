"""Round-trip check of journal records before they are written.

JSON has no NaN and no infinity: msgspec writes them as `null`, which a reader takes for "unknown" or rejects, and a
rejected row hides all later ones. Values of devices and other sites reach records, so the last check is here, where
all records pass.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from shared.errors import Unrecordable

R = TypeVar("R", bound=msgspec.Struct)
SHOWN = 200


def encode_recordable(record: R, encoder: msgspec.json.Encoder, decoder: msgspec.json.Decoder[R]) -> bytes:
    """Return a record as JSON that `decoder` reads back unchanged.

    Raises:
        Unrecordable: A value is NaN, infinite, beyond 64 bits, or not of its field's type.
    """
    problem: Exception | str = ""
    try:
        body = encoder.encode(record)
        if b"null" not in body or not (problem := _find_non_finite(msgspec.to_builtins(record), "")):
            decoder.decode(body)
            return body
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        problem = error
    raise Unrecordable(f"{type(record).__name__} cannot be recorded: {str(problem)[:SHOWN]}")


def _find_non_finite(value: object, path: str) -> str:
    """Return the path of the first NaN or infinite value with the value; empty if there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{path.lstrip('.')} is {value}"
    if isinstance(value, dict):
        problems = (_find_non_finite(item, f"{path}.{key}") for key, item in value.items())
    elif isinstance(value, list | tuple):
        problems = (_find_non_finite(item, f"{path}[{index}]") for index, item in enumerate(value))
    else:
        return ""
    return next(filter(None, problems), "")

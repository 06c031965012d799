"""Round-trip check of journal records: nothing is written that could not be read back.

JSON has no NaN and no infinity: msgspec writes them as `null`, which a reader takes for "not known" or refuses, and a
row that a reader refuses hides every row behind it. Figures of devices and of other sites reach records, so the last
check is here, in the one place that all records pass.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from shared.errors import Unrecordable

R = TypeVar("R", bound=msgspec.Struct)
SHOWN = 200


def encode_recordable(record: R, encoder: msgspec.json.Encoder, decoder: msgspec.json.Decoder[R]) -> bytes:
    """Return a record as JSON that `decoder` gives back with every figure.

    Raises:
        Unrecordable: A value is NaN, infinite, beyond 64 bits, or not of its field's type.
    """
    problem: Exception | str = ""
    try:
        body = encoder.encode(record)
        if b"null" not in body or not (problem := _not_finite(msgspec.to_builtins(record), "")):
            decoder.decode(body)
            return body
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        problem = error
    raise Unrecordable(f"{type(record).__name__} cannot be recorded and is not written: {str(problem)[:SHOWN]}")


def finite_or_none(figure: float | None) -> float | None:
    """Return a figure, None for one that no record can hold."""
    return figure if figure is not None and math.isfinite(figure) else None


def _not_finite(value: object, place: str) -> str:
    """Return where a figure is NaN or infinite, and what it is; empty where none is."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{place.lstrip('.')} is {value}"
    if isinstance(value, dict):
        found = (_not_finite(each, f"{place}.{key}") for key, each in value.items())
    elif isinstance(value, list | tuple):
        found = (_not_finite(each, f"{place}[{index}]") for index, each in enumerate(value))
    else:
        return ""
    return next(filter(None, found), "")

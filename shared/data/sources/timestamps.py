"""Parse timestamps: ISO 8601, seconds since 1970, or a user format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.spec import Data
from shared.errors import ConfigError

_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)?")
MICROSECONDS = 1e6
MAX_SECONDS = 1e11
"""In the year 5138."""


def parse_times(texts: Sequence[str], lines: NDArray[np.int64], spec: Data, path: Path) -> NDArray[np.float64]:
    """Return seconds since 1970, float64 of shape (R,); times without a zone count as UTC.

    Args:
        lines: Number of each row in the file, for the error.

    Raises:
        ConfigError: A time cannot be parsed; the message names its line.
    """
    if not texts:
        return np.empty(0)
    seconds = _parse_all(texts, lines, spec, path)
    if (latest := float(seconds.max())) > MAX_SECONDS:
        raise ConfigError(
            f"{path}: column {spec.time_column!r} holds {latest:.0f}, which is not a number of seconds since 1970 but "
            "perhaps of milliseconds; divide it by 1000"
        )
    return seconds


def _parse_all(texts: Sequence[str], lines: NDArray[np.int64], spec: Data, path: Path) -> NDArray[np.float64]:
    if spec.time_format:
        return _parse_each(texts, lines, spec, path)
    try:
        if _NUMBER.fullmatch(texts[0]):
            return _require_finite(np.array(texts, dtype=np.float64))
        if all(map(_ISO.fullmatch, texts)):
            return np.array(texts, dtype="datetime64[us]").astype(np.int64) / MICROSECONDS
    except ValueError:
        pass
    return _parse_each(texts, lines, spec, path)


def _require_finite(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    if not np.isfinite(seconds).all():
        raise ValueError("not finite")
    return seconds


def _parse_each(texts: Sequence[str], lines: NDArray[np.int64], spec: Data, path: Path) -> NDArray[np.float64]:
    seconds, zones = np.empty(len(texts)), dict[bool, int]()
    for row, text in enumerate(texts):
        try:
            if _NUMBER.fullmatch(text) and not spec.time_format:
                seconds[row] = _require_finite(np.float64(text).reshape(1))[0]
                continue
            time = _parse(text, spec.time_format or "")
            zones.setdefault(time.tzinfo is not None, row)
            seconds[row] = (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
        except (ValueError, OverflowError) as error:
            expected = f"of the format {spec.time_format!r}" if spec.time_format else "ISO 8601 or a number of seconds"
            remedy = "correct it or time_format" if spec.time_format else "correct it, or set time_format"
            raise ConfigError(
                f"{path}: line {lines[row]}, column {spec.time_column!r}: {text[:40]!r} is not a time, {expected}; "
                f"{remedy}"
            ) from error
    if len(zones) > 1:
        raise ConfigError(
            f"{path}: column {spec.time_column!r} has a zone in line {lines[zones[True]]} and none in line "
            f"{lines[zones[False]]}; write it in all lines or in none, which means UTC"
        )
    return seconds


def _parse(text: str, time_format: str) -> datetime:
    if time_format:
        return datetime.strptime(text, time_format)  # noqa: DTZ007 - the caller sets the zone
    return datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text)

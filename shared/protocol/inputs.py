"""Description of a neural network's inputs in updates and releases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

MAX_FEATURES, MAX_FEATURE_CHARS, MAX_CHANNELS, MAX_EXTENTS = 4096, 1 << 15, 4096, 8
BYTE_SCALE = 255.0
CLOSE = 1e-6
"""Relative difference below which means and deviations count as equal."""
SHOWN = 12
"""Feature names or numbers that a message lists."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Preparation of a network's float32 inputs from stored values; also their shape and feature names.

    Attributes:
        scale: Divisor of stored values: 255 for bytes, 1 for other numbers; None if unknown.
        mean: Subtracted from each channel after that, one number for all or one per channel; empty for nothing.
        std: Divisor of each channel after that, one number for all or one per channel; empty for nothing.
        shape: Shape of one input, channels first; empty if unknown.
        features: Column names of a table, in order; empty if there are none or they are unknown.
    """

    scale: float | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible numbers, and more of them than a server can store for every device."""
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError("scale must be above zero and finite")
        if not all(map(math.isfinite, self.mean)) or not all(0 < deviation < math.inf for deviation in self.std):
            raise ValueError("mean must be finite, std above zero and finite")
        if max(len(self.mean), len(self.std)) > MAX_CHANNELS:
            raise ValueError(f"mean and std must be {MAX_CHANNELS} numbers at most")
        if len(self.shape) > MAX_EXTENTS or not all(0 < extent < 1 << 31 for extent in self.shape):
            raise ValueError(f"shape must be {MAX_EXTENTS} extents at most, each from 1 to 2^31 - 1")
        if len(self.features) > MAX_FEATURES or sum(map(len, self.features)) > MAX_FEATURE_CHARS:
            raise ValueError(f"features must be {MAX_FEATURES} names and {MAX_FEATURE_CHARS} characters at most")

    def fill_unknown(self, other: Inputs) -> Inputs:
        """Return a copy with unknown fields taken from `other`."""
        return msgspec.structs.replace(
            self,
            scale=other.scale if self.scale is None else self.scale,
            shape=self.shape or other.shape,
            features=self.features or other.features,
        )


def differences(first: Inputs, other: Inputs) -> Iterator[tuple[str, str]]:
    """Yield pairs of descriptions that differ, for messages; fields unknown to either side are skipped."""
    if first.scale is not None and other.scale is not None and (first.scale == 1) != (other.scale == 1):
        yield _describe_scale(first.scale), _describe_scale(other.scale)
    for name, neutral in (("mean", 0.0), ("std", 1.0)):
        values, other_values = (getattr(each, name) for each in (first, other))
        if not _are_close(values, other_values, neutral):
            yield f"{name} {_format_numbers(values)}", f"{name} {_format_numbers(other_values)}"
    if first.shape and other.shape and first.shape != other.shape:
        yield f"shape {_format_shape(first.shape)}", f"shape {_format_shape(other.shape)}"
    elif first.features and other.features and first.features != other.features:
        yield _contrast(first.features, other.features)


def _are_close(values: Sequence[float], other_values: Sequence[float], neutral: float) -> bool:
    values, other_values = (tuple(numbers) or (neutral,) for numbers in (values, other_values))
    most = max(len(values), len(other_values))
    values, other_values = (numbers * most if len(numbers) == 1 else numbers for numbers in (values, other_values))
    return len(values) == len(other_values) and all(
        math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(values, other_values, strict=True)
    )


def _describe_scale(scale: float) -> str:
    return "not bytes, undivided" if scale == 1 else f"stored values divided by {scale:g}"


def _format_numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers[:SHOWN]) + ", …" * (len(numbers) > SHOWN) or "none"


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _contrast(names: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Describe two different lists of columns; long ones from the first difference on."""
    first = next((at for at, pair in enumerate(zip(names, other, strict=False)) if pair[0] != pair[1]), 0)
    start = first if max(len(names), len(other)) > SHOWN else 0
    text, other_text = (
        f"columns {'… ' * (start > 0)}{', '.join(map(ascii, each[start : start + SHOWN]))}"
        + ", …" * (len(each) > start + SHOWN)
        for each in (names, other)
    )
    return text, other_text

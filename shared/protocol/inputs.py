"""Description of network inputs that boards send, servers compare and releases publish."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

MAX_FEATURES, MAX_FEATURE_CHARS, MAX_CHANNELS, MAX_EXTENTS = 4096, 1 << 15, 4096, 8
BYTE_SCALE = 255.0
CLOSE = 1e-6
"""Means and deviations that differ by less, relative to the larger, are the same."""
SHOWN = 12
"""Names of features that a message lists."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How stored values become the inputs of a network, which are always float32.

    Attributes:
        scale: What a stored value is divided by: 255 for bytes, 1 for other numbers; None: not known.
        mean: What is subtracted from each channel after that, one number for all or one a channel; empty for nothing.
        std: What each channel is divided by after that; likewise.
        shape: Of one input, channels first; empty: not known.
        features: Names of a table's columns, in order; empty: there are none, or they are not known.
    """

    scale: float | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that no data set has, and more of them than a server keeps of every device."""
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError("scale must be above zero and finite")
        if not all(map(math.isfinite, self.mean)) or not all(0 < one < math.inf for one in self.std):
            raise ValueError("mean must be finite, std above zero and finite")
        if max(len(self.mean), len(self.std)) > MAX_CHANNELS:
            raise ValueError(f"mean and std must be {MAX_CHANNELS} numbers at most")
        if len(self.shape) > MAX_EXTENTS or not all(0 < extent < 1 << 31 for extent in self.shape):
            raise ValueError(f"shape must be {MAX_EXTENTS} extents at most, each from 1 to 2^31 - 1")
        if len(self.features) > MAX_FEATURES or sum(map(len, self.features)) > MAX_FEATURE_CHARS:
            raise ValueError(f"features must be {MAX_FEATURES} names and {MAX_FEATURE_CHARS} characters at most")

    def filled(self, other: Inputs) -> Inputs:
        """Return the same, with what is not known taken from another."""
        return msgspec.structs.replace(
            self,
            scale=other.scale if self.scale is None else self.scale,
            shape=self.shape or other.shape,
            features=self.features or other.features,
        )


def differences(one: Inputs, other: Inputs) -> Iterator[tuple[str, str]]:
    """Yield where two kinds of inputs differ, as pairs of words for people; what either does not know is left out."""
    if one.scale is not None and other.scale is not None and (one.scale == 1) != (other.scale == 1):
        yield _describe_scale(one.scale), _describe_scale(other.scale)
    for name, neutral in (("mean", 0.0), ("std", 1.0)):
        ours, theirs = (getattr(each, name) for each in (one, other))
        if not _are_close(ours, theirs, neutral):
            yield f"{name} {_listed(ours)}", f"{name} {_listed(theirs)}"
    if one.shape and other.shape and one.shape != other.shape:
        yield f"shape {_by(one.shape)}", f"shape {_by(other.shape)}"
    elif one.features and other.features and one.features != other.features:
        yield _contrast(one.features, other.features)


def _are_close(ours: Sequence[float], theirs: Sequence[float], neutral: float) -> bool:
    ours, theirs = (tuple(one) or (neutral,) for one in (ours, theirs))
    most = max(len(ours), len(theirs))
    ours, theirs = (one * most if len(one) == 1 else one for one in (ours, theirs))
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(ours, theirs, strict=True)
    )


def _describe_scale(scale: float) -> str:
    return "other numbers than bytes, undivided" if scale == 1 else f"stored values divided by {scale:g}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{one:.6g}" for one in numbers[:SHOWN]) + ", …" * (len(numbers) > SHOWN) or "none"


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _contrast(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return two different lists of as many columns, or those of long ones from the first that differs."""
    first = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = first if max(len(one), len(other)) > SHOWN else 0
    ours, theirs = (
        f"columns {'… ' * (start > 0)}{', '.join(map(ascii, each[start : start + SHOWN]))}"
        + ", …" * (len(each) > start + SHOWN)
        for each in (one, other)
    )
    return ours, theirs

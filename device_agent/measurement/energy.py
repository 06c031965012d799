"""Energy between two moments from a board's power samples: the trapezoid, with gaps filled and reported."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["instant", "mean"]

MAX_GAP_PERIODS = 3
"""Samples further apart than so many periods leave a gap between them."""
MIN_COVERED_RATIO = 0.5
"""Where samples cover a smaller share of the time than this, its energy is not known."""


class Sample(NamedTuple):
    """Watts at a moment, or since the sample before: the source's kind says which."""

    at: float
    watts: float


@dataclass(frozen=True)
class Energy:
    """Joules of a board between two moments.

    Attributes:
        joules: All of it, idle included.
        seconds: How long.
        covered_ratio: Share of the time that samples cover; the rest is filled by the mean of what is around it.
        uncertainty: One standard deviation, as a share of the joules; None where the source's own is not known.
    """

    joules: float
    seconds: float
    covered_ratio: float
    uncertainty: float | None


class _Piece(NamedTuple):
    """A stretch of time in which watts follow a line; `jump` is the whole line's, of which this may be a part."""

    seconds: float
    watts: float
    jump: float
    covered: bool


def integrate_energy(
    samples: Sequence[Sample],
    start: float,
    stop: float,
    *,
    kind: Kind,
    period_s: float,
    uncertainty: float | None = None,
) -> Energy | None:
    """Integrate the energy between two moments; None where too little of the time is covered.

    Between two instants the watts follow a line. A mean holds for all the time since the sample before, so that an
    energy counter's joules are exact however rarely it is read. Before the first sample and after the last one their
    watts go on.

    The uncertainty of sampling takes the jumps between neighbours for noise (half the mean square of differences, von
    Neumann 1941, https://doi.org/10.1214/aoms/1177731677): right for a load that flickers, too much for one that
    drifts. The source's own is the same in every sample and does not average out.

    Args:
        samples: In order of time.
        start: Monotonic seconds.
        stop: The same clock's.
        kind: What a sample's watts stand for.
        period_s: Seconds from one sample to the next that were wanted.
        uncertainty: Of the source, one standard deviation as a share.
    """
    seconds = stop - start
    pieces = list(_split_pieces(samples, start, stop, kind=kind, longest_s=MAX_GAP_PERIODS * period_s))
    if seconds <= 0 or not pieces:
        return None
    joules = math.fsum(piece.seconds * piece.watts for piece in pieces)
    covered = math.fsum(piece.seconds for piece in pieces if piece.covered) / seconds
    if covered < MIN_COVERED_RATIO:
        return None
    known = uncertainty is not None and joules > 0
    spread = math.hypot(uncertainty or 0.0, _estimate_sampling_error(pieces, kind) / joules) if known else None
    return Energy(joules, seconds, min(1.0, covered), spread)


def integrate_spans(
    samples: Sequence[Sample],
    spans: Sequence[tuple[float, float]],
    *,
    kind: Kind,
    period_s: float,
    uncertainty: float | None = None,
) -> Energy | None:
    """Integrate the energy of several spans of time, in order; None where too little of any is covered.

    Their errors are taken to be of one kind, which do not average out.

    Args:
        samples: As for `integrate_energy`, and so are the others.
        spans: Begin and end of each, in monotonic seconds.
        kind: What a sample's watts stand for.
        period_s: Seconds from one sample to the next that were wanted.
        uncertainty: Of the source.
    """
    found: list[Energy] = []
    for start, stop in spans:
        first = max(0, bisect_right(samples, start, key=_sample_time) - 1)
        near = samples[first : bisect_left(samples, stop, key=_sample_time) + 1]
        one = integrate_energy(near, start, stop, kind=kind, period_s=period_s, uncertainty=uncertainty)
        if one is None and stop > start:
            return None
        found += [one] if one else []
    joules, seconds = math.fsum(one.joules for one in found), math.fsum(one.seconds for one in found)
    if not seconds:
        return None
    covered = math.fsum(one.covered_ratio * one.seconds for one in found) / seconds
    spreads = [one.uncertainty * one.joules for one in found if one.uncertainty is not None]
    known = len(spreads) == len(found) and joules > 0
    return Energy(joules, seconds, covered, math.fsum(spreads) / joules if known else None)


def _sample_time(sample: Sample) -> float:
    return sample.at


def _split_pieces(
    samples: Sequence[Sample], start: float, stop: float, *, kind: Kind, longest_s: float
) -> Iterator[_Piece]:
    if not samples:
        return
    first, last = samples[0], samples[-1]
    if start < first.at:
        seconds = min(stop, first.at) - start
        yield _Piece(seconds, first.watts, 0.0, seconds <= longest_s)
    for before, after in pairwise(samples):
        begin, end = max(start, before.at), min(stop, after.at)
        if begin >= end:
            continue
        if kind == "mean":
            yield _Piece(end - begin, after.watts, 0.0, covered=True)
            continue
        jump, length = after.watts - before.watts, after.at - before.at
        middle = before.watts + jump * ((begin + end) / 2 - before.at) / length
        yield _Piece(end - begin, middle, jump, length <= longest_s)
    if stop > last.at:
        seconds = stop - max(start, last.at)
        yield _Piece(seconds, last.watts, 0.0, seconds <= longest_s)


def _estimate_sampling_error(pieces: Sequence[_Piece], kind: Kind) -> float:
    """Return the joules that watts between the samples may add or take, one standard deviation."""
    if kind == "mean":
        flicker = 0.0
    else:
        flicker = math.fsum((piece.seconds * piece.jump) ** 2 / 2 for piece in pieces if piece.covered)
    import statistics  # noqa: PLC0415 - a quarter of a megabyte, on boards with a meter alone

    spread = statistics.pstdev([piece.watts for piece in pieces])
    gaps = (piece.seconds * max(spread, abs(piece.jump) / 2) for piece in pieces if not piece.covered)
    return math.sqrt(flicker + math.fsum(gap**2 for gap in gaps))

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

PRIOR_FLICKER, PRIOR_JUMPS = 0.05, 2
"""Usual flicker from sample to sample as a share of the watts, and how many jumps that knowledge is worth."""
PRIOR_CHANGE, PRIOR_CHANGES = 0.1, 2
"""Usual change of a load in a gap as a share of the watts, and how many samples that knowledge is worth.

With these, 95 % of the energies of recorded runs are within two standard deviations, also for tasks of 1 s and windows
with gaps of seconds (`tests/device_agent/measurement/test_energy_traces.py`).
"""


class Sample(NamedTuple):
    """Watts at a moment, or since the sample before: the source's kind says which."""

    at: float
    watts: float


@dataclass(frozen=True)
class Energy:
    """Joules of a board between two moments.

    Attributes:
        joules: All of it, idle included.
        covered_ratio: Share of the time that samples cover; the rest is filled by the mean of what is around it.
        uncertainty: One standard deviation, as a share of the joules; None where the source's own is not known.
    """

    joules: float
    seconds: float
    covered_ratio: float
    uncertainty: float | None


class _Piece(NamedTuple):
    """A stretch of time in which watts follow a line.

    Attributes:
        jump: Watts from one end of the whole line to the other, of which this may be a part; 0 where one sample stands
            for all of it.
        guess_s: Seconds for which a sample is taken that does not cover them: edges, and parts of a mean.
    """

    seconds: float
    watts: float
    jump: float
    covered: bool
    guess_s: float = 0.0


def integrate_energy(  # noqa: PLR0913 - two kinds of uncertainty
    samples: Sequence[Sample],
    start: float,
    stop: float,
    *,
    kind: Kind,
    period_s: float,
    uncertainty: float | None = None,
    uncertainty_w: float = 0.0,
) -> Energy | None:
    """Integrate the energy between two moments; None where too little of the time is covered.

    Between two instants the watts follow a line. A mean holds for all the time since the sample before, so that an
    energy counter's joules are exact however rarely it is read. Before the first sample and after the last one their
    watts go on.

    The uncertainty of sampling takes the jumps between neighbours for noise (half the mean square of differences, von
    Neumann 1941, https://doi.org/10.1214/aoms/1177731677): right for a load that flickers, too much for one that
    drifts. A few jumps tell little: they count beside `PRIOR_JUMPS` of a usual size. The source's own is the same in
    every sample and does not average out.

    Args:
        samples: In order of time.
        start: Monotonic seconds.
        kind: What a sample's watts stand for.
        period_s: Seconds from one sample to the next that were wanted.
        uncertainty: Of the source, one standard deviation as a share.
        uncertainty_w: The part of it that is the same at every load, in watts.
    """
    seconds = stop - start
    pieces = list(_split_pieces(samples, start, stop, kind=kind, longest_s=MAX_GAP_PERIODS * period_s))
    if seconds <= 0 or not pieces:
        return None
    joules = math.fsum(piece.seconds * piece.watts for piece in pieces)
    covered = math.fsum(piece.seconds for piece in pieces if piece.covered) / seconds
    if covered < MIN_COVERED_RATIO:
        return None
    known = (uncertainty is not None or uncertainty_w > 0) and joules > 0
    sampling = _estimate_sampling_error(pieces, kind, joules / seconds)
    errors = ((uncertainty or 0.0) * joules, uncertainty_w * seconds, sampling)
    spread = math.hypot(*errors) / joules if known else None
    return Energy(joules, seconds, min(1.0, covered), spread)


def integrate_spans(
    samples: Sequence[Sample],
    spans: Sequence[tuple[float, float]],
    *,
    kind: Kind,
    period_s: float,
    uncertainty: float | None = None,
    uncertainty_w: float = 0.0,
) -> Energy | None:
    """Integrate the energy of several spans of time, in order; None where too little of any is covered.

    Their errors are taken to be of one kind, which do not average out.

    Args:
        samples: As for `integrate_energy`, and so are the others.
        spans: Begin and end of each, in monotonic seconds.
        kind: What a sample's watts stand for.
        period_s: Seconds from one sample to the next that were wanted.
        uncertainty_w: The part of it that is the same at every load.
    """
    found: list[Energy] = []
    for start, stop in spans:
        first = max(0, bisect_right(samples, start, key=_sample_time) - 1)
        near = samples[first : bisect_left(samples, stop, key=_sample_time) + 1]
        one = integrate_energy(
            near, start, stop, kind=kind, period_s=period_s, uncertainty=uncertainty, uncertainty_w=uncertainty_w
        )
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
        yield _Piece(seconds, first.watts, 0.0, seconds <= longest_s, seconds)
    for before, after in pairwise(samples):
        begin, end = max(start, before.at), min(stop, after.at)
        if begin >= end:
            continue
        if kind == "mean":
            seconds, length = end - begin, after.at - before.at
            guess_s = seconds * math.sqrt(max(0.0, 1 - seconds / length))  # the mean is exact for all of its time
            yield _Piece(seconds, after.watts, 0.0, covered=True, guess_s=guess_s)
            continue
        jump, length = after.watts - before.watts, after.at - before.at
        middle = before.watts + jump * ((begin + end) / 2 - before.at) / length
        yield _Piece(end - begin, middle, jump, length <= longest_s)
    if stop > last.at:
        seconds = stop - max(start, last.at)
        yield _Piece(seconds, last.watts, 0.0, seconds <= longest_s, seconds)


def _estimate_sampling_error(pieces: Sequence[_Piece], kind: Kind, mean_w: float) -> float:
    """Return the joules that watts between the samples may add or take, one standard deviation.

    Args:
        pieces: All of a stretch of time.
        kind: What a sample's watts stand for; means leave nothing out, but where they are cut.
        mean_w: Of the whole stretch.
    """
    covered = [piece for piece in pieces if piece.covered]
    lines = [piece for piece in covered if kind == "instant" and not piece.guess_s]
    jumps = [piece.jump for piece in lines] or [after.watts - before.watts for before, after in pairwise(covered)]
    share = PRIOR_JUMPS / (PRIOR_JUMPS + len(jumps))
    usual = share * (PRIOR_FLICKER * mean_w) ** 2
    seen = (1 - share) * math.fsum(jump**2 / 2 for jump in jumps) / max(1, len(jumps))
    flicker = math.fsum(piece.seconds**2 * (usual + (1 - share) * piece.jump**2 / 2) for piece in lines) + math.fsum(
        piece.guess_s**2 * (usual + seen) for piece in covered
    )
    change = _estimate_change(pieces, mean_w)
    gaps = (piece.seconds**2 * max(change, piece.jump**2 / 4) for piece in pieces if not piece.covered)
    return math.sqrt(flicker + math.fsum(gaps))


def _estimate_change(pieces: Sequence[_Piece], mean_w: float) -> float:
    """Return the variance in watts squared of what a load may have done in a gap."""
    middle = math.fsum(piece.watts for piece in pieces) / len(pieces)
    seen = math.fsum((piece.watts - middle) ** 2 for piece in pieces)
    return (PRIOR_CHANGES * (PRIOR_CHANGE * mean_w) ** 2 + seen) / (PRIOR_CHANGES + len(pieces) - 1)

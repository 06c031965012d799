"""Integrate energy from power samples, with gaps filled and reported."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["instant", "mean"]

MAX_GAP_PERIODS = 3
"""Samples further apart than this many periods leave a gap between them."""
MIN_COVERED_RATIO = 0.5
"""Energy is unknown if samples cover less than this fraction of the time."""

PRIOR_FLICKER, PRIOR_JUMPS = 0.05, 2
"""Prior for flicker between samples, relative to the mean watts, and its weight as a number of jumps."""
PRIOR_CHANGE, PRIOR_CHANGES = 0.1, 2
"""Prior for a load change in a gap, relative to the mean watts, and its weight as a number of samples.

With these, 95 % of the energies of recorded runs are within two standard deviations, also for tasks of 1 s and windows
with gaps of seconds (`tests/device_agent/measurement/test_energy_traces.py`).
"""


class Sample(NamedTuple):
    """Watts at an instant, or the mean since the previous sample, depending on the source's kind."""

    at: float
    watts: float


@dataclass(frozen=True)
class Energy:
    """Energy of a board between two moments.

    Attributes:
        joules: Total, idle power included.
        covered_ratio: Fraction of the time covered by samples; the rest is filled from adjacent samples.
        uncertainty: One standard deviation, relative; None if the source's own is unknown.
    """

    joules: float
    seconds: float
    covered_ratio: float
    uncertainty: float | None


class _Segment(NamedTuple):
    """An interval in which watts are linear in time.

    Attributes:
        jump: Change in watts over the entire line, of which this may be a part; 0 if one sample covers the segment.
        guess_s: Seconds for which a sample is extrapolated: edges, and parts of a mean.
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
    """Integrate the energy between two moments; None if too little of the time is covered.

    Instants are interpolated linearly. A mean applies to all the time since the previous sample, so that an energy
    counter's joules are exact however rarely it is read. The first and last watts are extrapolated to the edges.

    The sampling uncertainty treats jumps between neighbours as noise (half the mean square of differences, von Neumann
    1941, https://doi.org/10.1214/aoms/1177731677): right for a flickering load, too large for a drifting one. Few jumps
    carry little information, so they are weighed with `PRIOR_JUMPS` of typical size. The source's own error is common
    to all samples and does not average out.

    Args:
        samples: In order of time.
        start: Monotonic seconds, as is `stop`.
        kind: Whether a sample is an instant or a mean.
        period_s: Nominal seconds between samples.
        uncertainty: Source's uncertainty: one standard deviation, relative.
        uncertainty_w: Load-independent part of it, in watts.
    """
    seconds = stop - start
    segments = list(_split_segments(samples, start, stop, kind=kind, longest_s=MAX_GAP_PERIODS * period_s))
    if seconds <= 0 or not segments:
        return None
    joules = math.fsum(segment.seconds * segment.watts for segment in segments)
    covered = math.fsum(segment.seconds for segment in segments if segment.covered) / seconds
    if covered < MIN_COVERED_RATIO:
        return None
    is_known = (uncertainty is not None or uncertainty_w > 0) and joules > 0
    sampling = _estimate_sampling_error(segments, kind, joules / seconds)
    errors = ((uncertainty or 0.0) * joules, uncertainty_w * seconds, sampling)
    spread = math.hypot(*errors) / joules if is_known else None
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
    """Integrate the energy of several spans; None if too little of any span is covered.

    Their errors are taken as fully correlated, so they add up.

    Args:
        samples: See `integrate_energy`, also for the other arguments.
        spans: Start and end of each in monotonic seconds, in order of time.
        kind: Whether a sample is an instant or a mean.
        period_s: Nominal seconds between samples.
        uncertainty_w: Load-independent part of the uncertainty, in watts.
    """
    energies: list[Energy] = []
    for start, stop in spans:
        first = max(0, bisect_right(samples, start, key=_sample_time) - 1)
        near = samples[first : bisect_left(samples, stop, key=_sample_time) + 1]
        energy = integrate_energy(
            near, start, stop, kind=kind, period_s=period_s, uncertainty=uncertainty, uncertainty_w=uncertainty_w
        )
        if energy is None and stop > start:
            return None
        energies += [energy] if energy else []
    joules, seconds = math.fsum(energy.joules for energy in energies), math.fsum(energy.seconds for energy in energies)
    if not seconds:
        return None
    covered = math.fsum(energy.covered_ratio * energy.seconds for energy in energies) / seconds
    spreads = [energy.uncertainty * energy.joules for energy in energies if energy.uncertainty is not None]
    is_known = len(spreads) == len(energies) and joules > 0
    return Energy(joules, seconds, covered, math.fsum(spreads) / joules if is_known else None)


def _sample_time(sample: Sample) -> float:
    return sample.at


def _split_segments(
    samples: Sequence[Sample], start: float, stop: float, *, kind: Kind, longest_s: float
) -> Iterator[_Segment]:
    if not samples:
        return
    first, last = samples[0], samples[-1]
    if start < first.at:
        seconds = min(stop, first.at) - start
        yield _Segment(seconds, first.watts, 0.0, seconds <= longest_s, seconds)
    for before, after in pairwise(samples):
        begin, end = max(start, before.at), min(stop, after.at)
        if begin >= end:
            continue
        if kind == "mean":
            seconds, length = end - begin, after.at - before.at
            guess_s = seconds * math.sqrt(max(0.0, 1 - seconds / length))  # a mean is exact over its entire time
            yield _Segment(seconds, after.watts, 0.0, covered=True, guess_s=guess_s)
            continue
        jump, length = after.watts - before.watts, after.at - before.at
        middle = before.watts + jump * ((begin + end) / 2 - before.at) / length
        yield _Segment(end - begin, middle, jump, length <= longest_s)
    if stop > last.at:
        seconds = stop - max(start, last.at)
        yield _Segment(seconds, last.watts, 0.0, seconds <= longest_s, seconds)


def _estimate_sampling_error(segments: Sequence[_Segment], kind: Kind, mean_w: float) -> float:
    """Return one standard deviation of the joules due to unsampled changes.

    Args:
        segments: All segments of an interval.
        kind: Means have no sampling error except where they are cut.
        mean_w: Mean watts of the interval.
    """
    covered = [segment for segment in segments if segment.covered]
    lines = [segment for segment in covered if kind == "instant" and not segment.guess_s]
    jumps = [segment.jump for segment in lines] or [after.watts - before.watts for before, after in pairwise(covered)]
    share = PRIOR_JUMPS / (PRIOR_JUMPS + len(jumps))
    usual = share * (PRIOR_FLICKER * mean_w) ** 2
    observed = (1 - share) * math.fsum(jump**2 / 2 for jump in jumps) / max(1, len(jumps))
    flicker = math.fsum(
        segment.seconds**2 * (usual + (1 - share) * segment.jump**2 / 2) for segment in lines
    ) + math.fsum(segment.guess_s**2 * (usual + observed) for segment in covered)
    change = _estimate_change(segments, mean_w)
    gaps = (segment.seconds**2 * max(change, segment.jump**2 / 4) for segment in segments if not segment.covered)
    return math.sqrt(flicker + math.fsum(gaps))


def _estimate_change(segments: Sequence[_Segment], mean_w: float) -> float:
    """Return the variance of a load's change within a gap, in watts squared."""
    middle = math.fsum(segment.watts for segment in segments) / len(segments)
    squares = math.fsum((segment.watts - middle) ** 2 for segment in segments)
    return (PRIOR_CHANGES * (PRIOR_CHANGE * mean_w) ** 2 + squares) / (PRIOR_CHANGES + len(segments) - 1)

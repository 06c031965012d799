"""What counts as worse in a trial: crashes, answers that are no numbers, errors, latency; and what does not."""

from __future__ import annotations

import math

import pytest

from device_agent.inference.messages import Figures
from device_agent.inference.soak import compute_latency_limit, judge_trial
from shared.protocol.update import UpdateTerms

TERMS, STRICT = UpdateTerms(), UpdateTerms(max_latency_ms=2.0)


def figures(requests: int, errors: int = 0, non_finite: int = 0, p95_s: float = 0.01) -> Figures:
    return Figures("digits", 2, requests, errors, non_finite, p95_s=p95_s)


NOBODY, USUAL, FAULTY = figures(0, p95_s=0.0), figures(1000), figures(1000, errors=100)


@pytest.mark.parametrize(
    ("before", "now", "terms"),
    [
        (NOBODY, NOBODY, TERMS),
        (USUAL, NOBODY, TERMS),  # nobody calls it: nothing speaks against it
        (USUAL, figures(1000), TERMS),
        (USUAL, figures(1000, p95_s=0.029), TERMS),  # training began beside it
        (NOBODY, figures(1000, p95_s=5.0), TERMS),  # a first version is as slow as it is
        (USUAL, figures(19, p95_s=5.0), TERMS),  # too few to tell
        (USUAL, figures(10, errors=2), TERMS),
        (FAULTY, figures(1000, errors=105), TERMS),  # as before
        (figures(1000, non_finite=2), figures(1000, non_finite=3), TERMS),
        (USUAL, figures(1000, p95_s=0.0019), STRICT),
        (figures(1000, p95_s=0.00001), figures(1000, p95_s=0.001), TERMS),  # microseconds: the board's own noise
    ],
)
def test_what_is_no_worse_stays(before, now, terms):
    assert judge_trial(before, now, 0, terms) == ""


@pytest.mark.parametrize(
    ("before", "now", "deaths", "terms", "cause"),
    [
        (USUAL, figures(1000), 1, TERMS, "crashes"),
        (NOBODY, NOBODY, 2, TERMS, "crashes"),
        (USUAL, figures(1, 1, 1), 0, TERMS, "finite"),
        (NOBODY, figures(3, 3), 0, TERMS, "errors"),
        (USUAL, figures(1000, 12), 0, TERMS, "errors"),
        (FAULTY, figures(1000, 120), 0, TERMS, "errors"),
        (USUAL, figures(20, p95_s=0.031), 0, TERMS, "latency"),
        (NOBODY, figures(20, p95_s=0.0021), 0, STRICT, "latency"),
    ],
)
def test_what_is_worse_says_why(before, now, deaths, terms, cause):
    assert judge_trial(before, now, deaths, terms).startswith(f"{cause}: ")


def test_the_limit_of_latency_is_told_or_the_old_one_s_and_half_of_it_more():
    assert compute_latency_limit(TERMS, 0.0) == math.inf
    assert compute_latency_limit(TERMS, 0.010) == pytest.approx(0.015)
    assert compute_latency_limit(TERMS, 0.0001) == pytest.approx(0.0011)
    assert compute_latency_limit(STRICT, 0.010) == 0.002

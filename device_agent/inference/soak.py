"""The watch over a new version: whether it does worse at its work than the one before. Pure; times in seconds."""

from __future__ import annotations

import math

from device_agent.inference.messages import Figures
from shared.protocol.update import UpdateTerms

SLOWER = 1.5
"""Times the 95th percentile of the old one, measured in turns on a board at the same work."""
SLOWER_AT_WORK = 3.0
"""The same at work: before the switch there may have been no training beside it, which may double it."""
SLACK_S = 0.001
"""What a board that has something else to do adds to a network that takes microseconds."""
LEAST_REQUESTS = 20
"""Fewer say nothing of a percentile."""
LEAST_ERRORS, MORE_ERRORS = 3, 0.01
"""Errors that are no accident: so many, and by such a share of all requests more than before."""


def latency_limit(terms: UpdateTerms, old_p95_s: float, slower: float = SLOWER) -> float:
    """Return the most seconds that 95 % of the answers may take; infinite where nothing says so.

    Args:
        terms: What the new version must keep to.
        old_p95_s: 95th percentile of the old one; 0 where there is none.
        slower: How many times that is allowed.
    """
    if terms.max_latency_ms:
        return terms.max_latency_ms / 1000
    return max(slower * old_p95_s, old_p95_s + SLACK_S) if old_p95_s else math.inf


def judge(before: Figures, now: Figures, deaths: int, terms: UpdateTerms) -> str:
    """Return why a version does worse than the one before it; empty where it does not.

    Args:
        before: Of the old version, when it was switched; all 0 where there was none, or nobody knows any more.
        now: Of the new one, since it was loaded.
        deaths: How often the process that serves died since the switch.
        terms: What it must keep to.
    """
    if deaths:
        return f"crashes: the inference process died {deaths} times in its trial"
    if now.non_finite and not before.non_finite:
        return f"finite: {now.non_finite} of {now.requests} answers held NaN or infinity"
    usual = _error_rate(before)
    if now.errors >= LEAST_ERRORS and _error_rate(now) > usual + MORE_ERRORS:
        return f"errors: {now.errors} of {now.requests} requests failed, before it {usual:.1%}"
    old_p95_s = before.p95_s if before.requests >= LEAST_REQUESTS else 0.0
    limit = latency_limit(terms, old_p95_s, SLOWER_AT_WORK)
    if now.requests >= LEAST_REQUESTS and now.p95_s > limit:
        return f"latency: 95 % of its answers took up to {now.p95_s * 1e3:.2f} ms, and {limit * 1e3:.2f} are allowed"
    return ""


def _error_rate(figures: Figures) -> float:
    return figures.errors / figures.requests if figures.requests else 0.0

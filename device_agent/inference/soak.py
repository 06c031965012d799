"""Acceptance rules of a trial: error rate, latency and restarts against before.

Pure functions; times are in seconds.
"""

from __future__ import annotations

import math

from device_agent.inference.messages import Figures
from shared.protocol.update import UpdateTerms

SLOWER = 1.5
"""Allowed ratio of the 95th percentiles, measured in alternation under equal load."""
SLOWER_AT_WORK = 3.0
"""Allowed ratio in service: training beside it, absent before the switch, may double latencies."""
SLACK_S = 0.001
"""Allowed increase for models that answer in microseconds on a busy board."""
LEAST_REQUESTS = 20
"""Requests needed for a meaningful percentile."""
LEAST_ERRORS, MORE_ERRORS = 3, 0.01
"""Errors that count as a fault: at least this many, and this much above the old error rate."""


def compute_latency_limit(terms: UpdateTerms, old_p95_s: float, slower: float = SLOWER) -> float:
    """Return the allowed 95th percentile in seconds; infinite if there is no limit.

    Args:
        old_p95_s: 95th percentile of the old version; 0 if there is none.
        slower: Allowed ratio to it.
    """
    if terms.max_latency_ms:
        return terms.max_latency_ms / 1000
    return max(slower * old_p95_s, old_p95_s + SLACK_S) if old_p95_s else math.inf


def judge_trial(before: Figures, now: Figures, deaths: int, terms: UpdateTerms) -> str:
    """Return why a version is worse than its predecessor; empty if it is not.

    Args:
        before: Figures of the old version at the switch; zeros if there was none or they are lost.
        now: Figures of the new version since it was loaded.
        deaths: Deaths of the inference process since the switch.
    """
    if deaths:
        return f"crashes: the inference process died {deaths} times in its trial"
    if now.non_finite and not before.non_finite:
        return f"finite: {now.non_finite} of {now.requests} answers contained NaN or infinity"
    usual = _error_rate(before)
    if now.errors >= LEAST_ERRORS and _error_rate(now) > usual + MORE_ERRORS:
        return f"errors: {now.errors} of {now.requests} requests failed; previous version {usual:.1%}"
    old_p95_s = before.p95_s if before.requests >= LEAST_REQUESTS else 0.0
    limit = compute_latency_limit(terms, old_p95_s, SLOWER_AT_WORK)
    if now.requests >= LEAST_REQUESTS and now.p95_s > limit:
        return f"latency: 95th percentile {now.p95_s * 1e3:.2f} ms, allowed {limit * 1e3:.2f} ms"
    return ""


def _error_rate(figures: Figures) -> float:
    return figures.errors / figures.requests if figures.requests else 0.0

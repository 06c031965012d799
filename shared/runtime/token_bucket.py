"""Token bucket: a burst at once, and a rate after it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Tokens of one sender; the caller passes the time, in monotonic seconds.

    Attributes:
        most: Tokens of a full bucket.
        per_s: Tokens added per second.
        tokens: Tokens left at `since`.
    """

    most: float
    per_s: float
    tokens: float
    since: float

    def refill(self, now: float) -> None:
        """Add the tokens of the time since the last refill."""
        self.tokens, self.since = min(self.most, self.tokens + self.per_s * (now - self.since)), now

    def take(self, amount: float, now: float) -> bool:
        """Take tokens; return false, and take none, if there are too few."""
        self.refill(now)
        is_allowed = self.tokens >= amount
        self.tokens -= amount * is_allowed
        return is_allowed

    def give(self, amount: float) -> None:
        """Add tokens, at most until the bucket is full; negative to charge, at most until it is empty."""
        self.tokens = max(0.0, min(self.most, self.tokens + amount))

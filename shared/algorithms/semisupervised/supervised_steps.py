"""Adaptive number K_s of supervised steps; equations (9) and (10).

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. Of observation period n, some rounds long, f^n is the mean
loss, and Delta f^n = f^(n-1) - f^n its decrease:

    I_n = 1 where Delta f_u^n > Delta f_s^n, else 0                                         (9)
    K_s <- max(floor(K_s / alpha), K_min)   where the mean of the last I_n is 0.5 or more   (10)
    K_min = floor(beta |D_l| / |D| K_u), at least 1

Algorithm 1 of the paper evaluates (10) every round, and K_s would fall to a third within three; its code evaluates it
every hundredth, with decreases divided by the number of steps, since K_s itself determines how far a round gets. So
does this; the learning rate, by which the code divides too, is the same on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shared.protocol.messages import Scalar

HALF = 0.5


@dataclass(frozen=True)
class StepRule:
    """Rule by which K_s falls; symbols are the paper's.

    Attributes:
        alpha: Divisor of K_s, above 1.
        beta: Factor of K_min, at least 0.
        period: Rounds of an observation period.
        window: Periods whose I_n count; (10) is evaluated after every `period * window` rounds.
        per_step: Whether decreases are divided by the number of steps.
    """

    alpha: float = 1.5
    beta: float = 8.0
    period: int = 10
    window: int = 10
    per_step: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for values that would raise K_s, or never evaluate (10)."""
        if not 1 < self.alpha < math.inf or not 0 <= self.beta < math.inf:
            raise ValueError("alpha must be above 1 and finite, beta >= 0 and finite")
        if self.period < 1 or self.window < 1:
            raise ValueError("period and window must be >= 1")


def least_steps(rule: StepRule, labelled: int, unlabelled: int, session_steps: int) -> int:
    """Return K_min.

    Args:
        labelled: Examples of the server, |D_l|.
        session_steps: K_u, steps of a session.
    """
    total = labelled + unlabelled
    return max(1, math.floor(rule.beta * labelled * session_steps / total)) if total else 1


@dataclass(frozen=True)
class StepHistory:
    """Observations so far, and the current K_s.

    Attributes:
        steps: K_s, supervised steps of a round.
        supervised: Sum of the losses of the open period's rounds.
        last_supervised: Mean of the previous period; NaN without one.
        faster: The last I_n, the oldest first, as letters 0 or 1.
    """

    steps: int = 100
    rounds: int = 0
    supervised: float = 0.0
    unlabelled: float = 0.0
    last_supervised: float = math.nan
    last_unlabelled: float = math.nan
    faster: str = ""

    def observe(self, rule: StepRule, supervised: float, unlabelled: float, session_steps: int) -> StepHistory:
        """Return the history with another round, K_s unchanged.

        Args:
            supervised: Mean loss f_s of the round.
            unlabelled: Mean loss f_u of the round.
            session_steps: K_u, steps of a session.
        """
        added = replace(
            self,
            rounds=self.rounds + 1,
            supervised=self.supervised + supervised,
            unlabelled=self.unlabelled + unlabelled,
        )
        if added.rounds % rule.period:
            return added
        supervised_mean, unlabelled_mean = added.supervised / rule.period, added.unlabelled / rule.period
        falls = self.last_supervised - supervised_mean, self.last_unlabelled - unlabelled_mean
        if rule.per_step:
            falls = falls[0] / self.steps, falls[1] / session_steps
        letter = "" if math.isnan(self.last_supervised) else str(int(falls[1] > falls[0]))
        return replace(
            added,
            supervised=0.0,
            unlabelled=0.0,
            last_supervised=supervised_mean,
            last_unlabelled=unlabelled_mean,
            faster=(self.faster + letter)[-rule.window :],
        )

    def decide(self, rule: StepRule, least: int) -> StepHistory:
        """Return the history with the next round's K_s; equation (10). It never rises.

        Args:
            least: K_min, lower limit of K_s.
        """
        due = self.rounds > 0 and self.rounds % (rule.period * rule.window) == 0 and len(self.faster) == rule.window
        if not due or self.faster.count("1") < HALF * rule.window:
            return self
        return replace(self, steps=min(self.steps, max(math.floor(self.steps / rule.alpha), least)))

    def facts(self, prefix: str) -> dict[str, Scalar]:
        """Return the history as facts with `prefix` before their names; missing values are omitted."""
        pairs: dict[str, Scalar] = {
            "steps": self.steps,
            "rounds": self.rounds,
            "supervised": self.supervised,
            "unlabelled": self.unlabelled,
            "faster": self.faster,
        }
        if not math.isnan(self.last_supervised):
            pairs |= {"last_supervised": self.last_supervised, "last_unlabelled": self.last_unlabelled}
        return {prefix + name: value for name, value in pairs.items()}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Scalar], prefix: str) -> StepHistory:
        """Read the output of `facts`."""
        fields = {name.removeprefix(prefix): value for name, value in facts.items() if name.startswith(prefix)}
        return cls(**fields)  # type: ignore[arg-type]  # types as written by `facts`

"""Means and sums of a round's loss terms, stored in server state.

Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870, take K_s supervised steps a round and then K_u with the devices.
Terms of supervised steps are stored as means, later ones as sums. A later term is that of a step with the devices, or,
for methods whose devices train locally, that of an update; updates have equal weights, as in the minimised mean loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.protocol.messages import Scalar
from shared.tensors.tree import Mean, State

SUPERVISED, CONTRASTIVE, CONSISTENCY, CLUSTERING = (
    f"{name}_loss" for name in ("supervised", "contrastive", "consistency", "clustering")
)
"""Cross-entropy and T of equation (4), H and C of equation (6); full-model methods use the same names."""
STEPS = "supervised_steps"
"""Figure of a round: number of supervised steps."""
TERMS, SUMS, COUNT = "terms/", "term-sums/", "term-count"
"""Facts: prefixes of the means of supervised steps and of the sums of later terms, and the number of the latter."""


def read_number(facts: Mapping[str, Scalar], name: str) -> float:
    """Return a fact that is a number."""
    value = facts[name]
    assert isinstance(value, int | float)
    return value


def begin_terms(facts: Mapping[str, Scalar], steps: int, means: Mapping[str, float]) -> dict[str, Scalar]:
    """Return the facts for the start of a round, without those of the previous round.

    Args:
        means: Means of their loss terms, by name.
    """
    others = {name: fact for name, fact in facts.items() if not name.startswith((TERMS, SUMS, COUNT))}
    return {**others, **{TERMS + name: mean for name, mean in means.items()}, TERMS + STEPS: steps}


def add_terms(facts: Mapping[str, Scalar], terms: Mapping[str, float]) -> dict[str, Scalar]:
    """Return the facts with the terms of a session step or an update added.

    Args:
        facts: The state's, or those of the updates so far.
    """
    if not terms:
        return {**facts}
    sums = {SUMS + name: read_number({SUMS + name: 0.0, **facts}, SUMS + name) + term for name, term in terms.items()}
    return {**facts, **sums, COUNT: int(read_number({COUNT: 0, **facts}, COUNT)) + 1}


def add_terms_to_mean(mean: Mean, terms: Mapping[str, float]) -> Mean:
    """Return a mean of updates with the terms of another update added."""
    return Mean(mean.total, mean.weight, add_terms(mean.facts, terms))


def extract_terms(mean: Mean) -> dict[str, Scalar]:
    """Return the loss terms in a mean of updates, as facts for the state."""
    return {name: fact for name, fact in mean.facts.items() if name.startswith((SUMS, COUNT))}


def average_terms(state: State) -> dict[str, float]:
    """Return the number of supervised steps of a round, and the means of its loss terms: see `ServerTraining.terms`."""
    facts = state.facts
    means = {name.removeprefix(TERMS): read_number(facts, name) for name in facts if name.startswith(TERMS)}
    for name in facts:
        if name.startswith(SUMS):
            means[name.removeprefix(SUMS)] = read_number(facts, name) / read_number(facts, COUNT)
    return means

"""Loss terms of a round, as facts of the server's state: means of the supervised steps, sums over all that follows.

Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870, take K_s supervised steps a round and then K_u with the devices;
what follows is such a step, or, of a method whose devices train by themselves, an update. Of the latter each counts as
much, as in the mean of the losses that a round brings down.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.protocol.messages import Scalar
from shared.tensors.tree import Mean, State

SUPERVISED, CONTRASTIVE, CONSISTENCY, CLUSTERING = (
    f"{name}_loss" for name in ("supervised", "contrastive", "consistency", "clustering")
)
"""Cross-entropy and T of equation (4), H and C of equation (6); full-model methods use these names, too."""
STEPS = "supervised_steps"
"""Among the figures of a round: how many there were."""
TERMS, SUMS, COUNT = "terms/", "term-sums/", "term-count"
"""Facts: begin the means of the supervised steps, and the sums of all that followed; of how many these are."""


def number_fact(facts: Mapping[str, Scalar], name: str) -> float:
    """Return a fact that is a number."""
    value = facts[name]
    assert isinstance(value, int | float)
    return value


def begun(facts: Mapping[str, Scalar], steps: int, means: Mapping[str, float]) -> dict[str, Scalar]:
    """Return facts as a round begins with them: nothing is left of the round before.

    Args:
        steps: Supervised steps of this round.
        means: Of their loss terms, by name.
    """
    kept = {name: fact for name, fact in facts.items() if not name.startswith((TERMS, SUMS, COUNT))}
    return {**kept, **{TERMS + name: mean for name, mean in means.items()}, TERMS + STEPS: steps}


def added(facts: Mapping[str, Scalar], terms: Mapping[str, float]) -> dict[str, Scalar]:
    """Return facts to which the terms of a step of the session, or of an update, are added; none of them: as they are.

    Args:
        facts: The state's, or those of the updates so far.
    """
    if not terms:
        return {**facts}
    sums = {SUMS + name: number_fact({SUMS + name: 0.0, **facts}, SUMS + name) + one for name, one in terms.items()}
    return {**facts, **sums, COUNT: int(number_fact({COUNT: 0, **facts}, COUNT)) + 1}


def absorb_terms(mean: Mean, terms: Mapping[str, float]) -> Mean:
    """Return a mean of updates that knows the terms of one more."""
    return Mean(mean.total, mean.weight, added(mean.facts, terms))


def terms_of(mean: Mean) -> dict[str, Scalar]:
    """Return what updates told of their terms, as facts of the state that their mean becomes a part of."""
    return {name: fact for name, fact in mean.facts.items() if name.startswith((SUMS, COUNT))}


def round_terms(state: State) -> dict[str, float]:
    """Return the supervised steps of a round, and the means of its loss terms: see `ServerTraining.terms`."""
    facts = state.facts
    means = {name.removeprefix(TERMS): number_fact(facts, name) for name in facts if name.startswith(TERMS)}
    for name in facts:
        if name.startswith(SUMS):
            means[name.removeprefix(SUMS)] = number_fact(facts, name) / number_fact(facts, COUNT)
    return means

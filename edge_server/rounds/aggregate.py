"""Aggregate a round's updates: folded one by one from their files, those left out that are far beyond the median.

One update must not spoil the model of all, whether its device has diverged or means harm. What an update is allowed is
told by the others of its round: their median is no one device's to choose. Norms were taken when the updates were
checked; only where one is beyond its bound are the others folded anew, from the same files and in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from edge_server.plan.plan import RoundPlan
from edge_server.rounds.check_update import read
from edge_server.rounds.collect_updates import Gather
from shared.algorithms.base import Algorithm
from shared.errors import WireError
from shared.protocol.messages import Assignment
from shared.tensors.tree import Mean, State, check_like, tree_norm

log = logging.getLogger(__name__)

OVERFLOWS = 1e18
"""Norm of an update from which on sums, squares and weights may be beyond float32; no training gives such a one."""


class Folded(NamedTuple):
    """Updates folded into one mean.

    Attributes:
        norms: Euclidean norm of each update's floating-point values, by device; infinite beyond float32.
        held: Names of all leaves that an update had.
    """

    mean: Mean
    norms: dict[str, float]
    held: set[str]


def aggregate_updates(
    algorithm: Algorithm, state: State, assignments: Mapping[str, Assignment], gather: Gather, rule: RoundPlan
) -> State | None:
    """Return the state after a round, None where too few updates are left; those left out fail, with the cause.

    Args:
        state: The server's, before the round.
        rule: Its bounds, and how many updates a round needs.

    Raises:
        WireError: The sum is no model.
    """
    beyond = _examples_beyond(gather, rule.most_examples) | _deleted(gather)
    folded = _fold(algorithm, state, assignments, gather, beyond)
    if large := _norms_beyond(folded, state, rule.most_norm):
        beyond |= large
        del folded
        folded = _fold(algorithm, state, assignments, gather, beyond)
    _leave_out(gather, beyond)
    if len(folded.norms) < rule.min_updates:
        return None
    norms = folded.norms
    try:
        return _aggregated(algorithm, state, folded.mean)
    except WireError as error:
        del folded  # the mean was used up
        causes = _causes_of_overflow(norms, error)
        if not causes:
            raise
        _leave_out(gather, causes)
    folded = _fold(algorithm, state, assignments, gather, beyond.keys() | causes.keys())
    if len(folded.norms) < rule.min_updates:
        return None
    return _aggregated(algorithm, state, folded.mean)


def _aggregated(algorithm: Algorithm, state: State, mean: Mean) -> State:
    after = algorithm.aggregate(state, mean)
    check_like(after.tree, after.tree)
    return after


def _leave_out(gather: Gather, causes: Mapping[str, str]) -> None:
    for device, cause in causes.items():
        log.warning("round %d: the update of %s is left out: %s", gather.number, device, cause)
        gather.failed[device] = f"left out: {cause}"


def _causes_of_overflow(norms: Mapping[str, float], error: WireError) -> dict[str, str]:
    """Return whose updates make the sum overflow, by their norms: those near the largest, each finite by itself."""
    largest = max(norms.values(), default=0.0)
    if largest < OVERFLOWS:
        return {}
    return {
        device: f"its norm {norm:.3g} makes the aggregate diverge: {error}"
        for device, norm in norms.items()
        if norm >= OVERFLOWS
    }


def _fold(
    algorithm: Algorithm,
    state: State,
    assignments: Mapping[str, Assignment],
    gather: Gather,
    left_out: Collection[str],
) -> Folded:
    """Fold the stored updates one at a time, in order of device: the sum does not depend on who came first."""
    folded = Folded(algorithm.empty(state), {}, set())
    for device in sorted(gather.accepted.keys() - set(left_out)):
        update = read(gather.path(device), gather.accepted[device].update, gather.codec)
        norm = gather.norms.get(device)
        folded.norms[device] = tree_norm(update.tree) if norm is None else norm
        folded.held.update(update.tree)
        folded = folded._replace(mean=algorithm.absorb(folded.mean, device, assignments[device], update))
        del update  # its pages are the file's; the next one needs the room
    return folded


def _deleted(gather: Gather) -> dict[str, str]:
    """Return whose stored update somebody has deleted meanwhile."""
    return {device: "its stored update was deleted" for device in gather.accepted if not gather.path(device).exists()}


def _examples_beyond(gather: Gather, most: float) -> dict[str, str]:
    """Return who claims far more examples than the others of the round, and by how much."""
    claimed = {device: float(record.update.num_examples) for device, record in gather.accepted.items()}
    median = median_of(claimed.values())
    return {
        device: f"{count:.0f} examples are more than {most:g} times the round's median of {median:g} "
        "(round.most_examples)"
        for device, count in sorted(claimed.items())
        if most and median and count > most * median
    }


def _norms_beyond(folded: Folded, state: State, most: float) -> dict[str, str]:
    """Return whose update is far larger than the others of the round, and larger than the model itself."""
    median = median_of(folded.norms.values())
    large = {device: norm for device, norm in folded.norms.items() if most and median and norm > most * median}
    if not large:
        return {}
    own = tree_norm({name: state.tree[name] for name in folded.held & state.tree.keys()})
    return {
        device: f"its norm {norm:.3g} is more than {most:g} times the round's median of {median:.3g} (round.most_norm)"
        for device, norm in large.items()
        if norm > own
    }


def median_of(values: Collection[float]) -> float:
    """Return the median of the values above zero, of two in the middle the lower; 0 where there are none."""
    counted = sorted(value for value in values if value > 0)
    return counted[(len(counted) - 1) // 2] if counted else 0.0

"""Aggregation of a round's updates, with a median bound against outliers.

A diverged or malicious device must not spoil the model of all. The bound of an update is the median of its round, which
no single device chooses. Norms were computed when the updates were checked; only if one exceeds its bound are the
others folded again, from the same files and in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

from edge_server.plan.plan import RoundPlan
from edge_server.rounds.check_update import read_update
from edge_server.rounds.collect_updates import Gather
from shared.algorithms.base import Algorithm
from shared.errors import WireError
from shared.protocol.messages import Assignment
from shared.tensors.tree import Mean, State, check_like, tree_norm

log = logging.getLogger(__name__)

OVERFLOWS = 1e18
"""Update norm above which sums, squares and weights may overflow float32; no training produces one."""


class UpdateFold(NamedTuple):
    """Sum of a round's updates.

    Attributes:
        norms: Euclidean norm of each update's floating-point values, by device; infinite beyond float32.
        leaves: Names of the leaves that occur in any update.
        deleted: Devices whose stored update no longer exists.
    """

    mean: Mean
    norms: dict[str, float]
    leaves: set[str]
    deleted: set[str]


def aggregate_updates(
    algorithm: Algorithm, state: State, assignments: Mapping[str, Assignment], gather: Gather, rule: RoundPlan
) -> State | None:
    """Return the state after a round, None if too few updates remain; rejected devices are marked as failed.

    Args:
        state: The server state before the round.
        rule: Bounds on norms and examples, and the minimum number of updates.

    Raises:
        WireError: The aggregate is not finite.
    """
    beyond = _find_excess_examples(gather, rule.most_examples)
    folded = _fold(algorithm, state, assignments, gather, beyond)
    if large := _find_excess_norms(folded, state, rule.most_norm):
        beyond |= large
        del folded
        folded = _fold(algorithm, state, assignments, gather, beyond)
    _leave_out(gather, beyond | dict.fromkeys(folded.deleted, "its stored update was deleted"))
    if len(folded.norms) < rule.min_updates:
        return None
    norms = folded.norms
    try:
        return _apply_mean(algorithm, state, folded.mean)
    except WireError as error:
        del folded  # aggregation consumed the mean
        causes = _explain_overflow(norms, error)
        if not causes:
            raise
        _leave_out(gather, causes)
    folded = _fold(algorithm, state, assignments, gather, beyond.keys() | causes.keys())
    if len(folded.norms) < rule.min_updates:
        return None
    return _apply_mean(algorithm, state, folded.mean)


def _apply_mean(algorithm: Algorithm, state: State, mean: Mean) -> State:
    after = algorithm.aggregate(state, mean)
    check_like(after.tree, after.tree)
    return after


def _leave_out(gather: Gather, causes: Mapping[str, str]) -> None:
    for device, cause in causes.items():
        log.warning("round %d: update of %s excluded: %s", gather.number, device, cause)
        gather.failed[device] = f"left out: {cause}"


def _explain_overflow(norms: Mapping[str, float], error: WireError) -> dict[str, str]:
    """Return the devices whose norms make the sum overflow, with the cause; each update is finite by itself."""
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
) -> UpdateFold:
    """Fold the stored updates in order of device name, so that the sum does not depend on arrival order."""
    folded = UpdateFold(algorithm.empty(state), {}, set(), set())
    for device in sorted(gather.accepted.keys() - set(left_out)):
        try:
            content = gather.content(device)
        except FileNotFoundError:
            folded.deleted.add(device)
            continue
        update = read_update(content, gather.accepted[device].update, gather.codec)
        norm = gather.norms.get(device)
        folded.norms[device] = tree_norm(update.tree) if norm is None else norm
        folded.leaves.update(update.tree)
        folded = folded._replace(mean=algorithm.absorb(folded.mean, device, assignments[device], update))
        del update, content  # unmap the file before the next one
    return folded


def _find_excess_examples(gather: Gather, most: float) -> dict[str, str]:
    """Return the devices that claim far more examples than the round's median, with the cause."""
    claimed = {device: float(record.update.num_examples) for device, record in gather.accepted.items()}
    median = lower_median(claimed.values())
    return {
        device: f"{count:.0f} examples are more than {most:g} times the round's median of {median:g} "
        "(round.most_examples)"
        for device, count in sorted(claimed.items())
        if most and median and count > most * median
    }


def _find_excess_norms(folded: UpdateFold, state: State, most: float) -> dict[str, str]:
    """Return the devices whose update is far larger than the round's median, and larger than the model itself."""
    median = lower_median(folded.norms.values())
    large = {device: norm for device, norm in folded.norms.items() if most and median and norm > most * median}
    if not large:
        return {}
    model_norm = tree_norm({name: state.tree[name] for name in folded.leaves & state.tree.keys()})
    return {
        device: f"its norm {norm:.3g} is more than {most:g} times the round's median of {median:.3g} (round.most_norm)"
        for device, norm in large.items()
        if norm > model_norm
    }


def lower_median(values: Collection[float]) -> float:
    """Return the median of the positive values, the lower of two in the middle; 0 without any."""
    counted = sorted(value for value in values if value > 0)
    return counted[(len(counted) - 1) // 2] if counted else 0.0

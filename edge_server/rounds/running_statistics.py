"""BatchNorm running statistics, measured by devices in a session without training.

Statistics left by training do not fit the tested network: above the cut of a split network they come from features of
which some were dropped, and an average over devices with different data matches none of them. So the round's devices
measure before each server test and after the last round; see `shared.models.running_statistics`. Results are averaged
by batches: `python tests/benchmarks/running_statistics.py --methods` shows that the variance of the means need not be
added.

In a split network the devices send all features of the batches, and the server's part measures itself on them. To a
device that session is training in which no step counts, since each is answered without a loss. Therefore an older agent
can take part; the averaged statistics of its own part then stay unchanged. For other networks it sends nothing back and
does not count. With personal models each device measures before it evaluates, as its task says, without a session.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import msgspec

from edge_server.learner import blank_network
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.rounds.aggregate import lower_median
from edge_server.rounds.check_update import read_update
from edge_server.rounds.collect_updates import Gather
from shared.algorithms.base import Algorithm, Cohort, Split, assign_alike, evaluated_parameters
from shared.models.base import Model
from shared.models.running_statistics import has_batch_norm, statistic_names
from shared.protocol.messages import LOSSLESS, MERGES_SINGLE, STATISTICS, STATISTICS_BATCHES, Assignment
from shared.tensors.tree import Mean, State, Tree, accumulate, finish_mean, tree_norm

log = logging.getLogger(__name__)

USUAL_BATCHES = 16
"""Default number of batches. By VGG-13 of deploy/plans/fedsl.toml at 785d729, whose stored statistics gave 0.417: 2
batches give 0.476, 8 give 0.482, 16 give 0.484, 94 give 0.485.
"""


def choose_batches(plan: Plan, algorithm: Algorithm) -> int:
    """Return the number of batches that a new run measures; 0 if there is nothing to measure, or the plan disables it.

    A run recorded before this existed has no number and continues without.
    """
    batches = plan.evaluation.statistics_batches
    if isinstance(batches, int) or not _can_measure(algorithm) or not statistic_names(blank_network(plan).layers):
        return plan.evaluation.measured_batches
    return USUAL_BATCHES


def set_batches(plan: Plan, batches: int) -> Plan:
    """Return a plan with a given number of measured batches."""
    return msgspec.structs.replace(
        plan, evaluation=msgspec.structs.replace(plan.evaluation, statistics_batches=batches)
    )


def _can_measure(algorithm: Algorithm) -> bool:
    """Return true if devices can measure the evaluated model; not if it is other than the one that they train."""
    if algorithm.split:
        return algorithm.split.measure is not None
    return algorithm.server is None and algorithm.program is None and algorithm.evaluated is None


def due_steps(plan: Plan, algorithm: Algorithm, model: Model, state: State, devices: int) -> int:
    """Return the batches that each device measures of the server's model; 0 if there is nothing to measure.

    Personal models are skipped: the server's model is not the one in use.

    Args:
        devices: Number of devices that take part.
    """
    batches, names = plan.evaluation.measured_batches, statistic_names(model.layers)
    if not devices or not batches or not names or algorithm.personal or not _can_measure(algorithm):
        return 0
    if (
        not {name for name, _ in model.layers.named_parameters()}
        <= evaluated_parameters(algorithm, model, state).keys()
    ):
        return 0
    return -(-batches // devices)


def request_statistics(
    plan: Plan, algorithm: Algorithm, model: Model, assignments: Mapping[str, Assignment]
) -> dict[str, Assignment]:
    """Add to tasks of personal models the number of batches to measure before evaluation."""
    personal, batches = algorithm.personal, plan.evaluation.measured_batches
    if not personal or not personal.own_statistics or not batches or not statistic_names(model.layers):
        return dict(assignments)
    return _add_value(assignments, STATISTICS_BATCHES, batches)


def request_merging(model: Model, assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Add to tasks of BatchNorm networks that a last batch of one example is merged into the one before."""
    if not has_batch_norm(model.layers):
        return dict(assignments)
    return _add_value(assignments, MERGES_SINGLE, True)


def _add_value(assignments: Mapping[str, Assignment], name: str, value: float) -> dict[str, Assignment]:
    return {
        device: msgspec.structs.replace(task, values={**task.values, name: value})
        for device, task in assignments.items()
    }


def session_plan(plan: Plan, split: Split | None) -> Plan:
    """Return a plan by which devices send every feature, losslessly."""
    options = {**plan.algorithm.options, **(split.statistics_options if split else {})}
    dense = Chosen(name=LOSSLESS.name)
    chosen = Chosen(name=plan.algorithm.name, options=options)
    return msgspec.structs.replace(plan, algorithm=chosen, codec=dense, cut_codec=dense)


def session_number(plan: Plan, after: int) -> int:
    """Return the task number of the measurement after a round; it is above all round numbers."""
    return plan.rounds + 1 + after


def session_assignments(
    plan: Plan, algorithm: Algorithm, state: State, devices: Sequence[str], *, number: int, steps: int
) -> dict[str, Assignment]:
    """Return the tasks of a measuring session: measure, or send the features of some batches.

    Args:
        plan: As returned by `session_plan`.
        algorithm: Built from this plan.
    """
    cohort = Cohort(tuple(devices), plan.hyper_of(number), plan.seed, plan.rounds)
    if not algorithm.split:
        values = {STATISTICS: True, STATISTICS_BATCHES: steps}
        return assign_alike(state, cohort, dict.fromkeys(devices, values), number)
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=steps)
    assignments = _add_value(algorithm.assign(state, cohort, {}, number), STATISTICS, True)
    return {device: msgspec.structs.replace(task, steps=steps, hyper=hyper) for device, task in assignments.items()}


def fold_statistics(
    model: Model, state: State, top: State | None, gather: Gather, *, most_norm: float
) -> tuple[State, int]:
    """Return the state with the measured statistics, and the number of batches.

    Args:
        top: State after the last step of a split session; None for any other.
        gather: The devices' updates, with the statistics of their part.
        most_norm: `RoundPlan.most_norm`, applied to statistics as to updates.
    """
    names, mean, counted = statistic_names(model.layers), Mean(), 0
    for device, statistics in _drop_outliers(_read_statistics(names, gather), state, most_norm).items():
        batches = min(gather.accepted[device].update.metrics[STATISTICS_BATCHES], _assigned_batches(gather, device))
        if batches > 0 and all(leaf.min() >= 0 for name, leaf in statistics.items() if name.endswith("_var")):
            mean, counted = accumulate(mean, statistics, batches), counted + int(batches)
    measured = finish_mean(mean)
    if top:
        served = top.facts.get(STATISTICS_BATCHES, 0)
        counted = served if isinstance(served, int) else 0
        measured = {name: top.tree[name] for name in names} | measured
    if not counted:
        log.warning("no device measured running statistics in time; those of the training stay")
        return state, 0
    return State({**state.tree, **measured}, state.facts), counted


def _assigned_batches(gather: Gather, device: str) -> int:
    return gather.expected[device].batches_to_measure


def _read_statistics(names: Collection[str], gather: Gather) -> dict[str, Tree]:
    """Return each device's statistics, in order of name; log the devices whose agents cannot measure."""
    statistics, unaware = dict[str, Tree](), list[str]()
    for device, record in sorted(gather.accepted.items()):
        if record.update.params is None or STATISTICS_BATCHES not in record.update.metrics:
            unaware.append(device)
            continue
        tree = read_update(gather.content(device), record.update, gather.codec).tree
        statistics[device] = {name: leaf for name, leaf in tree.items() if name in names}
    if unaware:
        log.info("%s: the agent is too old to measure running statistics; update it", ", ".join(unaware))
    return statistics


def _drop_outliers(statistics: Mapping[str, Tree], state: State, most: float) -> dict[str, Tree]:
    """Return the statistics whose norm does not far exceed both the median and the stored ones."""
    norms = {device: tree_norm(tree) for device, tree in statistics.items()}
    median = lower_median(norms.values())
    stored = {device: tree_norm({name: state.tree[name] for name in tree}) for device, tree in statistics.items()}
    beyond = {device for device, norm in norms.items() if most and median and norm > max(most * median, stored[device])}
    if beyond:
        log.warning(
            "running statistics of %s are left out: more than %g times the median (round.most_norm)",
            ", ".join(sorted(beyond)),
            most,
        )
    return {device: tree for device, tree in statistics.items() if device not in beyond}

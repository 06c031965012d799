"""A session in which BatchNorm's running statistics are measured anew: devices pass some batches, and nobody trains.

Those that training leaves are not of the network that is tested, kept and handed on: above the cut of a split network
they are of features of which some were dropped, and an average over devices whose data differ was measured by none of
them. So before the server tests, and after the last round, the devices of the round measure; see
`shared.models.running_statistics`. What they find is averaged by batches: `python
tests/benchmarks/running_statistics.py --methods` shows that no variance of their means need be added.

Of a split network the devices send the features of the batches, all of them, and the server's part measures itself on
these. To a device that session is one of training in which no step counts, since each is answered without a loss. An
agent of before takes part in it for that reason; the averaged statistics of its own part then stay as they are. Of
another network it sends nothing back, and does not count. Where devices have models of their own, each measures before
it evaluates, without a session: it is told so with the task.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import msgspec

from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.rounds.aggregate import median_of
from edge_server.rounds.check_update import read
from edge_server.rounds.collect_updates import Gather
from shared.algorithms.base import Algorithm, Cohort, Split, assign_alike
from shared.models.base import Model
from shared.models.build import blank
from shared.models.running_statistics import has_batch_norm, statistics_of
from shared.protocol.messages import LOSSLESS, MERGES_SINGLE, STATISTICS, STATISTICS_BATCHES, Assignment
from shared.tensors.tree import Mean, State, Tree, accumulate, finish_mean, tree_norm

log = logging.getLogger(__name__)

USUAL_BATCHES = 16
"""Where a plan does not say. By VGG-13 of deploy/plans/fedsl.toml at 785d729, whose stored statistics gave 0.417: 2
batches give 0.476, 8 give 0.482, 16 give 0.484, 94 give 0.485."""


def batches_of(plan: Plan, algorithm: Algorithm) -> int:
    """Return over how many batches a new run measures; 0 where there is nothing to measure, or its plan leaves it out.

    A run of before says none in its record, and goes on without.
    """
    told = plan.evaluation.statistics_batches
    if isinstance(told, int) or not _is_able(algorithm) or not statistics_of(blank(plan.model).layers):
        return plan.evaluation.measured_batches
    return USUAL_BATCHES


def settle_batches(plan: Plan, batches: int) -> Plan:
    """Return a plan that says over how many batches its run measures."""
    return msgspec.structs.replace(
        plan, evaluation=msgspec.structs.replace(plan.evaluation, statistics_batches=batches)
    )


def _is_able(algorithm: Algorithm) -> bool:
    """Tell whether a method has a model that devices can measure; one that the server trains as well has none yet."""
    return algorithm.split.measure is not None if algorithm.split else algorithm.server is None


def due_steps(plan: Plan, algorithm: Algorithm, model: Model, state: State, devices: int) -> int:
    """Return the batches of each device in a measurement of the server's model; 0 where there is nothing to measure.

    Args:
        algorithm: Its method. Where devices have models of their own, the server's is not what is used.
        devices: How many take part.
    """
    batches, names = plan.evaluation.measured_batches, statistics_of(model.layers)
    if not devices or not batches or not names or algorithm.personal or not _is_able(algorithm):
        return 0
    if not {name for name, _ in model.layers.named_parameters()} <= state.tree.keys():
        return 0
    return -(-batches // devices)


def tell_devices(
    plan: Plan, algorithm: Algorithm, model: Model, told: Mapping[str, Assignment]
) -> dict[str, Assignment]:
    """Tell devices with models of their own over how many batches to measure before they evaluate.

    Args:
        told: What they are told besides.
    """
    personal, batches = algorithm.personal, plan.evaluation.measured_batches
    if not personal or not personal.own_statistics or not batches or not statistics_of(model.layers):
        return dict(told)
    return {
        device: msgspec.structs.replace(one, values={**one.values, STATISTICS_BATCHES: batches})
        for device, one in told.items()
    }


def tell_merging(model: Model, told: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Tell devices to merge a last batch of one example into the one before it, where the network has BatchNorm.

    Args:
        told: What they are told besides.
    """
    if not has_batch_norm(model.layers):
        return dict(told)
    return {
        device: msgspec.structs.replace(one, values={**one.values, MERGES_SINGLE: True}) for device, one in told.items()
    }


def session_plan(plan: Plan, split: Split | None) -> Plan:
    """Return a plan by whose method devices send every feature, and by whose codecs all travels as it is."""
    options = {**plan.algorithm.options, **(split.undropped if split else {})}
    dense = Chosen(name=LOSSLESS.name)
    chosen = Chosen(name=plan.algorithm.name, options=options)
    return msgspec.structs.replace(plan, algorithm=chosen, codec=dense, cut_codec=dense)


def session_number(plan: Plan, after: int) -> int:
    """Return the number of the tasks of the measurement after a round; it is beyond all rounds."""
    return plan.rounds + 1 + after


def session_assignments(
    plan: Plan, algorithm: Algorithm, state: State, devices: Sequence[str], *, number: int, steps: int
) -> dict[str, Assignment]:
    """Tell every device to measure, or to send the features of some batches.

    Args:
        plan: As `session_plan` returns it.
        algorithm: That of this plan.
    """
    cohort = Cohort(tuple(devices), plan.hyper, plan.seed, plan.rounds)
    if not algorithm.split:
        values = {STATISTICS: True, STATISTICS_BATCHES: steps}
        return assign_alike(state, cohort, dict.fromkeys(devices, values), number)
    hyper = msgspec.structs.replace(plan.hyper, local_epochs=steps)
    return {
        device: msgspec.structs.replace(one, steps=steps, hyper=hyper, values={**one.values, STATISTICS: True})
        for device, one in algorithm.assign(state, cohort, {}, number).items()
    }


def fold_statistics(
    model: Model, state: State, top: State | None, gather: Gather, *, most_norm: float
) -> tuple[State, int]:
    """Return the state with the statistics that were measured, and over how many batches.

    Args:
        top: After the last step of a split session; None of any other.
        gather: The devices' updates, with the statistics of their part; a mean by batches.
        most_norm: `RoundPlan.most_norm`, of statistics as of updates.
    """
    names, mean, counted = statistics_of(model.layers), Mean(), 0
    for device, own in _within(_told_statistics(names, gather), state, most_norm).items():
        batches = min(gather.accepted[device].update.metrics[STATISTICS_BATCHES], _asked(gather, device))
        if batches > 0 and all(leaf.min() >= 0 for name, leaf in own.items() if name.endswith("_var")):
            mean, counted = accumulate(mean, own, batches), counted + int(batches)
    measured = finish_mean(mean)
    if top:
        served = top.facts.get(STATISTICS_BATCHES, 0)
        counted = served if isinstance(served, int) else 0
        measured = {name: top.tree[name] for name in names} | measured
    if not counted:
        log.warning("nobody measured running statistics in time: they stay as training left them")
        return state, 0
    return State({**state.tree, **measured}, state.facts), counted


def _asked(gather: Gather, device: str) -> int:
    return gather.expected[device].batches_to_measure


def _told_statistics(names: Collection[str], gather: Gather) -> dict[str, Tree]:
    """Return what each device measured, in order of name; the log says whose agents cannot."""
    found, unaware = dict[str, Tree](), list[str]()
    for device, record in sorted(gather.accepted.items()):
        if record.update.params is None or STATISTICS_BATCHES not in record.update.metrics:
            unaware.append(device)
            continue
        tree = read(gather.path(device), record.update, gather.codec).tree
        found[device] = {name: leaf for name, leaf in tree.items() if name in names}
    if unaware:
        log.info("%s: an agent of before, which measures no running statistics; update it", ", ".join(unaware))
    return found


def _within(found: Mapping[str, Tree], state: State, most: float) -> dict[str, Tree]:
    """Return what is not far beyond the median, and beyond what is stored: one device must not spoil the model."""
    norms = {device: tree_norm(own) for device, own in found.items()}
    median = median_of(norms.values())
    stored = {device: tree_norm({name: state.tree[name] for name in own}) for device, own in found.items()}
    beyond = {device for device, norm in norms.items() if most and median and norm > max(most * median, stored[device])}
    if beyond:
        log.warning(
            "running statistics of %s are left out: more than %g times the median (round.most_norm)",
            ", ".join(sorted(beyond)),
            most,
        )
    return {device: own for device, own in found.items() if device not in beyond}

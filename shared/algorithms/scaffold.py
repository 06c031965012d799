"""SCAFFOLD: FedAvg with local steps corrected by control variates against drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. ICML
2020, algorithm 1 with option II. https://arxiv.org/abs/1910.06378

    device i, K steps from y_i = x:     y_i <- y_i - rate * (g_i(y_i) - c_i + c)
                                        c_i+ = c_i - c + (x - y_i) / (K * rate)
    the same (each step moved y_i so)   c_i+ = 1 / K * sum over the steps of g_i(y_i)
    server, from the devices S:         x <- x + server_rate / |S| * sum_S (y_i - x)
                                        c <- c + 1 / N * sum_S (c_i+ - c_i)

The second form of c_i+ is computed: y_i - x in 32 bits has lost digits that a division by K * rate would bring out. c_i
stays on device i. c travels down beside the network and c_i+ - c_i travels up, so that a round carries twice the
bytes of FedAvg. g includes weight decay. Momentum and other optimizers are refused: with them (x - y_i) / (K * rate) is
not the mean gradient. Buffers, such as running statistics, have no control variate and are averaged.

N is the number of devices whose control variate c contains: those that have taken part, or all as `devices` says.

An update can be lost after the device has stored c_i+: it arrived too late, or was left out. Then c would lack that
change forever, and every later step would be biased. So the server notes the seed of each device's last task whose
update is part of c, and sends it along; a device keeps the control variate before its last task as well, and continues
from the one that c contains.

Between the servers of several sites, x and c are averaged: a site's c then tracks the mean gradient of all sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Batches,
    Cohort,
    Mixing,
    Outcome,
    Result,
    assign_alike,
    network_leaves,
)
from shared.algorithms.fedavg import fedavg, local_sgd, mix
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Scalar
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree, check_like

CONTROL = "control/"
"""Prefix of c in a download, of c_i+ - c_i in an update, of c_i on a device; and of the seeds in the server's facts."""
EARLIER = "earlier/"
"""Prefix of a device's control variate before its last task."""
LAST, BEFORE_LAST = "last_seed", "before_last_seed"
"""Facts of a device: seeds of the tasks that led to either control variate."""
COUNTED = "counted_seed"
"""Value of a task: seed of the device's last task whose update c contains."""


@dataclass(frozen=True)
class ScaffoldSettings:
    """Settings of the method.

    Attributes:
        server_learning_rate: Share of the mean change by which the model moves, above 0.
        devices: N, the number of all devices; 0: those that have taken part so far.
        weighting: Weight of a device's change in the mean: `uniform`, equal for all as in the paper, or by `examples`,
            as in FedAvg.
    """

    server_learning_rate: float = 1.0
    devices: int = 0
    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        if not 0 < self.server_learning_rate < math.inf:
            raise ValueError(f"server_learning_rate is {self.server_learning_rate}, it must be above 0 and finite")
        if self.devices < 0:
            raise ValueError(f"devices is {self.devices}, it must be at least 0")
        if self.weighting not in ("uniform", "examples"):
            raise ValueError(f"weighting is {self.weighting!r}, it must be one of uniform, examples")


def init(model: Model, _seed: int) -> State:
    """Return the model, and c = 0 for every trained parameter."""
    network = {name: leaf.clone() for name, leaf in model.tree().items()}
    return State({**network, **{name: torch.zeros_like(leaf) for name, leaf in _control_outline(model).items()}})


def _control_outline(model: Model) -> Tree:
    """Return the trained parameters by the names of their control variates."""
    weights = model.layers.named_parameters()
    return {CONTROL + name: leaf.detach() for name, leaf in weights if leaf.requires_grad}


def _take(leaves: Mapping[str, Tensor], prefix: str) -> Tree:
    return {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}


def _broadcast(state: State, _device: str, _assignment: Assignment) -> Tree:
    return {
        **network_leaves(state.tree),
        **{name: leaf for name, leaf in state.tree.items() if name.startswith(CONTROL)},
    }


def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
    """Assign every device the seed of its last task that counted, if any did."""
    assignments = assign_alike(state, cohort, allocation, number)
    for device, assignment in assignments.items():
        if (seed := state.facts.get(CONTROL + device)) is not None:
            values = {**assignment.values, COUNTED: seed}
            assignments[device] = msgspec.structs.replace(assignment, values=values)
    return assignments


def local(model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment) -> Outcome:
    """Device half: see `Algorithm.local`.

    Raises:
        WireError: The download is not the network and its control variate.
    """
    like = {**model.tree(), **_control_outline(model)}
    check_like(start, like)
    if missing := sorted(like.keys() - start.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
    common, (before, seed) = _take(start, CONTROL), _control_that_counts(state, assignment)
    correction = {name: leaf - before[name] if name in before else leaf.clone() for name, leaf in common.items()}
    sums, steps = {name: torch.zeros_like(leaf) for name, leaf in common.items()}, 0

    @torch.no_grad()
    def correct(layers: nn.Module, _start: Tree) -> None:
        nonlocal steps
        steps += 1
        for name, weight in layers.named_parameters():
            if weight.grad is not None:
                sums[name].add_(weight.grad).add_(weight, alpha=assignment.hyper.weight_decay)
                weight.grad.add_(correction[name])

    _, result = local_sgd(model, State(), network_leaves(start), batches, assignment, correct)
    after = {name: before.get(name, torch.zeros_like(leaf)) for name, leaf in common.items()}
    if steps:
        after = {name: gradients.div_(steps) for name, gradients in sums.items()}
    control_changes = {
        CONTROL + name: leaf - before[name] if name in before else leaf.clone() for name, leaf in after.items()
    }
    controls = {CONTROL + name: leaf for name, leaf in after.items()} | {
        EARLIER + name: leaf for name, leaf in before.items()
    }
    facts: dict[str, Scalar] = {LAST: assignment.seed}
    if seed is not None:
        facts[BEFORE_LAST] = seed
    return State(controls, facts), replace(result, tree={**result.tree, **control_changes})


def _control_that_counts(state: State, assignment: Assignment) -> tuple[Tree, int | None]:
    """Return the device's control variate that c contains, empty for zero, and the seed of the task that led to it."""
    seed = assignment.values.get(COUNTED)
    if not isinstance(seed, int):
        return {}, None
    if state.facts.get(BEFORE_LAST) == seed:
        return _take(state.tree, EARLIER), seed
    return _take(state.tree, CONTROL), seed  # also where the server has gone back further: the nearest that is left


def absorb(settings: ScaffoldSettings, mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
    """Add a device's change, and that of its control variate; note that c contains it."""
    share = result.weight if settings.weighting == "examples" else 1.0
    added = tree.accumulate(mean, network_leaves(result.tree), share, result.coverage)
    controls = {name: leaf for name, leaf in result.tree.items() if name.startswith(CONTROL)}
    added = tree.accumulate(added, controls, 1.0)
    return Mean(added.total, added.weight, {**mean.facts, CONTROL + device: assignment.seed})


def aggregate(settings: ScaffoldSettings, state: State, mean: Mean) -> State:
    """Move the model along the mean change, and c by the sum of its changes over N."""
    facts = {**state.facts, **mean.facts}
    before, after = (
        settings.devices or sum(name.startswith(CONTROL) for name in each) for each in (state.facts, facts)
    )
    controls = {
        name: (state.tree[name] * before).add_(total).div_(after)
        for name, total in mean.total.items()
        if name.startswith(CONTROL)
    }
    changes = tree.finish_mean(Mean(network_leaves(mean.total), mean.weight))
    for name, change in changes.items():
        if CONTROL + name in state.tree:
            change.mul_(settings.server_learning_rate)
    return State({**tree.add(state.tree, changes), **controls}, facts)


def check_update(_assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update other than changes of the network and of every control variate.

    Raises:
        WireError: It has other leaves, or values that are not finite.
    """
    check_like(up, down)
    if missing := sorted(down.keys() - up.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")


def check_hyper(hyper: Hyper) -> None:
    """Refuse momentum.

    Raises:
        ConfigError: Local training has momentum.
    """
    if hyper.momentum:
        raise ConfigError(
            f"hyper.momentum is {hyper.momentum}: a control variate is the mean gradient of plain SGD, which cannot be "
            "told from steps with momentum; set it to 0"
        )


def scaffold(
    *,
    server_learning_rate: float = 1.0,
    devices: int = 0,
    weighting: Literal["uniform", "examples"] = "uniform",
) -> Algorithm:
    """Build the algorithm; options as in `ScaffoldSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    settings = ScaffoldSettings(server_learning_rate, devices, weighting)

    def shared_tree(state: State) -> Tree:
        return _broadcast(state, "", Assignment(seed=0, hyper=Hyper()))

    return replace(
        fedavg(),
        init=init,
        assign=assign,
        broadcast=_broadcast,
        local=local,
        absorb=partial(absorb, settings),
        aggregate=partial(aggregate, settings),
        check_update=check_update,
        check_hyper=check_hyper,
        step_options=frozenset({"precision"}),  # clipped gradients and steps of Adam have another mean
        mixing=Mixing(shared_tree, mix),
        sends_changes=False,
    )

"""Lightweight FedSL: split learning with pruned client parts and quantized gradients.

J. Zhang, W. Ni, D. Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks,
which names no code; decision 0039 in deploy/docs/decisions settles its open points. Its baseline without pruning,
quantization and dropout is the split federated learning of Thapa et al., SplitFed, AAAI 2022,
https://arxiv.org/abs/2004.12088.

At step t of T, device k with client part w_k, mask m_k and a batch; A of shape (B, D) are the features at the cut:

    A~ = A delta / (1 - p)                          (3)   sent up with labels; dropped columns are not sent
    w_s <- w_s - eta/K sum_k dF_k/dw_s              (6), (7)   on the server, which sends dF_k/dA~ of the sent columns
    g = dF_k/dA~ . dA~/dw_k                         (8)
    I_j = |w_j g_j|                                 (9)
    rho_t = rho_f (1 - (1 - t/T)^3)                 (10)  the floor(rho_t n) least important weights leave the mask
    w_k <- m_k w_k - eta Q(m_k g)                   (11) to (13)  Q rounds magnitudes to one of 2^q knots, at random
    w_k <- 1/K sum_k w_k                            (14)  every I rounds, zeros included; then the mask is updated

One round of this implementation is one period of I rounds of the paper. Labels leave the device: the server sees them.
The quantized gradient does not; quantization costs accuracy and saves no byte. Settings are in `settings`, the halves
in `fedsl_device` and `fedsl_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
from torch import Tensor

from shared.algorithms.base import Algorithm, Allocation, Cohort, Resources, Result, Split, assign_alike
from shared.algorithms.split.fedsl_device import local
from shared.algorithms.split.fedsl_server import measure, serve
from shared.algorithms.split.settings import FLOAT_BITS, MATRIX, FedslSettings
from shared.algorithms.split.smashed_data import check_features
from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.chain import covers, part_names
from shared.protocol.messages import Assignment, Scalar
from shared.protocol.objective import Kind
from shared.tensors import tree
from shared.tensors.feature_dropout import Granularity
from shared.tensors.tree import Mean, State, Tree

KINDS: frozenset[Kind] = frozenset({"classification", "multilabel", "regression", "forecast", "segmentation", "custom"})
"""Kinds of task: not anomalies, whose targets are the inputs, which would leave the device."""
STATISTICS_OPTIONS: Mapping[str, Scalar] = {"drop": 0.0, "sparsity": 0.0}
"""Options of a session that measures running statistics: all features, no mask."""


def init(settings: FedslSettings, model: Model, _seed: int) -> State:
    """Return the server's initial state: the whole network, a step counter, and the names of the devices' layers.

    Raises:
        ConfigError: The model cannot be cut there.
    """
    below = " ".join(part_names(model.below(settings.cut_of(model))))
    return State({key: leaf.clone() for key, leaf in model.tree().items()}, {"step": 0, "below": below})


def assign(
    settings: FedslSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Assign every device its steps, and their position in the schedules.

    Raises:
        ConfigError: The plan asks for momentum, which would revive pruned weights.
    """
    if cohort.hyper.momentum:
        raise ConfigError(f"[hyper] momentum is {cohort.hyper.momentum}: split learning takes plain steps, set it to 0")
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=settings.steps)  # epochs of at least one batch
    schedule = {"first_step": (number - 1) * settings.steps, "total_steps": max(cohort.rounds, number) * settings.steps}
    return {
        device: msgspec.structs.replace(task, hyper=hyper, steps=settings.steps, values={**task.values, **schedule})
        for device, task in assign_alike(state, cohort, allocation, number).items()
    }


def broadcast(state: State, _device: str, _assignment: Assignment) -> Tree:
    """Return the client part after the last average; equation (14)."""
    below = str(state.facts["below"]).split()
    return {key: leaf for key, leaf in state.tree.items() if covers(below, key)}


def absorb(settings: FedslSettings, mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add a device's client part; equation (14)."""
    weight = result.weight if settings.weighted else 1.0
    return tree.accumulate(mean, result.tree, weight, _coverage(result) if settings.average == "holders" else None)


def _coverage(result: Result) -> dict[str, Tensor]:
    """Return the coverage of an update: unpruned weights; codecs without coverage show pruned ones as zeros."""
    weights = {key: leaf != 0 for key, leaf in result.tree.items() if leaf.ndim >= MATRIX}
    return weights | result.coverage


def aggregate(state: State, mean: Mean) -> State:
    """Return the state with the mean as its client part; BatchNorm's counters are rounded."""
    means = tree.finish_mean(mean)
    for key, leaf in means.items():
        like = state.tree[key]
        means[key] = (leaf if like.is_floating_point() else leaf.round()).to(like.dtype)
    return State({**state.tree, **means}, state.facts)


def fedsl(  # noqa: PLR0913 - options of a plan, all by name
    *,
    cut: int = 0,
    period: int = 5,
    steps_per_round: int = 1,
    sparsity: float = 0.35,
    importance: Literal["taylor", "magnitude"] = "taylor",
    bits: int = 8,
    drop: float = 0.3,
    granularity: Granularity = "column",
    average: Literal["all", "holders"] = "all",
    weighted: bool = False,
    server: Literal["mean", "turns"] = "mean",
    schedule: Literal["cosine", "constant"] = "cosine",
    recompute: bool = False,
) -> Algorithm:
    """Build the algorithm; options as in `FedslSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    settings = FedslSettings(
        *(cut, period, steps_per_round, sparsity, importance, bits, drop),
        *(granularity, average, weighted, server, schedule, recompute),
    )
    return Algorithm(
        kinds=KINDS,
        init=partial(init, settings),
        assign=partial(assign, settings),
        broadcast=broadcast,
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        split=Split(
            *(partial(serve, settings), partial(check_features, settings), partial(measure, settings)),
            statistics_options=STATISTICS_OPTIONS,
            cut_of=settings.cut_of,
        ),
        resources=Resources(frees_memory=settings.recompute),
    )


splitfed = partial(fedsl, period=1, sparsity=0.0, bits=FLOAT_BITS, drop=0.0)
"""Traditional split federated learning, the paper's baseline: every device sends all features at every step."""

VARIANTS: Mapping[str, Callable[..., Algorithm]] = {
    "fedsl_channel": partial(fedsl, granularity="channel"),
    "fedsl_element": partial(fedsl, granularity="element"),
    "fedsl_holders": partial(fedsl, average="holders"),
    "fedsl_magnitude": partial(fedsl, importance="magnitude"),
    "fedsl_pruning": partial(splitfed, sparsity=0.35),
    "fedsl_quantizer": partial(splitfed, bits=8),
    "splitfed": splitfed,
    "splitfed2": partial(splitfed, server="turns"),
}
"""Baselines and ablations: other defaults of the same method. In SplitFed v2 devices move the server part in turns."""

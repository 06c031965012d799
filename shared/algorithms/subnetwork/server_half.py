"""Server half of methods in which devices train subsets of the neurons.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

    w^t+1[j] = sum_k n_k w_k[j] / sum_k n_k     over the devices k with j in A_k; w^t[j] where there is none

The download has one bit a neuron and the values of A_k, sum_l ceil(n_l / 8) + 4 |A_k| bytes; the upload has the values,
4 |A_k| bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TypeAlias

import msgspec
import torch

from shared.algorithms.base import Algorithm, Allocation, Batches, Cohort, Outcome, Resources, Result, assign_alike
from shared.algorithms.personal_model import describe_origin, select_origin
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Scalar
from shared.subnetworks.neurons import (
    PREFIX,
    Active,
    Chain,
    Index,
    all_neurons,
    draw_neurons,
    extract,
    pack,
    read_chain,
    spread,
    unpack,
)
from shared.subnetworks.neurons import coverage as covered
from shared.tensors import tree as trees
from shared.tensors.tree import Mean, State, Tree, check_like

CHAIN, KEEP = "chain", "keep"

Choice: TypeAlias = Callable[[State, str, Assignment], Active]
"""(server state, device, assignment) -> the device's neurons; deterministic, from the state's facts."""

Local: TypeAlias = Callable[[Model, State, Tree, Batches, Assignment], Outcome]
"""A device half."""


def begin(model: Model, seed: int) -> State:
    """Return the server's initial state: the model, and its chain of neurons.

    Raises:
        ConfigError: The model is not a chain of layers.
    """
    tree = {key: leaf.clone() for key, leaf in model.tree().items()}
    return State(tree, {CHAIN: read_chain(model.chain).text(), **describe_origin(model, seed)})


def stored_chain(facts: Mapping[str, Scalar]) -> Chain:
    """Return the chain of neurons recorded in the server's facts."""
    return Chain.parse(str(facts[CHAIN]))


def assign(
    state: State, cohort: Cohort, allocation: Allocation, number: int, *, keep: float = 1.0
) -> dict[str, Assignment]:
    """Assign every device its share of the neurons, and the origin of the initial model.

    Args:
        allocation: May give individual devices other shares.
        keep: Share of all other devices.
    """
    common = {KEEP: keep} | select_origin(state.facts)
    tasks = assign_alike(state, cohort, allocation, number)
    return {device: msgspec.structs.replace(task, values=common | task.values) for device, task in tasks.items()}


def keep_share(assignment: Assignment) -> float:
    """Return a device's share of the neurons."""
    keep = assignment.allocation.keep
    return 1.0 if keep is None else keep


def smaller_step(_model: Model, assignment: Assignment) -> float:
    """Return the relative cost of a step in a network with a share p of the neurons: p^2, as between hidden layers."""
    return keep_share(assignment) ** 2


def draw_active(state: State, _device: str, assignment: Assignment) -> Active:
    """Return random neurons for a device, drawn from the seed of its task."""
    return draw_neurons(stored_chain(state.facts).hidden, keep_share(assignment), assignment.seed)


def build_broadcast(choose: Choice) -> Callable[[State, str, Assignment], Tree]:
    """Return a broadcast of a device's neurons and the values that belong to them.

    Devices with all neurons get identical leaves, so that they share one transmission.
    """

    def broadcast(state: State, device: str, assignment: Assignment) -> Tree:
        layout, active = stored_chain(state.facts), choose(state, device, assignment)
        if _is_whole(active, layout):
            return {key: state.tree[key] for key in layout.leaves} | _all_bitmaps(str(state.facts[CHAIN]))
        return extract(state.tree, layout.index(active)) | pack(active, layout.hidden)

    return broadcast


def is_whole(active: Active, model: Model) -> bool:
    """Return True if these are all neurons of a model."""
    return _is_whole(active, read_chain(model.chain))


def _is_whole(active: Active, layout: Chain) -> bool:
    return all(len(active[name]) == count for name, count in layout.hidden.items())


@lru_cache(maxsize=4)
def _all_bitmaps(text: str) -> Tree:
    hidden = Chain.parse(text).hidden
    return pack(all_neurons(hidden), hidden)


def read_download(model: Model, down: Tree) -> tuple[Active, Index, Tree]:
    """Read a download of `build_broadcast` on the device: neurons, index of their parameters, values.

    Raises:
        WireError: It does not match the model.
    """
    layout = read_chain(model.chain)
    active = unpack(down, layout.hidden)
    index, like = layout.index(active), model.tree()
    values = _network_part(down)
    if values.keys() != index.keys():
        raise WireError("received tensors do not match the model's neurons", reason="unknown-tensor")
    check_like(values, {key: _outline(like[key], *index[key]) for key in index})
    return active, index, values


def _outline(leaf: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    shape = list(leaf.shape)
    for axis, chosen in enumerate((rows, columns)):
        if chosen is not None:
            shape[axis] = len(chosen)
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def check_update(_assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update whose leaves differ from those of the download.

    Raises:
        WireError: They differ.
    """
    check_like(up, _network_part(down))


def _network_part(down: Tree) -> Tree:
    return {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)}


def empty(state: State) -> Mean:
    """Return an empty mean; its facts are the state's, so that `build_absorb` can repeat the choice."""
    keys = stored_chain(state.facts).leaves
    total = {
        key: torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
        for key, leaf in state.tree.items()
        if key in keys
    }
    return Mean(total, {key: torch.zeros(leaf.shape) for key, leaf in total.items()}, facts=dict(state.facts))


def build_absorb(choose: Choice) -> Callable[[Mean, str, Assignment, Result], Mean]:
    """Return a function that adds an update's values at the coordinates of its neurons."""

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        index = stored_chain(mean.facts).index(choose(State(facts=mean.facts), device, assignment))
        masks = covered(index, mean.total)
        if result.coverage:
            nothing = {key: torch.zeros(mean.total[key].shape, dtype=torch.bool) for key in result.coverage}
            masks |= spread(result.coverage, index, nothing)
        return trees.accumulate(mean, spread(result.tree, index, mean.total), result.weight, masks)

    return absorb


def aggregate(state: State, mean: Mean) -> State:
    """Take the mean of coordinates that any device has; the others stay bit for bit."""
    has_values = {key: torch.as_tensor(weight) > 0 for key, weight in mean.weight.items()}
    means = trees.finish_mean(mean)
    after = {
        key: torch.where(has_values[key], means[key].to(leaf.dtype), leaf) if key in means else leaf
        for key, leaf in state.tree.items()
    }
    return State(after, state.facts)


def build_algorithm(
    local: Local,
    choose: Choice = draw_active,
    *,
    keep: float = 1.0,
    step_share: Callable[[Model, Assignment], float] | None = None,
) -> Algorithm:
    """Build an algorithm from a device half and a choice of neurons.

    Args:
        local: Device half; it reads the download by `read_download`.
        choose: Neurons of a device in a round.
        keep: Share of neurons for devices without an allocated share.
        step_share: Relative cost of a step, see `Resources`.

    Raises:
        ValueError: `keep` is not in (0, 1].
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be above 0 and at most 1, not {keep}")
    return Algorithm(
        init=begin,
        assign=partial(assign, keep=keep),
        broadcast=build_broadcast(choose),
        local=local,
        absorb=build_absorb(choose),
        aggregate=aggregate,
        empty=empty,
        check_update=check_update,
        resources=Resources(frozenset({KEEP}), step_share, uploaded=_network_part),
    )

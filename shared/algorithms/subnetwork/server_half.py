"""The server half of methods that give a device some of the model's neurons: what goes down, what a mean is over.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

    w^t+1[j] = sum_k n_k w_k[j] / sum_k n_k     over the devices k with j in A_k; w^t[j] where there is none

Down go one bit a neuron and the values of A_k, sum_l ceil(n_l / 8) + 4 |A_k| bytes; up come the values, 4 |A_k| bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TypeAlias

import msgspec
import torch

from shared.algorithms.base import Algorithm, Allocation, Batches, Cohort, Outcome, Resources, Result, assign_alike
from shared.algorithms.personal_model import origin, origin_in
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
"""(server state, device, assignment) -> the neurons that it is given, by the state's facts; the same whenever asked."""

Local: TypeAlias = Callable[[Model, State, Tree, Batches, Assignment], Outcome]
"""A device half."""


def begin(model: Model, seed: int) -> State:
    """Return the server's first state: the model, and whose neurons its parameters are.

    Raises:
        ConfigError: The model is no chain whose neurons can be told apart.
    """
    tree = {key: leaf.clone() for key, leaf in model.tree().items()}
    return State(tree, {CHAIN: read_chain(model.layers).text(), **origin(model, seed)})


def stored_chain(facts: Mapping[str, Scalar]) -> Chain:
    """Return whose neurons the model's parameters are."""
    return Chain.parse(str(facts[CHAIN]))


def assign(
    state: State, cohort: Cohort, allocation: Allocation, number: int, *, keep: float = 1.0
) -> dict[str, Assignment]:
    """Tell every device its share of the neurons and the origin of the model that all began with.

    Args:
        allocation: May give single devices other shares.
        keep: Share of those devices that it says nothing of.
    """
    common = {KEEP: keep} | origin_in(state.facts)
    told = assign_alike(state, cohort, allocation, number)
    return {device: msgspec.structs.replace(one, values=common | one.values) for device, one in told.items()}


def keep_share(assignment: Assignment) -> float:
    """Return a device's share of the neurons."""
    keep = assignment.allocated.keep
    return 1.0 if keep is None else keep


def smaller_step(_model: Model, assignment: Assignment) -> float:
    """Return how much of a step is left in a network with a share p of the neurons: p^2, as between hidden layers."""
    return keep_share(assignment) ** 2


def draw_active(state: State, _device: str, assignment: Assignment) -> Active:
    """Return the neurons that a round's seed draws for a device.

    Args:
        assignment: Its task; its seed says which.
    """
    return draw_neurons(stored_chain(state.facts).hidden, keep_share(assignment), assignment.seed)


def build_broadcast(choose: Choice) -> Callable[[State, str, Assignment], Tree]:
    """Return what goes down: the values that belong to a device's neurons, and which neurons these are.

    Devices with all neurons are given the very same leaves, so that they share one transmission.
    """

    def broadcast(state: State, device: str, assignment: Assignment) -> Tree:
        layout, active = stored_chain(state.facts), choose(state, device, assignment)
        if _is_whole(active, layout):
            return {key: state.tree[key] for key in layout.leaves} | _everybody(str(state.facts[CHAIN]))
        return extract(state.tree, layout.index(active)) | pack(active, layout.hidden)

    return broadcast


def is_whole(active: Active, model: Model) -> bool:
    """Tell whether these are all the neurons that a model has."""
    return _is_whole(active, read_chain(model.layers))


def _is_whole(active: Active, layout: Chain) -> bool:
    return all(len(active[name]) == count for name, count in layout.hidden.items())


@lru_cache(maxsize=4)
def _everybody(text: str) -> Tree:
    hidden = Chain.parse(text).hidden
    return pack(all_neurons(hidden), hidden)


def read_download(model: Model, down: Tree) -> tuple[Active, Index, Tree]:
    """Read what `build_broadcast` sent, on the device: the neurons, what belongs to them, and its values.

    Raises:
        WireError: It is not that.
    """
    layout = read_chain(model.layers)
    active = unpack(down, layout.hidden)
    index, like = layout.index(active), model.tree()
    values = {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)}
    if values.keys() != index.keys():
        raise WireError("tensors came that are not those of the model's neurons", reason="unknown-tensor")
    check_like(values, {key: _outline(like[key], *index[key]) for key in index})
    return active, index, values


def _outline(leaf: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    shape = list(leaf.shape)
    for axis, chosen in enumerate((rows, columns)):
        if chosen is not None:
            shape[axis] = len(chosen)
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def check_update(_assignment: Assignment, down: Tree, up: Tree) -> None:
    """Refuse what is not made of the values that went down.

    Raises:
        WireError: It is not.
    """
    check_like(up, {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)})


def empty(state: State) -> Mean:
    """Return an empty mean; its facts are the state's, so that `build_absorb` can choose again."""
    keys = stored_chain(state.facts).leaves
    total = {
        key: torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
        for key, leaf in state.tree.items()
        if key in keys
    }
    return Mean(total, {key: torch.zeros(leaf.shape) for key, leaf in total.items()}, facts=dict(state.facts))


def build_absorb(choose: Choice) -> Callable[[Mean, str, Assignment, Result], Mean]:
    """Return how an update is added: its values, where they belong, with its weight."""

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        index = stored_chain(mean.facts).index(choose(State(facts=mean.facts), device, assignment))
        masks = covered(index, mean.total)
        if result.coverage:
            nothing = {key: torch.zeros(mean.total[key].shape, dtype=torch.bool) for key in result.coverage}
            masks |= spread(result.coverage, index, nothing)
        return trees.accumulate(mean, spread(result.tree, index, mean.total), result.weight, masks)

    return absorb


def aggregate(state: State, mean: Mean) -> State:
    """Take the mean of the values where anybody holds one; all else stays as it was, to the bit."""
    held = {key: torch.as_tensor(weight) > 0 for key, weight in mean.weight.items()}
    means = trees.finish_mean(mean)
    after = {
        key: torch.where(held[key], means[key].to(leaf.dtype), leaf) if key in means else leaf
        for key, leaf in state.tree.items()
    }
    return State(after, state.facts)


def neurons(
    local: Local,
    choose: Choice = draw_active,
    *,
    keep: float = 1.0,
    step_share: Callable[[Model, Assignment], float] | None = None,
) -> Algorithm:
    """Build an algorithm of a device half and a choice of neurons.

    Args:
        local: The device half; `read_download` reads what it is given.
        choose: Which neurons a device is given.
        keep: Share of them that a device is given of which the resource optimizer says nothing.
        step_share: See `Resources`.

    Raises:
        ValueError: `keep` is no share.
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
        resources=Resources(frozenset({KEEP}), step_share),
    )

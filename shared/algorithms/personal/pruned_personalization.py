"""Pruned personalization: devices share one part of a network, each without what matters least to it, and keep another.

Liu, Ratnarajah, Sellathurai, Eldar. Adaptive Model Pruning and Personalization for Federated Learning over Wireless
Networks. https://arxiv.org/abs/2309.01816, which names no code; FedAlt and FedSim, to which it comes down where nothing
is pruned, are those of Pillutla et al., https://proceedings.mlr.press/v162/pillutla22a.html.

In round g, device k with its personal part v_k, given the global part u and a share rho_k:

    v_k <- v_k - eta grad_v F_k(u, v_k)                    (6)   tau_v steps, u as received
    I = |u^ - u|                                           (20)  u^: after tau^_u steps from u, which are thrown away
    m_k: the N - floor(rho_k N) largest of I                (21)  of all weights together; biases always stay
    u_k <- u . m_k;  u_k <- u_k - eta grad_u F_k(u_k, v_k) . m_k      (21), (22)   tau_u steps, v_k fixed

The held weights of u_k go up, with a bitmap of which these are (`sparse_update` has the bytes); v_k never
does. The server takes, weight by weight, the mean over those who hold it, and the old value where nobody does:

    u_j <- 1 / |K_j| sum_{k in K_j} u_kj                   (26)

Where the paper contradicts itself: u is what is received, not what warm-up makes of it (21); means are over holders
alike unless `weighting` says otherwise (3); rho_k and the bandwidth come from the resource optimizer, for all devices
at once (54). Without one, every device prunes the share `prune`. A masked step computes all that a dense one does:
pruning single weights saves bytes, not time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Allocation, Cohort, Personal, Resources, Result, assign_alike
from shared.algorithms.personal import sparse_update
from shared.algorithms.personal.network_parts import (
    Importance,
    PersonalizationSettings,
    Split,
    Updating,
    personal_part,
    shared_part,
    weights_of,
)
from shared.algorithms.personal.pruned_personalization_device import local, pruned_share, train_unpruned
from shared.algorithms.personal_model import MODEL_SEED, origin, origin_in
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree


def init(settings: PersonalizationSettings, model: Model, seed: int) -> State:
    """Return the global part alone, and what a resource optimizer must know of the two parts and their steps.

    Raises:
        ConfigError: The model has nothing to share.
    """
    shared = shared_part(settings.split, model)
    count = sum(leaf.numel() for leaf in weights_of(shared).values())
    trained = sum(leaf.numel() for name, leaf in model.layers.named_parameters() if name not in shared)
    facts = {"global_weights": count, "personal_weights": trained, "global_steps": settings.global_steps}
    facts |= {"personal_steps": settings.personal_steps if trained else 0}
    facts |= {"warmup_steps": settings.warmup_steps if settings.importance != "magnitude" else 0}
    facts |= {"updates_at_once": int(settings.updating == "simultaneous")}
    return State({key: leaf.clone() for key, leaf in shared.items()}, facts | origin(model, seed))


def assign(
    settings: PersonalizationSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Tell every device what to prune, how many weights there are, and how its personal part began.

    Raises:
        WireError: An allocated share is none.
    """
    count, alone = int(state.facts["global_weights"]), not state.facts["personal_weights"]
    epochs = max(settings.steps, settings.warmup_steps)  # a batch each at least
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=epochs)
    begun = {MODEL_SEED: cohort.seed} | origin_in(state.facts)  # runs before did not keep the seed
    told = {}
    for device, one in assign_alike(state, cohort, allocation, number).items():
        share = pruned_share(settings, one) if settings.prunes else 0.0
        steps = _steps(settings, count, sparse_update.count_held(count, share), alone=alone)
        values = {"prune": share, "weights": count, "local_steps": steps} | begun
        told[device] = msgspec.structs.replace(one, hyper=hyper, values={**one.values, **values})
    return told


def _steps(settings: PersonalizationSettings, count: int, held: int, *, alone: bool) -> int:
    """Return the steps of a device that holds so many weights, and shares all of them if `alone`."""
    own, ours = 0 if alone else settings.personal_steps, settings.global_steps if held else 0
    warm = settings.warmup_steps if 0 < held < count and settings.importance != "magnitude" else 0
    return warm + (max(own, ours) if settings.updating == "simultaneous" else own + ours)


def check_update(settings: PersonalizationSettings, assignment: Assignment, down: Tree, up: Tree) -> None:
    """Refuse what is not the update that the assignment asks for.

    Raises:
        WireError: It is not.
    """
    sparse_update.require_update(up, down, weights_of(down), pruned_share(settings, assignment))


def absorb(settings: PersonalizationSettings, mean: Mean, _device: str, assignment: Assignment, result: Result) -> Mean:
    """Add what a device holds; equation (26)."""
    if not result.tree:
        return mean
    count = assignment.values["weights"]
    assert isinstance(count, int)
    weights, mask = sparse_update.unpack_sparse(result.tree, count)
    own = (sparse_update.VALUES, sparse_update.MASK, sparse_update.INDEX)
    found = {key: leaf for key, leaf in result.tree.items() if key not in own} | {sparse_update.VALUES: weights}
    share = result.weight if settings.weighting == "examples" else 1.0
    return tree.accumulate(mean, found, share, {} if mask is None else {sparse_update.VALUES: mask})


def aggregate(state: State, mean: Mean) -> State:
    """Return the mean over holders, and the old value where there is none; equation (26)."""
    if not mean.total:
        return state
    weight, weights = mean.weight[sparse_update.VALUES], weights_of(state.tree)
    held = weight > 0 if isinstance(weight, Tensor) else None
    found = tree.finish_mean(mean)
    vector = found.pop(sparse_update.VALUES).to(next(iter(weights.values())).dtype)
    if held is not None:
        vector = torch.where(held, vector, sparse_update.flatten_weights(weights))
    for key, leaf in found.items():
        like = state.tree[key]
        found[key] = (leaf if like.is_floating_point() else leaf.round()).to(like.dtype)
    return State({**state.tree, **found, **sparse_update.view_shaped(vector, weights)}, state.facts)


def network_in_use(
    settings: PersonalizationSettings, model: Model, state: State, came: Tree, assignment: Assignment
) -> Tree:
    """Return the network that a device uses: the whole global part that came, and its own.

    Args:
        state: What the device kept.
        came: The shared part that came down.
    """
    return {**came, **personal_part(settings.split, model, state, assignment)}


def pruned_personalization(  # noqa: PLR0913 - options of a plan, all by name
    *,
    split: Split = "fc_global",
    updating: Updating = "alternating",
    personal_steps: int = 5,
    global_steps: int = 5,
    warmup_steps: int = 1,
    importance: Importance = "difference",
    prune: float = 0.5,
    weighting: Literal["uniform", "examples"] = "uniform",
) -> Algorithm:
    """Build the algorithm; options as in `PersonalizationSettings`.

    Raises:
        ValueError: One is out of range.
    """
    settings = PersonalizationSettings(
        *(split, updating, personal_steps, global_steps, warmup_steps, importance, prune, weighting),
    )
    return Algorithm(
        init=partial(init, settings),
        assign=partial(assign, settings),
        broadcast=lambda state, _device, _assignment: state.tree,
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        check_update=partial(check_update, settings),
        personal=Personal(partial(network_in_use, settings), own_statistics=settings.split != "all_global"),
        resources=Resources(
            frozenset({"prune"} if settings.prunes else ()), timed_step=partial(train_unpruned, settings)
        ),
    )


fedalt = partial(pruned_personalization, prune=0.0, warmup_steps=0)
"""Partial personalization without pruning, the parts one after the other; whatever is allocated, all goes up."""

VARIANTS: Mapping[str, Callable[..., Algorithm]] = {
    "pruned_personalization_fedsim": partial(pruned_personalization, updating="simultaneous"),
    "pruning_only": partial(pruned_personalization, split="all_global"),
    "fedalt": fedalt,
    "fedsim": partial(fedalt, updating="simultaneous"),
}
"""What the paper compares with, as the same method by other options; equal resources are an optimizer's option."""

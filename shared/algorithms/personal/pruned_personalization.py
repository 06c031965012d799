"""Pruned personalization: a shared, pruned global part and personal parts.

Liu, Ratnarajah, Sellathurai, Eldar. Adaptive Model Pruning and Personalization for Federated Learning over Wireless
Networks. https://arxiv.org/abs/2309.01816, which names no code. Without pruning it equals FedAlt and FedSim of Pillutla
et al., https://proceedings.mlr.press/v162/pillutla22a.html.

In round g, device k with its personal part v_k, given the global part u and a share rho_k:

    v_k <- v_k - eta grad_v F_k(u, v_k)                    (6)   tau_v steps, u as received
    I = |u^ - u|                                           (20)  u^: after tau^_u steps from u, which are discarded
    m_k: the N - floor(rho_k N) largest of I                (21)  of all weights together; biases always stay
    u_k <- u . m_k;  u_k <- u_k - eta grad_u F_k(u_k, v_k) . m_k      (21), (22)   tau_u steps, v_k fixed

The remaining weights of u_k go up with a bitmap of their positions (`sparse_update` specifies the bytes); v_k never
does. The server takes, weight by weight, the mean over the devices that hold it, and the old value where none does:

    u_j <- 1 / |K_j| sum_{k in K_j} u_kj                   (26)

Where the paper contradicts itself: u is the received part, not the result of warm-up (21); holders have equal weights
in the mean unless `weighting` says otherwise (3); rho_k and the bandwidth come from the resource optimizer, for all
devices at once (54). Without one, every device prunes the share `prune`. A masked step costs as much computation as a
dense one: pruning single weights saves bytes, not time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Cohort,
    Personal,
    Resources,
    Result,
    assign_alike,
    network_leaves,
)
from shared.algorithms.personal import sparse_update
from shared.algorithms.personal.network_parts import (
    Importance,
    PersonalizationSettings,
    Split,
    Updating,
    personal_part,
    select_weights,
    shared_part,
)
from shared.algorithms.personal.pruned_personalization_device import local, pruned_share, train_unpruned
from shared.algorithms.personal_model import MODEL_SEED, describe_origin, select_origin
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree


def init(settings: PersonalizationSettings, model: Model, seed: int) -> State:
    """Return the global part, with the facts about both parts and their steps for resource optimizers.

    Raises:
        ConfigError: The model has nothing to share.
    """
    shared = shared_part(settings.split, model)
    count = sum(leaf.numel() for leaf in select_weights(shared).values())
    trained = sum(leaf.numel() for name, leaf in model.layers.named_parameters() if name not in shared)
    facts = {"global_weights": count, "personal_weights": trained, "global_steps": settings.global_steps}
    facts |= {"personal_steps": settings.personal_steps if trained else 0}
    facts |= {"warmup_steps": settings.warmup_steps if settings.importance != "magnitude" else 0}
    facts |= {"updates_at_once": int(settings.updating == "simultaneous")}
    return State({key: leaf.clone() for key, leaf in shared.items()}, facts | describe_origin(model, seed))


def assign(
    settings: PersonalizationSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Assign every device its share to prune, the number of weights, and the origin of its personal part.

    Raises:
        WireError: An allocated share is out of range.
    """
    count, alone = int(state.facts["global_weights"]), not state.facts["personal_weights"]
    epochs = max(settings.steps, settings.warmup_steps)  # epochs of at least one batch
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=epochs)
    begun = {MODEL_SEED: cohort.seed} | select_origin(state.facts)  # states of older runs lack the seed
    assignments = {}
    for device, task in assign_alike(state, cohort, allocation, number).items():
        share = pruned_share(settings, task) if settings.prunes else 0.0
        steps = _count_steps(settings, count, sparse_update.count_held(count, share), alone=alone)
        values = {"prune": share, "weights": count, "local_steps": steps} | begun
        assignments[device] = msgspec.structs.replace(task, hyper=hyper, values={**task.values, **values})
    return assignments


def _count_steps(settings: PersonalizationSettings, count: int, weights: int, *, alone: bool) -> int:
    """Return the steps of a device with `weights` weights of the global part; if `alone`, there is no personal part."""
    personal, shared = 0 if alone else settings.personal_steps, settings.global_steps if weights else 0
    warm = settings.warmup_steps if 0 < weights < count and settings.importance != "magnitude" else 0
    return warm + (max(personal, shared) if settings.updating == "simultaneous" else personal + shared)


def check_update(settings: PersonalizationSettings, assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update that does not match the assignment.

    Raises:
        WireError: It does not match.
    """
    sparse_update.require_update(up, down, select_weights(down), pruned_share(settings, assignment))


def absorb(settings: PersonalizationSettings, mean: Mean, _device: str, assignment: Assignment, result: Result) -> Mean:
    """Add a device's weights; equation (26)."""
    if not result.tree:
        return mean
    count = assignment.values["weights"]
    assert isinstance(count, int)
    weights, mask = sparse_update.unpack_sparse(result.tree, count)
    sparse_keys = (sparse_update.VALUES, sparse_update.MASK, sparse_update.INDEX)
    values = {key: leaf for key, leaf in result.tree.items() if key not in sparse_keys}
    values[sparse_update.VALUES] = weights
    share = result.weight if settings.weighting == "examples" else 1.0
    return tree.accumulate(mean, values, share, {} if mask is None else {sparse_update.VALUES: mask})


def aggregate(state: State, mean: Mean) -> State:
    """Return the mean over holders, and the old value where there is none; equation (26)."""
    if not mean.total:
        return state
    weight, weights = mean.weight[sparse_update.VALUES], select_weights(network_leaves(state.tree))
    has_holders = weight > 0 if isinstance(weight, Tensor) else None
    means = tree.finish_mean(mean)
    vector = means.pop(sparse_update.VALUES).to(next(iter(weights.values())).dtype)
    if has_holders is not None:
        vector = torch.where(has_holders, vector, sparse_update.flatten_weights(weights))
    for key, leaf in means.items():
        like = state.tree[key]
        means[key] = (leaf if like.is_floating_point() else leaf.round()).to(like.dtype)
    return State({**state.tree, **means, **sparse_update.view_shaped(vector, weights)}, state.facts)


def network_in_use(
    settings: PersonalizationSettings, model: Model, state: State, down: Tree, assignment: Assignment
) -> Tree:
    """Return the network that a device uses: the received global part, unpruned, and its personal part."""
    return {**down, **personal_part(settings.split, model, state, assignment)}


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
        ValueError: An option is out of range.
    """
    settings = PersonalizationSettings(
        *(split, updating, personal_steps, global_steps, warmup_steps, importance, prune, weighting)
    )
    return Algorithm(
        init=partial(init, settings),
        assign=partial(assign, settings),
        broadcast=lambda state, _device, _assignment: network_leaves(state.tree),
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
"""Partial personalization without pruning, with alternating parts; the whole global part goes up in any case."""

VARIANTS: Mapping[str, Callable[..., Algorithm]] = {
    "pruned_personalization_fedsim": partial(pruned_personalization, updating="simultaneous"),
    "pruning_only": partial(pruned_personalization, split="all_global"),
    "fedalt": fedalt,
    "fedsim": partial(fedalt, updating="simultaneous"),
}
"""The paper's baselines: the same method with other options. Equal resources are an option of the optimizer."""

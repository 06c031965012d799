"""Norm bounds on neighbours' models, relative to the local model's drift.

The updates of a round bound each other; a neighbour's model has no such company. It is compared with the local model:
with y_i ours, y_j the neighbour's, and m the distance that ours has moved since we last had one of theirs, refuse

    |y_j - y_i| > max(0.8 |y_i|, 4 m)         zeros, a constant, a sign flip, another network
    |y_j - y_i| > max(0.3 |y_i|, most m)      a model far from a trained one; `most` is `round.most_norm`
    |y_j| not in [|y_i| / 4, 4 |y_i|]         scaled    } unless ours was mostly
    cos(y_i, y_j) < 0.2                       rotated   } learnt since, m > 0.9 |y_i|

Honest sites begin a global round with equal models and move about as far, so that theirs lies within m plus their own
drift. Running statistics and counters are bounded by a factor of `most`, since sites measure them on other examples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.errors import WireError
from shared.tensors.tree import Tree, tree_norm

REASON = "norm"
WHOLE, MOVED = 0.8, 4.0
PART = 0.3
SCALE, ALIKE, LEARNT = 4.0, 0.2, 0.9
STATISTICS = (".running_mean", ".running_var")
VARIANCE = ".running_var"
LEAST_STATISTIC, LEAST_COUNT = 1.0, 1e4
"""Norms of running statistics and counters up to which no bound applies."""


def parameters_of(tree: Tree) -> Tree:
    """Return the trained leaves: floating-point ones without running statistics."""
    return {key: leaf for key, leaf in tree.items() if leaf.is_floating_point() and not key.endswith(STATISTICS)}


@torch.no_grad()
def require_near(model: Tree, local: Tree, drift: float | None, most: float) -> None:
    """Refuse a neighbour's model that no training of this run could have produced.

    Args:
        model: The neighbour's model, with the leaves of `local`.
        drift: Distance that our parameters have moved since we last had this neighbour's model; None if unknown.
        most: `round.most_norm`; 0 for no bound.

    Raises:
        WireError: With reason `norm`.
    """
    if not most:
        return
    _require_statistics(model, local, most)
    local_parameters, parameters = parameters_of(local), parameters_of(model)
    size, peer_size = tree_norm(local_parameters), tree_norm(parameters)
    distance = tree_norm({key: parameters[key] - leaf for key, leaf in local_parameters.items()})
    change = 0.0 if drift is None else drift
    if distance > max(WHOLE * size, MOVED * change):
        bound = f"{WHOLE:g} times its norm {size:.3g}, and {MOVED:g} times the {change:.3g} that ours has moved"
    elif drift is not None and distance > max(PART * size, most * drift):
        bound = f"{most:g} times the {drift:.3g} that ours has moved (round.most_norm)"
    else:
        if change <= LEARNT * size:
            _require_alike(size, peer_size, distance)
        return
    raise WireError(f"the model lies {distance:.3g} from ours, more than {bound}", reason=REASON)


def _require_alike(size: float, peer_size: float, distance: float) -> None:
    """Refuse a model that is ours scaled or rotated, by both norms and the norm of the difference."""
    if not size / SCALE <= peer_size <= SCALE * size:
        factor = f"a factor of {SCALE:g} of our {size:.3g}"
        raise WireError(f"its norm {peer_size:.3g} is not within {factor}", reason=REASON)
    product = size * peer_size
    cosine = (size**2 + peer_size**2 - distance**2) / (2 * product) if product else 1.0
    if cosine < ALIKE:
        raise WireError(f"the cosine of its angle to our model is {cosine:.2f}, below {ALIKE:g}", reason=REASON)


def _require_statistics(model: Tree, local: Tree, most: float) -> None:
    for key, leaf in model.items():
        if key.endswith(VARIANCE) and leaf.numel() and float(leaf.min()) < 0 <= float(local[key].min()):
            raise WireError(f"{key!r} holds a variance below zero", reason=REASON)
    for kind, least in (("running statistics", LEAST_STATISTIC), ("counters", LEAST_COUNT)):
        size, local_size = (_statistics_norm(tree, counters=kind == "counters") for tree in (model, local))
        if size > most * max(local_size, least):
            raise WireError(f"{kind} of norm {size:.3g}, more than {most:g} times our {local_size:.3g}", reason=REASON)


def _statistics_norm(tree: Mapping[str, Tensor], *, counters: bool) -> float:
    if counters:
        return tree_norm({key: leaf.to(torch.float64) for key, leaf in tree.items() if not leaf.is_floating_point()})
    return tree_norm({key: leaf for key, leaf in tree.items() if key.endswith(STATISTICS)})

"""Norm bound of neighbours' models: one that lies too far from ours, by what training moves a model, is not mixed.

What an update may be, the updates of its round say; a neighbour's model has no such company. It is measured by our own
model: with y_i ours, y_j the neighbour's, and m how far ours has moved since we last had one of theirs,

    |y_j - y_i| > max(0.8 |y_i|, 4 m)         zeros, a constant, a sign flip, another network
    |y_j - y_i| > max(0.3 |y_i|, most m)      a model far from a trained one; `most` is `round.most_norm`
    |y_j| not in [|y_i| / 4, 4 |y_i|]         scaled        } unless ours is mostly what it has
    cos(y_i, y_j) < 0.2                       turned away   } learnt since, m > 0.9 |y_i|

Honest sites begin a global round alike and move about as far, so that theirs is at most m and what they moved away.
Running statistics are held to a factor of `most`, since sites measure them on other examples; counters likewise.
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
"""Running statistics and counters whose norm is smaller are held to the factor from here on."""


def parameters_of(tree: Tree) -> Tree:
    """Return the leaves that training moves: floating ones without running statistics."""
    return {key: leaf for key, leaf in tree.items() if leaf.is_floating_point() and not key.endswith(STATISTICS)}


@torch.no_grad()
def require_near(model: Tree, own: Tree, moved: float | None, most: float) -> None:
    """Refuse a neighbour's model that no training of this run could have led to.

    Args:
        model: The neighbour's, with the leaves of `own`.
        moved: How far our parameters have moved since we last had a model of this neighbour; None where nobody knows.
        most: `round.most_norm`; 0 for no bound.

    Raises:
        WireError: With reason `norm`.
    """
    if not most:
        return
    _require_statistics(model, own, most)
    ours, theirs = parameters_of(own), parameters_of(model)
    size, their_size = tree_norm(ours), tree_norm(theirs)
    distance = tree_norm({key: theirs[key] - leaf for key, leaf in ours.items()})
    change = 0.0 if moved is None else moved
    if distance > max(WHOLE * size, MOVED * change):
        bound = f"{WHOLE:g} times its norm {size:.3g}, and {MOVED:g} times the {change:.3g} that ours has moved"
    elif moved is not None and distance > max(PART * size, most * moved):
        bound = f"{most:g} times the {moved:.3g} that ours has moved (round.most_norm)"
    else:
        if change <= LEARNT * size:
            _require_alike(size, their_size, distance)
        return
    raise WireError(f"the model lies {distance:.3g} from ours, more than {bound}", reason=REASON)


def _require_alike(size: float, their_size: float, distance: float) -> None:
    """Refuse a model that is ours scaled, or turned away from ours, by both norms and the norm of the difference."""
    if not size / SCALE <= their_size <= SCALE * size:
        factor = f"a factor of {SCALE:g} of our {size:.3g}"
        raise WireError(f"its norm {their_size:.3g} is not within {factor}", reason=REASON)
    product = size * their_size
    cosine = (size**2 + their_size**2 - distance**2) / (2 * product) if product else 1.0
    if cosine < ALIKE:
        raise WireError(f"the cosine of its angle to our model is {cosine:.2f}, below {ALIKE:g}", reason=REASON)


def _require_statistics(model: Tree, own: Tree, most: float) -> None:
    for key, leaf in model.items():
        if key.endswith(VARIANCE) and leaf.numel() and float(leaf.min()) < 0 <= float(own[key].min()):
            raise WireError(f"{key!r} holds a variance below zero", reason=REASON)
    for kind, least in (("running statistics", LEAST_STATISTIC), ("counters", LEAST_COUNT)):
        size, ours = (_statistics_norm(tree, counters=kind == "counters") for tree in (model, own))
        if size > most * max(ours, least):
            raise WireError(f"{kind} of norm {size:.3g}, more than {most:g} times our {ours:.3g}", reason=REASON)


def _statistics_norm(tree: Mapping[str, Tensor], *, counters: bool) -> float:
    if counters:
        return tree_norm({key: leaf.to(torch.float64) for key, leaf in tree.items() if not leaf.is_floating_point()})
    return tree_norm({key: leaf for key, leaf in tree.items() if key.endswith(STATISTICS)})

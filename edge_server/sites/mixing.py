"""Mix edge models: one gossip step with a row of the mixing matrix.

Equation (5) of Zhang, Gao, Guo, Gong, "HCEF", IEEE TMC, https://arxiv.org/abs/2409.04022:

    y_i <- sum over j in {i} and its neighbours of W_ij y_j
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from edge_server.sites.matrix import Row
from edge_server.sites.sketch import SIZE, STRETCH, fold, pack_sketch
from shared.tensors.tree import Tree


@torch.no_grad()
def mix_trees(row: Row, trees: Mapping[str, Tree]) -> Tree:
    """Return a site's model after a gossip step, equation (5).

    Sums are in float64, over the sites in the row's order: two sites with equal rows get equal bits.

    Args:
        row: The site's row, without missing models; in the plan's order.
        trees: The model of each site in the row, with the same leaves. Integers are rounded.
    """
    first = trees[next(iter(row))]
    return {key: _weighted_sum([(float(weight), trees[site][key]) for site, weight in row.items()]) for key in first}


def _weighted_sum(parts: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Return the weighted sum of tensors of one shape and dtype."""
    pairs = list(parts)
    total = torch.zeros(pairs[0][1].shape, dtype=torch.float64)
    for weight, leaf in pairs:
        total.add_(leaf.to(torch.float64), alpha=weight)
    like = pairs[0][1]
    return (total if like.is_floating_point() else total.round()).to(like.dtype)


@torch.no_grad()
def sketch_tree(tree: Tree) -> bytes:
    """Return the sketch of a model (see `edge_server.sites.sketch`), over its leaves in order of name.

    Args:
        tree: Floating-point and integer leaves.
    """
    total, position = np.zeros(SIZE), 0
    for _, leaf in sorted(tree.items()):
        values = leaf.reshape(-1).to(torch.float64).numpy()
        for start in range(0, len(values), STRETCH):
            part = values[start : start + STRETCH]
            total += fold(part, position + start)
        position += len(values)
    return pack_sketch(total)

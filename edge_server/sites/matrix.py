"""Mixing matrix of a graph of sites, and its convergence factor.

With N_i devices at site i and deg_i neighbours:

    W_ij = min(N_i / (1 + deg_i), N_j / (1 + deg_j)) / N_i  for an edge,  W_ii = 1 - sum over j of W_ij

If all N_i are equal, these are the Metropolis weights 1 / (1 + max(deg_i, deg_j)), and W is symmetric and doubly
stochastic (L. Xiao, S. Boyd, S. Lall, "Distributed Average Consensus with Time-Varying Metropolis Weights", 2006). For
unequal ones it is I - diag(1/N_i) Lap with a weight for each edge of the Laplacian: rows sum to 1, and N^T W = N^T, so
that mixing preserves the mean over devices. Weights are exact fractions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from typing import TypeAlias

import numpy as np

Edge: TypeAlias = tuple[str, str]
"""Two sites, in the plan's order."""

Row: TypeAlias = dict[str, Fraction]
"""Weight of each site's model in a mix, its own included, in the plan's order; they sum to 1."""


def mixing_rows(sizes: Mapping[str, int], edges: Iterable[Edge]) -> dict[str, Row]:
    """Return the mixing matrix by rows, without zero entries.

    Args:
        sizes: Number of devices of each site, in the plan's order.
    """
    pairs = list(edges)
    degree = {site: sum(site in pair for pair in pairs) for site in sizes}
    share = {site: Fraction(size, 1 + degree[site]) for site, size in sizes.items()}
    rows: dict[str, Row] = {site: {other: Fraction() for other in sizes} for site in sizes}
    for first, second in pairs:
        flow = min(share[first], share[second])
        rows[first][second], rows[second][first] = flow / sizes[first], flow / sizes[second]
    for site, row in rows.items():
        row[site] = 1 - sum(row.values(), Fraction())
    return {site: {other: weight for other, weight in row.items() if weight} for site, row in rows.items()}


def row_without(row: Row, site: str, absent: Collection[str]) -> Row:
    """Return a site's row without absent sites, whose weights go to its own model.

    If the other ends do the same, rows still sum to 1, and the mean over devices is preserved.

    Args:
        absent: Sites whose models are missing or must not be used.
    """
    lost = sum((row[other] for other in absent if other in row and other != site), Fraction())
    remaining = {other: weight for other, weight in row.items() if other == site or other not in absent}
    return remaining | {site: row[site] + lost}


def zeta(sizes: Mapping[str, int], rows: Mapping[str, Row]) -> float:
    """Return max(|lambda_2|, |lambda_m|): the factor by which a mixing step shrinks disagreement at the least.

    Disagreement is the root of the sum over sites of N_i |y_i - mean|^2, the mean over devices. Below 1 exactly if the
    graph is connected; 0 for a single site.
    """
    names = list(sizes)
    matrix = np.array([[float(rows[site].get(other, 0)) for other in names] for site in names])
    roots = np.sqrt(np.array([sizes[name] for name in names], dtype=np.float64))
    symmetric = matrix * roots[:, None] / roots[None, :]  # the same eigenvalues: N_i W_ij = N_j W_ji
    values = np.linalg.eigvalsh((symmetric + symmetric.T) / 2)
    return float(np.abs(values[:-1]).max(initial=0.0))

"""FjORD's network widths, and the names of each width's BatchNorm statistics.

The running mean and variance of width number I are named `KEY@I`; those of the widest network KEY.
Horvath et al.: FjORD, NeurIPS 2021. https://arxiv.org/abs/2102.13451
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.tensors.counts import is_at_most
from shared.tensors.tree import Tree

MARK = "@"
STATISTICS = (".running_mean", ".running_var")


@dataclass(frozen=True)
class Widths:
    """Network widths, as shares of every layer's neurons.

    Attributes:
        shares: In ascending order, the last one 1.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the widths ascend to 1."""
        if list(self.shares) != sorted(set(self.shares)) or not self.shares or self.shares[-1] != 1:
            raise ValueError("widths must ascend to 1")
        if not 0 < self.shares[0] < math.inf:
            raise ValueError("widths must be above 0")

    def largest_within(self, share: float) -> int:
        """Return the number of the largest width up to a share; 0 where all are larger."""
        return max((width for width, limit in enumerate(self.shares) if is_at_most(limit, share)), default=0)

    def is_full_width(self, width: int) -> bool:
        """Return True for the width of the whole network."""
        return width == len(self.shares) - 1

    def statistic_name(self, key: str, width: int) -> str:
        """Return the name of a statistic at a width."""
        return key if self.is_full_width(width) else f"{key}{MARK}{width}"

    def separate_statistics(self, tree: Tree) -> tuple[Tree, Tree]:
        """Split a tree into leaves with the whole network's names, and statistics of single narrower widths."""
        narrow = {key: leaf for key, leaf in tree.items() if MARK in key}
        return {key: leaf for key, leaf in tree.items() if key not in narrow}, narrow

    def cut(self, tree: Tree, width: int) -> Tree:
        """Return the leaves of the network of one width, by the network's names."""
        common = {key: leaf for key, leaf in tree.items() if not is_batchnorm_statistic(key)}
        names = {key.partition(MARK)[0] for key in tree if is_batchnorm_statistic(key)}
        return common | {key: tree[self.statistic_name(key, width)] for key in sorted(names)}


def is_batchnorm_statistic(key: str) -> bool:
    """Return True for a running mean or variance of any width."""
    return key.partition(MARK)[0].endswith(STATISTICS)


def parse_widths(text: str) -> Widths:
    """Parse comma-separated widths.

    Raises:
        ValueError: They are not ascending numbers.
    """
    if not isinstance(text, str):
        raise ValueError(f'widths must be a string such as "0.5,1", not {text!r}')  # noqa: TRY004
    return Widths(tuple(float(width) for width in text.split(",")))

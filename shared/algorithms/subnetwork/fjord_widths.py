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
    """Shares of every layer's neurons.

    Attributes:
        shares: Ascending to 1.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what are no widths.

        Raises:
            ValueError: They are none.
        """
        if list(self.shares) != sorted(set(self.shares)) or not self.shares or self.shares[-1] != 1:
            raise ValueError("widths must ascend to 1")
        if not 0 < self.shares[0] < math.inf:
            raise ValueError("widths must be above 0")

    def up_to(self, share: float) -> int:
        """Return the number of the largest width up to a share; the smallest one's where there is none."""
        return max((width for width, one in enumerate(self.shares) if is_at_most(one, share)), default=0)

    def is_last(self, width: int) -> bool:
        """Tell whether a width is that of the whole network."""
        return width == len(self.shares) - 1

    def named(self, key: str, width: int) -> str:
        """Return the name that a statistic has at a width."""
        return key if self.is_last(width) else f"{key}{MARK}{width}"

    def parted(self, tree: Tree) -> tuple[Tree, Tree]:
        """Return what has the names of the whole network's leaves, and what belongs to one narrower width alone."""
        of_one = {key: leaf for key, leaf in tree.items() if MARK in key}
        return {key: leaf for key, leaf in tree.items() if key not in of_one}, of_one

    def cut(self, tree: Tree, width: int) -> Tree:
        """Return what a network of one width is made of, by the network's own names."""
        common = {key: leaf for key, leaf in tree.items() if not is_statistic(key)}
        names = {key.partition(MARK)[0] for key in tree if is_statistic(key)}
        return common | {key: tree[self.named(key, width)] for key in sorted(names)}


def is_statistic(key: str) -> bool:
    """Tell whether a leaf is a running mean or variance, of any width."""
    return key.partition(MARK)[0].endswith(STATISTICS)


def parse_widths(text: str) -> Widths:
    """Read widths with commas between them.

    Raises:
        ValueError: They are no ascending numbers.
    """
    if not isinstance(text, str):
        raise ValueError(f'widths must be a text such as "0.5,1", not {text!r}')  # noqa: TRY004
    return Widths(tuple(float(one) for one in text.split(",")))

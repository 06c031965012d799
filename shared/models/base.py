"""The model seam: a network with its legal cut points."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shared.tree import Tree


@dataclass(frozen=True)
class Model:
    """A network as a chain of layers.

    Attributes:
        layers: The chain; inputs of shape (N, ...), outputs of shape (N, classes).
        cuts: Legal cut points: a cut `c` leaves `layers[:c]` on the device and `layers[c:]` on the server.
    """

    layers: nn.Sequential
    cuts: tuple[int, ...] = ()

    def tree(self) -> Tree:
        """Return parameters and buffers; the tensors are the network's own, not copies."""
        return dict(self.layers.state_dict())

"""The model seam: a network with its legal cut points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shared.errors import ConfigError
from shared.protocol.messages import Spec
from shared.tensors.placement import device_of
from shared.tensors.tree import Tree


@dataclass(frozen=True)
class Model:
    """A network as a chain of layers.

    A cut is named as papers name it: by how many layers with weights, convolutions and linear ones, lie below it.

    Attributes:
        layers: The chain; inputs of shape (N, ...), outputs of shape (N, classes).
        cuts: Legal cuts in ascending order, each with its place in the chain: `layers[: cuts[cut]]` stays on the
            device, the rest on the server. Slices keep the names that parameters have in the whole.
        example: Shape of one input that it is made for; empty where its builder does not say.
        he_normal: Whether its first weights are normal, as `shared.models.kaiming` says; else uniform, as torch's are.
        spec: What it was built from, so that it can be built anew; None where it was made by hand.
        draw: Who drew its first weights: see `shared.models.build`; empty for torch's generator.
    """

    layers: nn.Sequential
    cuts: Mapping[int, int] = field(default_factory=dict)
    example: tuple[int, ...] = ()
    he_normal: bool = False
    spec: Spec | None = None
    draw: str = ""

    def __post_init__(self) -> None:
        """Refuse cuts that leave nothing on a side, or are out of order.

        Raises:
            ValueError: There is one.
        """
        places = list(self.cuts.values())
        if any(not 0 < place < len(self.layers) for place in places):
            raise ValueError(f"a cut is outside the chain of {len(self.layers)} layers: {places}")
        if places != sorted(set(places)) or list(self.cuts) != sorted(self.cuts):
            raise ValueError(f"cuts must ascend, and their places with them: {dict(self.cuts)}")

    def tree(self) -> Tree:
        """Return parameters and buffers; the tensors are the network's own, not copies."""
        return dict(self.layers.state_dict())

    @property
    def device(self) -> torch.device:
        """Where it trains; the CPU where it has no storage."""
        return device_of(self.layers.parameters())

    def below(self, cut: int) -> nn.Sequential:
        """Return the layers that stay on the device; they are the network's own.

        Raises:
            ConfigError: The network may not be cut there.
        """
        return self._slice(slice(None, self._place(cut)))

    def above(self, cut: int) -> nn.Sequential:
        """Return the layers that the server has, and raise as `below`."""
        return self._slice(slice(self._place(cut), None))

    def _place(self, cut: int) -> int:
        if cut not in self.cuts:
            legal = f"cuts are {', '.join(map(str, self.cuts))}" if self.cuts else "it has no cuts"
            raise ConfigError(f"the model cannot be cut at {cut}: {legal}; correct `cut`")
        return self.cuts[cut]

    def _slice(self, which: slice) -> nn.Sequential:
        part = self.layers[which]
        assert isinstance(part, nn.Sequential)
        return part

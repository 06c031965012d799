"""Model interface: a chain of layers with legal cut points."""

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

    A cut is named as in papers: by the number of layers with weights, convolutions and linear ones, below it.

    Attributes:
        layers: The chain; inputs of shape (N, ...), outputs of shape (N, classes).
        cuts: Legal cuts in ascending order, each with its position in the chain: `layers[: cuts[cut]]` stays on the
            device, the rest is on the server. Slices retain the parameter names of the whole network.
        example: Shape of one input; empty if the builder does not declare it.
        he_normal: Whether initial weights are normal, see `shared.models.kaiming`; else uniform, as torch's are.
        spec: Specification from which the model can be rebuilt; None for a model built by hand.
        draw: Random generator of the initial weights: see `shared.models.build`; empty for torch's.
    """

    layers: nn.Sequential
    cuts: Mapping[int, int] = field(default_factory=dict)
    example: tuple[int, ...] = ()
    he_normal: bool = False
    spec: Spec | None = None
    draw: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for cuts that leave nothing on a side, or are out of order."""
        places = list(self.cuts.values())
        if any(not 0 < place < len(self.layers) for place in places):
            raise ValueError(f"cuts at {places}: each must be inside the chain of {len(self.layers)} layers")
        if places != sorted(set(places)) or list(self.cuts) != sorted(self.cuts):
            raise ValueError(f"cuts and their positions must ascend: {dict(self.cuts)}")

    def tree(self) -> Tree:
        """Return parameters and buffers; the tensors are the network's, not copies."""
        return dict(self.layers.state_dict())

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU for a model without storage."""
        return device_of(self.layers.parameters())

    def below(self, cut: int) -> nn.Sequential:
        """Return the layers that stay on the device; they are the network's own modules.

        Raises:
            ConfigError: The network cannot be cut there.
        """
        return self._slice(slice(None, self._place(cut)))

    def above(self, cut: int) -> nn.Sequential:
        """Return the layers on the server; raise as `below`."""
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

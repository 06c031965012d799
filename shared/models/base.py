"""Model interface: any module, and its chain of layers with legal cut points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shared.errors import ConfigError
from shared.models.chain_trace import cut_places, is_flat, trace_chain
from shared.models.leaves import read_leaves, tied_names
from shared.objectives.classification import CLASSIFICATION
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import Spec
from shared.tensors.tree import Tree, device_of

_chains: WeakKeyDictionary[nn.Module, nn.Sequential] = WeakKeyDictionary()
"""Cache of traced chains by network: every task has a `Model` of its own."""
NO_CUTS = "it has no cuts, since a single tensor passes nowhere between two of its layers with weights"


@dataclass(frozen=True)
class Model:
    """A network, and where it can be cut.

    A cut is named as in papers: by the number of layers with weights, convolutions and linear ones, below it.

    Attributes:
        layers: Any module; inputs of shape (N, ...), outputs of shape (N, classes).
        cuts: Legal cuts of an `nn.Sequential` in ascending order, each with its position: `layers[: cuts[cut]]` stays
            on the device, the rest is on the server. Empty to derive them from the chain, see `cut_places`.
        example: Shape of one input; empty if the builder does not declare it.
        he_normal: Whether initial weights are normal, see `shared.models.kaiming`; else uniform, as torch's are.
        spec: Specification from which the model can be rebuilt; None for a model built by hand.
        draw: Random generator of the initial weights: see `shared.models.build`; empty for torch's.
        objective: Loss and metrics by which the network is trained and evaluated.
    """

    layers: nn.Module
    cuts: Mapping[int, int] = field(default_factory=dict)
    example: tuple[int, ...] = ()
    he_normal: bool = False
    spec: Spec | None = None
    draw: str = ""
    objective: TrainingObjective = CLASSIFICATION

    def __post_init__(self) -> None:
        """Raise ValueError for cuts that leave nothing on a side or are out of order, TypeError for other modules'."""
        if not self.cuts:
            return
        if not isinstance(self.layers, nn.Sequential):
            raise TypeError("cuts are positions in an nn.Sequential; leave them out for another module")
        places = list(self.cuts.values())
        if any(not 0 < place < len(self.layers) for place in places):
            raise ValueError(f"cuts at {places}: each must be inside the chain of {len(self.layers)} layers")
        if places != sorted(set(places)) or list(self.cuts) != sorted(self.cuts):
            raise ValueError(f"cuts and their positions must ascend: {dict(self.cuts)}")

    def tree(self) -> Tree:
        """Return parameters and buffers, tied ones once; the tensors are the network's, not copies."""
        return read_leaves(self.layers)

    @cached_property
    def chain(self) -> nn.Sequential:
        """Layers in order, with the network's own modules and parameter names; traced where `layers` is no chain.

        Raises:
            ConfigError: The network is not a chain of layers, or cannot be traced.
        """
        is_given = bool(self.cuts) or is_flat(self.layers)
        if isinstance(self.layers, nn.Sequential) and is_given and not tied_names(self.layers):
            return self.layers
        if self.layers not in _chains:
            _chains[self.layers] = trace_chain(self.layers)
        return _chains[self.layers]

    @cached_property
    def cut_places(self) -> Mapping[int, int]:
        """Legal cuts in ascending order, each with its position in the chain; raises as `chain`."""
        return self.cuts or cut_places(self.chain)

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
        places = self.cut_places
        if cut not in places:
            legal = f"cuts are {', '.join(map(str, places))}" if places else NO_CUTS
            raise ConfigError(f"the model cannot be cut at {cut}: {legal}; correct `cut`")
        return places[cut]

    def _slice(self, which: slice) -> nn.Sequential:
        part = self.chain[which]
        assert isinstance(part, nn.Sequential)
        return part

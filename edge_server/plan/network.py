"""Plan tables `[model]` and `[lora]`: network, initial weights, trained parameters."""

from __future__ import annotations

import msgspec

from edge_server.plan.sections import Chosen
from shared.protocol.adaptation import Lora
from shared.protocol.messages import Spec


class ModelPlan(Chosen, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Network with options, first weights and frozen layers.

    Attributes:
        name: A name that has a section of options below, or `module:function`.
        options: Options of the network.
        weights: File of pretrained weights, `.safetensors`, or `.pt` or `.pth` with a state dict; relative paths start
            where those of data do. Only the server reads it. Absent: the network's own initial weights.
        weights_skip: Names of layers or parameters that the file lacks or has in another shape, such as `classifier.3`:
            they keep their initial weights. `*` and `?` are wildcards.
        freeze: Names of layers or parameters that are not trained, such as `features`; `*` and `?` are wildcards.
            Devices receive them once and do not send them. With methods that train one network in whole: `fedavg`,
            `fedprox`, `hcef`, `scaffold` and the server optimizers.
    """

    weights: str | msgspec.UnsetType = msgspec.UNSET
    weights_skip: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    freeze: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Reject layers to skip without a file."""
        if self.weights_skip and not self.weights:
            raise ValueError("weights_skip is set without weights; add the file, or remove it")

    @property
    def spec(self) -> Spec:
        """The network alone, as tasks name it."""
        return Spec(name=self.name, options=self.options)


class LoraPlan(Lora, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Low-rank adapters (Hu et al., ICLR 2022), which are trained and sent in place of the network.

    With the methods of `[model] freeze`. Evaluation, export and releases use weights with the adapters merged.

    Attributes:
        rank: Rank r of every adapter, at least 1.
        alpha: Adapters are scaled by alpha / rank.
        layers: Names of the linear and convolution layers that get an adapter, such as `features.0`; `*` and `?` are
            wildcards. Convolutions with groups get none.
        train: Names of layers or parameters that are trained in full besides, such as a new `classifier`.
    """

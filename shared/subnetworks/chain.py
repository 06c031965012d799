"""Chain check: each layer is fed directly by the one below.

Methods that leave neurons out rebuild the network from its layers: properties outside a plain chain, such as a custom
`forward`, weights under two names, or mixed axes, would be lost silently.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from shared.errors import ConfigError
from shared.models.chain import named_layers

NeuronLayout: TypeAlias = Literal["channels", "blocks", "units"]
"""Layout of neurons in the outputs: as channels, as blocks of columns behind a Flatten, as single columns."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def require_straight(layers: nn.Sequential) -> None:
    """Reject a network that is not a plain chain.

    Raises:
        ConfigError: It is not a plain chain.
    """
    if type(layers).forward is not nn.Sequential.forward:
        raise ConfigError("model: its layers have a custom forward, so that neurons cannot be left out")
    count, layout, visited = 0, _layout(layers), set[nn.Module]()
    for name, layer in named_layers(layers):
        if layer in visited and layer.state_dict():
            raise ConfigError(f"model: layer {name} occurs twice; its neurons cannot be left out of one of them")
        visited.add(layer)
        if count and not _takes_neurons(layer, count, layout):
            raise ConfigError(
                f"model: layer {name} does not fit the {count} neurons below it; "
                "choose a chain with one Flatten() between convolutions and linear layers"
            )
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            count, layout = layer.weight.shape[0], _layout(layer)
        elif isinstance(layer, nn.Flatten) and layout == "channels":
            layout = "blocks"


def _layout(layer: nn.Module) -> NeuronLayout:
    return "channels" if isinstance(layer, _CONVOLUTIONS) else "units"


def _takes_neurons(layer: nn.Module, count: int, layout: NeuronLayout) -> bool:
    """Return True if a layer accepts `count` neurons in this layout."""
    match layer:
        case nn.Linear():
            features = layer.in_features
            return features % count == 0 if layout == "blocks" else (features, layout) == (count, "units")
        case nn.Conv1d() | nn.Conv2d():
            return layout == "channels" and layer.in_channels == count
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return layer.num_features == count
        case nn.Flatten():
            return (layer.start_dim, layer.end_dim) == (1, -1)
    return layout == "channels" or not isinstance(layer, _POOLS)

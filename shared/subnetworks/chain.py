"""Check that a network is a plain chain: layers in order, each of which finds the neurons below where they are.

Methods that leave neurons out build the network anew from its layers: what a chain does not show, such as a `forward`
of its own, weights under two names, or axes that are mixed, would be lost in silence.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from shared.errors import ConfigError

Lie: TypeAlias = Literal["channels", "blocks", "units"]
"""How neurons lie in the outputs: as channels, as blocks of columns behind a Flatten, one a column."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)


def named_layers(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers by name, in order; one without parameters, such as a ReLU, may stand in several places."""
    return list(zip(layers._modules, layers, strict=True))  # noqa: SLF001 - `named_children` names no layer twice


def require_straight(layers: nn.Sequential) -> None:
    """Refuse a network that is no plain chain.

    Raises:
        ConfigError: It is none.
    """
    if type(layers).forward is not nn.Sequential.forward:
        raise ConfigError("model: its layers have a forward of their own, whose neurons cannot be left out")
    count, lie, seen = 0, _lie(layers), set[nn.Module]()
    for name, layer in named_layers(layers):
        if layer in seen and layer.state_dict():
            raise ConfigError(f"model: layer {name} stands in two places; its neurons cannot be left out of one")
        seen.add(layer)
        if count and not _takes_neurons(layer, count, lie):
            raise ConfigError(
                f"model: layer {name} does not take the {count} neurons below it as they come; "
                "choose a chain with one Flatten() between convolutions and linear layers"
            )
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            count, lie = layer.weight.shape[0], _lie(layer)
        elif isinstance(layer, nn.Flatten) and lie == "channels":
            lie = "blocks"


def _lie(layer: nn.Module) -> Lie:
    return "channels" if isinstance(layer, _CONVOLUTIONS) else "units"


def _takes_neurons(layer: nn.Module, count: int, lie: Lie) -> bool:
    """Tell whether a layer takes so many neurons as they lie."""
    match layer:
        case nn.Linear():
            return layer.in_features % count == 0 if lie == "blocks" else (layer.in_features, lie) == (count, "units")
        case nn.Conv1d() | nn.Conv2d():
            return lie == "channels" and layer.in_channels == count
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return layer.num_features == count
        case nn.Flatten():
            return (layer.start_dim, layer.end_dim) == (1, -1)
    return lie == "channels" or not isinstance(layer, _POOLS)

"""Layer modules that compute the same as calls of `torch.nn.functional`, bit for bit.

A chain derived from a forward with `F.relu(...)` or `x.flatten(1)` then has the layers that a chain written as
`nn.Sequential` has, so that methods that know layers by their type work on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_BUILDERS: Mapping[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((functional.relu, torch.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid, "sigmoid"), nn.Sigmoid),
    **dict.fromkeys((torch.tanh, functional.tanh, "tanh"), nn.Tanh),
    functional.leaky_relu: nn.LeakyReLU,
    functional.elu: nn.ELU,
    functional.gelu: nn.GELU,
    functional.silu: nn.SiLU,
    functional.max_pool1d: nn.MaxPool1d,
    functional.max_pool2d: nn.MaxPool2d,
    functional.avg_pool1d: nn.AvgPool1d,
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    torch.flatten: lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim),
    "flatten": lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim),
}
DROPOUTS: Mapping[Any, type[nn.Module]] = {
    functional.dropout: nn.Dropout,
    functional.dropout1d: nn.Dropout1d,
    functional.dropout2d: nn.Dropout2d,
    functional.dropout3d: nn.Dropout3d,
}
FEW = 4
"""Most positional arguments: those of a module have the same order up to there."""


def layer_of(
    function: Callable[..., Any] | str, options: tuple[Any, ...], named: Mapping[str, Any], evaluated: Mapping[str, Any]
) -> nn.Module | None:
    """Return the layer of a call; None where there is none that computes the same.

    Args:
        function: Function, or name of a tensor's method.
        options: Positional arguments after the input.
        named: Named arguments in training mode.
        evaluated: Named arguments in evaluation mode.
    """
    if len(options) > FEW or not (isinstance(function, str) or callable(function)):
        return None
    if function in DROPOUTS:
        plain = {key: value for key, value in named.items() if key != "training"}
        drops = named.get("training") is True and evaluated.get("training") is False
        same = plain == {key: value for key, value in evaluated.items() if key != "training"}
        return DROPOUTS[function](*options, **plain) if drops and same else None
    builder = _BUILDERS.get(function)
    if builder is None or named != evaluated:
        return None
    try:
        return builder(*options, **named)
    except TypeError:  # an option that the layer does not have, such as `dtype`
        return None

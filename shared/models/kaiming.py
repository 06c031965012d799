"""Kaiming initialisation, without which deep ReLU networks do not train.

K. He, X. Zhang, S. Ren, J. Sun. Delving Deep into Rectifiers. ICCV 2015. https://arxiv.org/abs/1502.01852, eq. 10:
weights of variance 2 / fan_in preserve the variance of activations from layer to layer; 1 / fan_in without a ReLU.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
Network = TypeVar("Network", bound=nn.Module)


def kaiming(layers: Network) -> Network:
    """Draw new weights for all convolutions and linear layers, with zero biases; return the network.

    Its last layer with weights is assumed to have no ReLU behind it.
    """
    last = last_weighted(layers)
    for layer in layers.modules():
        if isinstance(layer, WEIGHTED):
            if not layer.weight.is_meta:  # without storage, torch would import a compiler
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is last else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers


def last_weighted(layers: nn.Module) -> nn.Module | None:
    """Return the last convolution or linear layer of a network; None without any."""
    return next((layer for layer in reversed([*layers.modules()]) if isinstance(layer, WEIGHTED)), None)

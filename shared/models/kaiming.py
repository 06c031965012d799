"""Kaiming initialisation, without which deep ReLU networks do not train.

K. He, X. Zhang, S. Ren, J. Sun. Delving Deep into Rectifiers. ICCV 2015. https://arxiv.org/abs/1502.01852, eq. 10:
weights of variance 2 / fan_in preserve the variance of activations from layer to layer; 1 / fan_in without a ReLU.
"""

from __future__ import annotations

from torch import nn


def kaiming(layers: nn.Sequential) -> nn.Sequential:
    """Draw new weights for all convolutions and linear layers, with zero biases; return the network.

    Its last layer is assumed to have no ReLU behind it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            if not layer.weight.is_meta:  # without storage, torch would import a compiler
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is layers[-1] else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers

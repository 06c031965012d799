"""Initial weights for deep networks of ReLUs, which do not train from torch's own.

K. He, X. Zhang, S. Ren, J. Sun. Delving Deep into Rectifiers. ICCV 2015. https://arxiv.org/abs/1502.01852, eq. 10:
weights of variance 2 / fan_in keep the variance of activations from layer to layer; 1 / fan_in where no ReLU follows.
"""

from __future__ import annotations

from torch import nn


def kaiming(layers: nn.Sequential) -> nn.Sequential:
    """Draw the weights of all convolutions and linear layers anew, biases zero; return the network.

    Its last layer is taken for the one without a ReLU behind it.
    """
    for layer in layers.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            if not layer.weight.is_meta:  # without storage nothing is drawn, and torch would import a compiler for it
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is layers[-1] else "relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return layers

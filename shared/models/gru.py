"""Gated recurrent network for windows of sensor readings.

K. Cho et al. Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation. EMNLP 2014.
https://arxiv.org/abs/1406.1078; in the form of cuDNN, which torch and ONNX (`linear_before_reset`) share.
"""

from __future__ import annotations

from torch import Tensor, nn

from shared.models.base import Model


class Recurrent(nn.Module):
    """GRU over the steps, and a linear layer on its last output."""

    def __init__(self, features: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, outputs) for inputs of shape (N, features, steps)."""
        states: Tensor = self.gru(inputs.transpose(1, 2))[0]
        outputs: Tensor = self.head(states[:, -1])
        return outputs


def gru(steps: int = 24, features: int = 8, hidden: int = 32, layers: int = 1, outputs: int = 1) -> Model:
    """Build the model; it can be cut between the GRU and the linear layer.

    Args:
        steps: Steps of the declared example; windows of any length are accepted.
        features: Readings of each step; inputs of shape (N, features, steps), as windows of tables.
        hidden: Numbers of the state of each layer.
        layers: Recurrent layers, at least 1.
        outputs: Numbers per window, or classes: outputs of shape (N, outputs).
    """
    if min(steps, features, hidden, layers) < 1:
        raise ValueError("steps, features, hidden and layers must be at least 1")
    return Model(Recurrent(features, hidden, layers, outputs), example=(features, steps))

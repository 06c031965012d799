"""Recurrent forecaster of the next hours."""

import torch
from torch import Tensor, nn

FEATURES, HOURS_AHEAD = 4, 6


class Forecaster(nn.Module):
    """GRU over a window of hours; predicts the change against the last hour."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, hidden, batch_first=True)
        self.head = nn.Linear(hidden, HOURS_AHEAD)

    def forward(self, windows: Tensor) -> Tensor:
        """Return standardised dust of the next hours, (batch, hours), of windows (batch, features, length)."""
        states, _ = self.gru(windows.transpose(1, 2))
        last_dust = windows[:, -1:, -1]
        return last_dust + self.head(torch.relu(states[:, -1]))


def build(hidden: int = 24) -> nn.Module:
    """Return the network."""
    return Forecaster(hidden)

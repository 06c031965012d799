"""Small 1-D CNN for windows of sensor signals."""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def cnn1d(channels: int = 9, window: int = 128, width: int = 32, hidden: int = 64, classes: int = 6) -> Model:
    """Build two convolutions over time; the defaults fit UCI-HAR: three sensors of three axes, six activities.

    Args:
        channels: Channels of the input, of shape (N, channels, window).
        window: Samples of each channel, at least 4.
        width: Channels after the first convolution; twice as many after the second.
        hidden: Features of the first linear layer.
        classes: Outputs, of shape (N, classes).
    """
    if window < 2**2:
        raise ValueError(f"window must be at least 4 samples, not {window}")
    layers = nn.Sequential(
        *(nn.Conv1d(channels, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (window // 2**2), hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
    return Model(layers, {1: 3, 2: 6, 3: 9}, example=(channels, window))

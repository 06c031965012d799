"""Small network of depthwise separable convolutions over log-mel features."""

from torch import Tensor, nn

WORDS = 5


class Separable(nn.Module):
    """Depthwise convolution, then a pointwise one, each with normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape."""
        features = self.norms[0](self.depthwise(features)).relu()
        return self.norms[1](self.pointwise(features)).relu()


def build(channels: int = 24, blocks: int = 3) -> nn.Module:
    """Return the network; its input is (batch, 1, bands, frames)."""
    first = nn.Sequential(
        nn.Conv2d(1, channels, (10, 4), stride=(4, 4), padding=(4, 1), bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )
    return nn.Sequential(
        first,
        *(Separable(channels) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, WORDS),
    )

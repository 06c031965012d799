"""Temporal convolutional network for windows of sensor readings.

S. Bai, J. Z. Kolter, V. Koltun. An Empirical Evaluation of Generic Convolutional and Recurrent Networks for Sequence
Modeling. 2018. https://arxiv.org/abs/1803.01271: residual blocks of two dilated causal convolutions. Weight
normalisation is left out.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from shared.models.base import Model
from shared.models.kaiming import kaiming


class CausalConv(nn.Conv1d):
    """Convolution whose outputs depend on the same and earlier steps alone."""

    def __init__(self, channels: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__(channels, width, kernel, dilation=dilation)
        self.before = (kernel - 1) * dilation

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, width, steps)."""
        return super().forward(functional.pad(inputs, (self.before, 0)))


class TemporalBlock(nn.Module):
    """Two causal convolutions with a shortcut, which is a convolution of kernel 1 where the channels differ."""

    def __init__(self, channels: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(CausalConv(channels, width, kernel, dilation), nn.ReLU()),
            *(CausalConv(width, width, kernel, dilation), nn.ReLU()),
        )
        self.shortcut = nn.Conv1d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, width, steps)."""
        return functional.relu(self.branch(inputs) + self.shortcut(inputs))


class LastStep(nn.Module):
    """Select the last step."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return shape (N, features) for (N, features, steps)."""
        return inputs[:, :, -1]


def tcn(
    steps: int = 24, features: int = 8, width: int = 32, blocks: int = 3, kernel: int = 3, outputs: int = 1
) -> Model:
    """Build the model; it can be cut behind each block.

    Args:
        steps: Steps of the declared example; windows of any length are accepted.
        features: Readings of each step; inputs of shape (N, features, steps), as windows of tables.
        width: Channels of every convolution.
        blocks: Blocks with dilation 1, 2, 4 and so on; the output depends on the last
            1 + 2 (kernel - 1) (2^blocks - 1) steps.
        kernel: Steps of every convolution.
        outputs: Numbers per window, or classes: outputs of shape (N, outputs).
    """
    if min(steps, features, width, blocks, kernel) < 1:
        raise ValueError("steps, features, width, blocks and kernel must be at least 1")
    chain: list[nn.Module] = [nn.Identity()]  # keeps the parameter names of versions that transposed inputs
    cuts, count = dict[int, int](), 0
    for place in range(blocks):
        channels = width if place else features
        chain.append(TemporalBlock(channels, width, kernel, 2**place))
        count += 2 + (channels != width)
        cuts[count] = len(chain)
    chain += [LastStep(), nn.Linear(width, outputs)]
    layers = nn.Sequential(*chain)
    return Model(kaiming(layers), cuts, example=(features, steps), he_normal=True)

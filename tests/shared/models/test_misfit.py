"""A network that does not fit its examples: the layer, what it gets, what it expects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shared.errors import ConfigError
from shared.models.evaluate import output_shape


class Words(nn.Module):
    """An embedding of word numbers, which floating numbers are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.table(inputs).mean(1))


class Pair(nn.Module):
    """A network with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(inputs), inputs


PICTURES = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
NESTED = nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Linear(64, 2)))


@pytest.mark.parametrize(
    ("network", "example", "words"),
    [
        (PICTURES, (1, 5, 5), "layer 0, Conv2d, gets float32 (N x 1 x 5 x 5), and expects (N x 3 x H x W)"),
        (PICTURES, (3, 8, 8), "layer 3, Linear, gets float32 (N x 144), and expects (N x ... x 36)"),
        (NESTED, (1, 28, 28), "layer 1.1, Linear, gets float32 (N x 784), and expects (N x ... x 64)"),
        (nn.Sequential(nn.BatchNorm1d(7), nn.ReLU()), (3,), "expects (N x 7) or (N x 7 x L)"),
        (
            nn.Sequential(nn.LSTM(4, 3, batch_first=True)),
            (6, 5),
            "gets float32 (N x 6 x 5), and expects (N x steps x 4)",
        ),
        (Words(), (6,), "layer table, Embedding, gets float32 (N x 6), and expects whole numbers from 0 to 8"),
        (Pair(), (4,), "its forward returns a tuple"),
        (nn.Flatten(0), (4,), "its outputs for 1 example are of shape (4,)"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_both_shapes_are_named_with_the_layer(network, example, words, device):
    with pytest.raises(ConfigError) as refused:
        output_shape(copy.deepcopy(network).to(device), {}, torch.zeros(2, *example))
    assert words in str(refused.value)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())

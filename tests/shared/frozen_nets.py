"""Small chains of layers of every kind, and choices of their neurons; beside them the textbook's way to freeze."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.protocol.messages import Hyper
from shared.subnetworks.neurons import Active, coverage, draw_neurons, read_chain
from shared.tensors.sgd import descend
from shared.tensors.tree import Tree

NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(12, 11), nn.ReLU(), nn.Linear(11, 7, bias=False), nn.ReLU(), nn.Linear(7, 4)),
        (12,),
    ),
    "flat-mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4)),
        (3, 4),
    ),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(6, 9, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(9 * 9, 10), nn.ReLU(), nn.Linear(10, 4)),
        ),
        (1, 12, 12),
    ),
    "norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 5, 2, stride=2, padding=2), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(5, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.1, inplace=True)),
            *(nn.Conv2d(8, 6, 3, dilation=2, padding=2), nn.BatchNorm2d(6, affine=False), nn.Identity(), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
        ),
        (3, 14, 13),
    ),
    "all-convolutions": (
        lambda: nn.Sequential(
            *(nn.BatchNorm2d(2), nn.Conv2d(2, 4, (3, 2), stride=(2, 1)), nn.GELU()),
            *(
                nn.Conv2d(4, 6, 1),
                nn.AvgPool2d(2),
                nn.ReLU(),
                nn.Conv2d(6, 4, 2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            ),
        ),
        (2, 11, 9),
    ),
    "signals": (
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(5, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 4)),
        ),
        (2, 20),
    ),
}
BATCH, CLASSES = 7, 4


def net(name: str) -> nn.Sequential:
    """Return a network whose BatchNorms are not those of a fresh one."""
    torch.manual_seed(1)
    layers = NETS[name][0]()
    for key, leaf in layers.state_dict().items():
        if leaf.ndim == 1:
            leaf.copy_(torch.rand(leaf.shape) + (0.5 if "var" in key else -0.4))
    return layers


def tree_of(layers: nn.Sequential) -> Tree:
    return {key: leaf.clone() for key, leaf in layers.state_dict().items()}


def batch(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = NETS[name][1]
    return torch.randn(BATCH, *shape, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def some(layers: nn.Sequential, keep: float) -> Active:
    return draw_neurons(read_chain(layers).hidden, keep, seed=3)


def masks(layers: nn.Sequential, active: Active) -> dict[str, Tensor]:
    """Return 1 where a coordinate of a leaf is active, for all leaves of the index."""
    made = read_chain(layers)
    tree = layers.state_dict()
    found = coverage(made.index(active), tree)
    return {key: found.get(key, torch.ones(tree[key].shape, dtype=torch.bool)) for key in made.leaves}


def textbook(layers: nn.Sequential, active: Active, batches: list[tuple[Tensor, Tensor]], hyper: Hyper) -> Tree:
    """Train a copy with torch's own backward; after each step put back what is frozen."""
    shown, momenta = masks(layers, active), Tree()
    start = tree_of(layers)
    layers.train()
    for inputs, labels in batches:
        functional.cross_entropy(layers(inputs), labels).backward()
        descend(layers.named_parameters(), momenta, hyper)
        with torch.no_grad():
            for key, leaf in layers.named_parameters():
                leaf.copy_(torch.where(shown[key], leaf, start[key]))
    return {
        key: torch.where(shown[key], leaf, start[key]) if key in shown else start[key]
        for key, leaf in layers.state_dict().items()
    }

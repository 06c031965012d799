"""The training that replay, the bare loop and Flower do alike; any environment with torch can import it."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

EXAMPLES, BATCH, RATE, CLASSES = 320, 32, 0.05, 10
SHAPES = {"small": (8, 76), "large": (32, 512), "perceptron": (0, 13)}
"""Width and hidden features: 61,678, 1,630,090 and 10,345 parameters."""

EPOCHS = {"small": 1, "large": 1, "perceptron": 10}
"""Whose steps take half a millisecond takes more of them, or no training would be measured but the messages."""


def network(name: str) -> nn.Sequential:
    """Return the network `cnn`, or `mlp` for a width of zero, for images of 28 x 28."""
    width, hidden = SHAPES[name]
    if not width:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def examples(devices: int) -> tuple[Tensor, Tensor]:
    """Return what the devices share: inputs of shape (N, 1, 28, 28), labels of shape (N,)."""
    generator = torch.Generator().manual_seed(0)
    count = devices * EXAMPLES
    inputs = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return inputs.to(torch.float32).div_(255), torch.randint(0, CLASSES, (count,), generator=generator)


def files_of(path: str) -> tuple[str, str]:
    """Return where inputs and labels are saved."""
    return f"{path}-inputs.npy", f"{path}-labels.npy"


def save(path: str, devices: int) -> None:
    """Save what the devices share."""
    for file, leaf in zip(files_of(path), examples(devices), strict=True):
        np.save(file, leaf.numpy())


@cache
def kept(path: str) -> tuple[Tensor, Tensor]:
    """Return examples that were saved in a file; a process maps it once, and shares its pages with others."""
    inputs, labels = (torch.from_numpy(np.load(file, mmap_mode="c")) for file in files_of(path))
    return inputs, labels


def own(path: str, device: int) -> tuple[Tensor, Tensor]:
    """Return one device's examples of those in a file."""
    part = slice(device * EXAMPLES, (device + 1) * EXAMPLES)
    inputs, labels = kept(path)
    return inputs[part], labels[part]


def train(model: nn.Module, inputs: Tensor, labels: Tensor, seed: int, epochs: int = 1) -> float:
    """Run epochs of plain SGD; return the mean loss."""
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(labels), generator=generator).split(BATCH):
            sgd.zero_grad()
            loss = functional.cross_entropy(model(inputs[index]), labels[index])
            loss.backward()
            sgd.step()
            total += loss.item() * len(index)
    return total / len(labels) / epochs

"""Network, data and training loop of the quickstart."""

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Small CNN for pictures of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one logit per digit."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = functional.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def get_weights(net: nn.Module) -> list:
    """Return parameters and buffers as arrays."""
    return [value.cpu().numpy() for value in net.state_dict().values()]


def set_weights(net: nn.Module, parameters: list) -> None:
    """Load parameters and buffers."""
    pairs = zip(net.state_dict().keys(), parameters, strict=True)
    net.load_state_dict(OrderedDict((name, torch.tensor(value)) for name, value in pairs), strict=True)


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders of one partition: four fifths to train, the rest to test."""
    pictures, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pictures, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    mine = torch.arange(partition_id, len(labels), num_partitions)
    cut = len(mine) * 4 // 5
    train, test = (TensorDataset(inputs[part], torch.tensor(labels)[part]) for part in (mine[:cut], mine[cut:]))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train, and return the mean loss per batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / epochs / len(loader)


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return mean loss per batch, and accuracy."""
    net.eval()
    correct, total = 0, 0.0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = net(inputs)
            total += functional.cross_entropy(outputs, labels).item()
            correct += int((outputs.argmax(1) == labels).sum())
    return total / len(loader), correct / len(loader.dataset)

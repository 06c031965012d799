"""Networks learn from their initial parameters: deep ones a batch by heart, the one for sensors what people do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shared.data.examples import batches
from shared.data.load import load
from shared.data.spec import Data
from shared.models.build import build_initial
from shared.protocol.messages import Spec
from tests.machine import shared


def step(layers: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, rate: float) -> float:
    """Take one step of plain SGD; return the loss before it."""
    layers.zero_grad()
    loss = functional.cross_entropy(layers(inputs), labels)
    loss.backward()
    with torch.no_grad():
        for name, weight in layers.named_parameters():
            layers.get_parameter(name).sub_(weight.grad, alpha=rate)
    return loss.item()


@pytest.mark.parametrize(
    ("spec", "rate"),
    [
        (Spec(name="vgg19", options={"width": 0.1}), 0.05),
        (Spec(name="vgg13", options={"width": 0.1, "norm": "none"}), 0.05),
        (Spec(name="resnet20", options={"width": 4}), 0.1),
        (Spec(name="alexnet", options={"width": 0.1, "hidden": 64}), 0.02),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_deep_network_learns_a_batch_by_heart(spec, rate):
    """Eight pictures of noise with labels of chance: the loss halves within 25 steps of plain SGD."""
    random = torch.Generator().manual_seed(3)
    inputs, labels = torch.randn(8, 3, 32, 32, generator=random), torch.randint(10, (8,), generator=random)
    layers = build_initial(spec, 5).layers
    losses = [step(layers, inputs, labels, rate) for _ in range(25)]
    assert min(losses[-5:]) < losses[0] / 2


def test_the_network_for_sensors_tells_activities_of_people_it_never_saw():
    """UCI-HAR's official split: two epochs of 3,000 windows, and more than half of six activities are told apart."""
    path = str(shared("data", "uci-har", "uci_har.npz"))
    model = build_initial(Spec(name="cnn1d"), 0)
    train, test = load(Data(source="npz", path=path, limit=3000)), load(Data(source="npz", path=path, split="test"))
    assert model.example == tuple(train.inputs.shape[1:])
    for inputs, labels in batches(train, batch_size=32, epochs=2, seed=1):
        step(model.layers, inputs, labels, 0.05)
    with torch.no_grad():
        right = model.layers(test.inputs).argmax(1) == test.labels
    assert right.float().mean().item() > 0.5

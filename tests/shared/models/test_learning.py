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
from shared.objectives.training import build_training_objective
from shared.protocol.messages import Spec
from shared.protocol.objective import ObjectiveSpec
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


def draw_windows(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of eight readings, and the mean of one of them over the last steps, to forecast."""
    inputs = torch.randn(64, 12, 8, generator=random).transpose(1, 2)
    return inputs, inputs[:, :1, -4:].mean(2)


def draw_images(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of noise with a brighter rectangle, and which pixels are in it."""
    inputs, labels = torch.randn(8, 3, 16, 16, generator=random), torch.zeros(8, 16, 16, dtype=torch.int64)
    for place, label in enumerate(labels):
        label[place : place + 8, 4:12] = 1
    return inputs + 2 * labels[:, None], labels


def draw_spoken(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a tone in one of five bands, which is its class."""
    inputs, labels = torch.randn(32, 1, 49, 10, generator=random), torch.randint(5, (32,), generator=random)
    inputs[torch.arange(32), 0, 10:30, 2 * labels] += 3
    return inputs, labels


def draw_vectors(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors on a plane in 16 dimensions, to reconstruct."""
    inputs = torch.randn(64, 2, generator=random) @ torch.randn(2, 16, generator=random)
    return inputs, inputs


def draw_stripes(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of smooth waves, to reconstruct."""
    phases = torch.rand(32, 1, 1, generator=random) * 6 + torch.arange(16)[None, :, None] / 4
    inputs = (torch.sin(phases) + torch.zeros(16))[:, None]
    return inputs, inputs


def draw_pictures(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of two colours, which are their classes."""
    inputs, labels = torch.randn(16, 3, 32, 32, generator=random), torch.arange(16) % 2
    inputs[torch.arange(16), labels] += 2
    return inputs, labels


LEARNED = {
    "gru": ({"hidden": 16}, "forecast", draw_windows, 0.5),
    "tcn": ({"width": 8, "blocks": 2}, "forecast", draw_windows, 0.05),
    "unet": ({"side": 16, "width": 4, "depth": 2}, "segmentation", draw_images, 0.3),
    "ds_cnn": ({"width": 16, "blocks": 2, "classes": 5}, "classification", draw_spoken, 1.0),
    "autoencoder": ({"features": 16}, "anomaly", draw_vectors, 0.1),
    "conv_autoencoder": ({"side": 16, "width": 16, "code": 8}, "anomaly", draw_stripes, 0.2),
    "mobilenet_v3_small": ({"side": 32, "width": 0.25, "classes": 2}, "classification", draw_pictures, 0.1),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_network_learns_what_it_is_made_for(name):
    """By the loss of its kind of task, which halves within 40 steps of plain SGD on one batch."""
    options, kind, draw, rate = LEARNED[name]
    inputs, targets = draw(torch.Generator().manual_seed(3))
    layers = build_initial(Spec(name=name, options=options), 5).layers.train()
    objective = build_training_objective(ObjectiveSpec(kind=kind))
    losses = []
    for _ in range(40):
        layers.zero_grad()
        loss = objective.loss(layers(inputs), targets)
        loss.backward()
        with torch.no_grad():
            for weight in layers.parameters():
                weight.sub_(weight.grad, alpha=rate)
        losses.append(loss.item())
    assert min(losses[-5:]) < losses[0] / 2, losses

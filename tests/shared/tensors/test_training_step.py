"""Adam and AdamW against torch's optimizers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shared.protocol.messages import Hyper, StepOptions
from shared.tensors.training_step import adam_step
from shared.tensors.tree import Tree

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OPTIONS = [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"beta1": 0.0}]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def step_loss(layers: nn.Sequential, number: int) -> torch.Tensor:
    """Return a step's loss; in every third step the last layer gets no gradient."""
    generator = torch.Generator().manual_seed(number)
    inputs, labels = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    if number % 3:
        return functional.cross_entropy(layers(inputs), labels)
    return layers[:2](inputs).square().mean()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_torch_bit_for_bit(name, options, decay):
    """A parameter without a gradient is left alone, and counts its own steps."""
    wanted, found, moments = network(), network(), Tree()
    step = StepOptions(optimizer=name, **options)
    hyper = Hyper(learning_rate=0.02, weight_decay=decay, step_options=step)
    betas = step.beta1, step.beta2
    optimizer = OPTIMIZERS[name](wanted.parameters(), lr=0.02, betas=betas, eps=step.eps, weight_decay=decay)
    for number in range(20):
        optimizer.zero_grad()
        step_loss(wanted, number).backward()
        optimizer.step()
        step_loss(found, number).backward()
        adam_step(list(found.named_parameters()), moments, hyper)
    for (key, leaf), expected in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(leaf, expected), key
        assert leaf.grad is None
    assert moments["steps/0.weight"].item() == 20
    assert moments["steps/2.weight"].item() == 13

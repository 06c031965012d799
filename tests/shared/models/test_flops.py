"""Counting the arithmetic of a training step."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.adaptation import adapt
from shared.models.build import build_initial
from shared.models.cost import step_flops
from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.messages import Spec


def test_a_linear_network_costs_what_its_shapes_say():
    """Forward 2·B·(64·32 + 32·10); backward the same for the weights, and for all inputs but the first layer's."""
    batch, first, second = 8, 64 * 32, 32 * 10
    spec = Spec(name="mlp", options={"features": 64, "hidden": 32, "classes": 10})
    assert step_flops(spec, torch.Size([64]), batch) == 2 * batch * (2 * first + 3 * second)


@pytest.mark.parametrize("frozen", [("0",), ("0", "3.weight"), ("9",)])
def test_a_frozen_step_is_what_torch_counts_of_one(frozen):
    spec, network = Spec(name="cnn", options={"side": 8}), build_initial(Spec(name="cnn", options={"side": 8}), 1)
    adaptation = NetworkAdaptation(frozen=frozen)
    layers = adapt(network, adaptation).layers
    with FlopCounterMode(display=False) as counter:
        layers(torch.zeros(4, 1, 8, 8)).sum().backward()
    counted = step_flops(spec, torch.Size([1, 8, 8]), 4, adaptation=adaptation)
    assert counted == counter.get_total_flops() < step_flops(spec, torch.Size([1, 8, 8]), 4)


def test_it_is_linear_in_the_batch_and_needs_no_memory():
    """A step that would take terabytes is counted as quickly as a small one."""
    spec = Spec(name="cnn", options={"side": 8})
    one = step_flops(spec, torch.Size([1, 8, 8]), 1)
    assert one > 0
    assert step_flops(spec, torch.Size([1, 8, 8]), 1 << 32) == one << 32


def test_an_unknown_model_is_the_plans_mistake():
    with pytest.raises(ConfigError, match="nosuch"):
        step_flops(Spec(name="nosuch"), torch.Size([1]), 1)


def test_an_evaluation_goes_forward_only():
    """2·B·(64·32 + 32·10)."""
    spec = Spec(name="mlp", options={"features": 64, "hidden": 32, "classes": 10})
    assert step_flops(spec, torch.Size([64]), 8, trains=False) == 2 * 8 * (64 * 32 + 32 * 10)


def test_a_step_is_counted_once_and_anew_for_another_builder(monkeypatch):
    """By what the name stands for, not by the name."""
    spec, example = Spec(name="mlp", options={"features": 8, "hidden": 4, "classes": 3}), torch.Size([8])
    one = step_flops(spec, example, 2)
    assert step_flops(spec, example, 2) == one
    mlp = MODELS["mlp"]
    monkeypatch.setitem(MODELS, "mlp", lambda **options: mlp(**{**options, "hidden": 8}))
    assert step_flops(spec, example, 2) > one

"""Frozen leaves and low-rank adapters: names, what trains, and merged weights against the adapters' own outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shared.errors import ConfigError
from shared.models.adaptation import A, B, adapt, frozen_names, is_adapter, merge
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.models.leaves import call_with
from shared.models.running_statistics import measure_statistics, statistic_names
from shared.protocol.adaptation import Lora, NetworkAdaptation
from shared.protocol.messages import Spec
from tests.naming import naming

SPECS = {
    "mlp": (Spec(name="mlp", options={"features": 6, "hidden": 5, "classes": 3}), (4, 6)),
    "cnn1d": (Spec(name="cnn1d", options={"channels": 2, "window": 12, "width": 3, "hidden": 5}), (4, 2, 12)),
    "mobilenet": (Spec(name="mobilenet_v3_small", options={"side": 32, "width": 0.1, "classes": 4}), (4, 3, 32, 32)),
    "unet": (Spec(name="unet", options={"side": 16, "width": 3, "depth": 1}), (4, 3, 16, 16)),
}
SMALL = SPECS["mlp"][0]


def adapted(spec: Spec, **options: object) -> Model:
    """Return a network with adapters that add something."""
    model = adapt(build_initial(spec, 3), NetworkAdaptation(lora=Lora(**options)), 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, leaf in model.layers.named_parameters():
            if name.endswith(B):
                leaf.copy_(torch.randn(leaf.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", SPECS)
def test_merged_weights_compute_what_base_and_adapters_do(name):
    """To 1e-6 of the largest output, with a padding, a stride and kernels of several sizes."""
    spec, shape = SPECS[name]
    model, inputs = adapted(spec, rank=2, alpha=0.5), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain = build_blank(spec)
    with torch.no_grad():
        expected = model.layers.eval()(inputs)
        merged = merge(model.tree(), Lora(rank=2, alpha=0.5))
        found = call_with(plain.layers.eval(), merged, inputs)
        base = call_with(plain.layers, {key: leaf for key, leaf in model.tree().items() if not is_adapter(key)}, inputs)
    assert merged.keys() == plain.tree().keys()
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (base - expected).abs().max() > 1e-3 * expected.abs().max(), "the adapters change the outputs"


def test_an_adapter_is_the_papers():
    """W x + alpha / r B A x, from zero: at first the network is the base."""
    model = adapt(build_initial(SMALL, 3), NetworkAdaptation(lora=Lora(rank=2, alpha=3.0, layers=("3",))), 3)
    inputs = torch.randn(4, 6)
    assert torch.equal(model.layers(inputs), build_initial(SMALL, 3).layers(inputs))
    layer = model.layers[3]
    a, b = layer.get_parameter(A), layer.get_parameter(B)
    assert (a.shape, b.shape) == ((2, 5), (3, 2))
    assert 0 < a.abs().max() <= 1 / math.sqrt(5)
    nn.init.normal_(b)
    hidden = torch.randn(4, 5)
    expected = hidden @ layer.weight.T + layer.bias + 1.5 * hidden @ a.T @ b.T
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-6, atol=1e-6)


def test_adapters_are_drawn_from_the_seed_alone():
    first, again, other = (
        adapt(build_initial(SMALL, 3), NetworkAdaptation(lora=Lora()), seed).tree() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[f"1.{A}"], other[f"1.{A}"])


def test_only_adapters_and_named_layers_are_trained():
    model = adapt(build_initial(SMALL, 3), NetworkAdaptation(lora=Lora(layers=("1",), train=("3",))), 3)
    trained = [name for name, leaf in model.layers.named_parameters() if leaf.requires_grad]
    assert trained == [f"1.{A}", f"1.{B}", "3.weight", "3.bias"]
    model.layers(torch.randn(4, 6)).sum().backward()
    assert [name for name, leaf in model.layers.named_parameters() if leaf.grad is not None] == trained
    assert frozen_names(model, NetworkAdaptation(lora=Lora(layers=("1",), train=("3",)))) == {"1.weight", "1.bias"}


def test_grouped_convolutions_get_no_adapter():
    spec = Spec(name="ds_cnn", options={"width": 4, "blocks": 1})
    names = {
        name for name in adapt(build_initial(spec, 1), NetworkAdaptation(lora=Lora()), 1).tree() if is_adapter(name)
    }
    assert {name.partition(".")[0] for name in names} == {"0", "6", "11"}


def test_frozen_normalisation_keeps_its_statistics():
    """It normalises by them in training as well, and a measurement of the others leaves them alone."""
    spec = Spec(name="spu_emnist", options={"width": 3})
    model = adapt(build_initial(spec, 1), NetworkAdaptation(frozen=("0", "1")))
    inputs, before = torch.randn(8, 1, 28, 28) + 3, {name: leaf.clone() for name, leaf in model.tree().items()}
    frozen, trained = model.layers[1], model.layers[5]
    model.layers.train()
    assert (frozen.training, trained.training) == (False, True)
    model.layers(inputs).sum().backward()
    after = model.tree()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"5.running_mean", "5.running_var", "5.num_batches_tracked"}
    assert statistic_names(model.layers) == ("5.running_mean", "5.running_var")
    measured = measure_statistics(model.layers, before, [inputs])
    assert {name for name in before if not torch.equal(measured[name], before[name])} == set(
        statistic_names(model.layers)
    )
    assert model.layers[0].weight.grad is None


@pytest.mark.parametrize(
    ("adaptation", "named"),
    [
        (NetworkAdaptation(frozen=("features.*",)), ("model.freeze", "features.*", "1")),
        (NetworkAdaptation(frozen=("1.wieght",)), ("model.freeze", "1.wieght", "1.weight")),
        (NetworkAdaptation(frozen=("*",)), ("model.freeze", "every parameter")),
        (NetworkAdaptation(lora=Lora(layers=("0",))), ("lora.layers", "'0'")),
        (NetworkAdaptation(lora=Lora(train=("head",))), ("lora.train", "'head'")),
    ],
)
def test_names_that_match_nothing_are_refused_with_the_nearest(adaptation, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        adapt(build_blank(SMALL), adaptation)


def test_a_shared_weight_gets_no_adapter():
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    layers[2].weight = layers[0].weight
    with pytest.raises(ConfigError, match=naming("lora.layers", "shared")):
        adapt(Model(layers), NetworkAdaptation(lora=Lora()))
    with pytest.raises(ConfigError, match=naming("lora.layers")):
        adapt(Model(nn.Sequential(nn.GRU(3, 4))), NetworkAdaptation(lora=Lora()))

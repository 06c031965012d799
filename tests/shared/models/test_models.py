"""Networks by name: where they may be cut, and that a seed makes them."""

from __future__ import annotations

import pytest
import torch

from shared.errors import ConfigError
from shared.messages import Spec
from shared.models import MODELS
from shared.models.init import initial, seeded

INPUTS = {"cnn": (3, 1, 28, 28), "mlp": (3, 64)}
SMALL = {
    "cnn": ({"channels": 3, "side": 8, "width": 2, "hidden": 5, "classes": 4}, (2, 3, 8, 8)),
    "mlp": ({"features": 12, "hidden": 5, "classes": 4}, (2, 3, 2, 2)),
}


@pytest.fixture(params=sorted(MODELS))
def name(request) -> str:
    """Every registered model; one without inputs here fails."""
    return request.param


def test_outputs_have_one_column_a_class(name):
    """With the defaults, and with small options and inputs of another shape."""
    assert initial(Spec(name=name), 1).layers(torch.zeros(INPUTS[name])).shape == (3, 10)
    options, shape = SMALL[name]
    assert initial(Spec(name=name, options=options), 1).layers(torch.zeros(shape)).shape == (2, 4)


def test_a_cut_changes_nothing(name):
    """Bottom, then top, is the whole: outputs and every gradient bit for bit, at every legal cut."""
    model = initial(Spec(name=name), 1)
    inputs = torch.randn(INPUTS[name], generator=torch.Generator().manual_seed(2))
    whole = model.layers(inputs)
    whole.square().sum().backward()
    expected = [weight.grad.clone() for weight in model.layers.parameters()]
    assert model.cuts
    for cut in model.cuts:
        model.layers.zero_grad()
        smashed = model.layers[:cut](inputs)
        received = smashed.detach().requires_grad_(True)
        split = model.layers[cut:](received)
        split.square().sum().backward()
        smashed.backward(received.grad)
        assert torch.equal(split, whole)
        assert all(torch.equal(w.grad, e) for w, e in zip(model.layers.parameters(), expected, strict=True))


def test_cuts_leave_parameters_on_both_sides(name):
    """A device without a parameter has nothing to learn, a server without one nothing to do; cuts ascend."""
    model = initial(Spec(name=name), 1)
    assert list(model.cuts) == sorted(set(model.cuts))
    for cut in model.cuts:
        assert list(model.layers[:cut].parameters())
        assert list(model.layers[cut:].parameters())


def test_initial_parameters_are_a_function_of_the_seed(name):
    """The same whatever torch's global generator did before; other seeds give others."""
    first = initial(Spec(name=name), 7).tree()
    torch.rand(5)
    again, other = initial(Spec(name=name), 7).tree(), initial(Spec(name=name), 8).tree()
    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_torchs_global_generator_is_left_alone(name):
    """Also where building fails."""
    before = torch.random.get_rng_state()
    initial(Spec(name=name), 7)
    with pytest.raises(ConfigError):
        initial(Spec(name=name, options={"classes": "ten"}), 7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeded_block():
    """Inside, draws are the seed's; nested blocks do not disturb the outer one; after it, all is as before."""
    before = torch.random.get_rng_state()
    with seeded(1):
        first = torch.rand(2)
        with seeded(2):
            torch.rand(9)
        second = torch.rand(2)
    with seeded(1):
        assert torch.equal(torch.rand(4), torch.cat([first, second]))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_tree_is_the_networks_own(name):
    """Not a copy: what is written into a leaf is what the network computes with."""
    model = initial(Spec(name=name), 1)
    for leaf in model.tree().values():
        leaf.zero_()
    assert model.layers(torch.ones(INPUTS[name])).abs().sum().item() == 0

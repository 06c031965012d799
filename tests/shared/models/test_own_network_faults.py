"""User networks that cannot be trained are refused with the remedy."""

from __future__ import annotations

import sys

import pytest
import torch

from edge_server.journal.records import closed_rounds
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared import registry
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial, require_fixed_constants
from shared.protocol.messages import Spec
from tests.edge_server.harness import write_examples, write_plan

SOURCE = """
import torch
from torch import nn
from torch.nn import functional

class Scaled(nn.Module):
    def __init__(self, mask, persistent=True):
        super().__init__()
        self.register_buffer("ids", torch.arange(8))
        self.register_buffer("bytes", torch.arange(8, dtype=torch.uint8))
        self.register_buffer("sixteen", torch.full((8,), 0.5, dtype=torch.float16))
        self.register_buffer("wide", torch.full((8,), 0.5, dtype=torch.float64))
        self.register_buffer("mask", mask, persistent=persistent)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("none", None)

    def forward(self, inputs):
        if self.training:
            self.seen = torch.ones((), dtype=torch.bool, device=inputs.device)
        return inputs * self.mask + 0 * self.ids + 0 * self.sixteen + (0 * self.wide).float()

def mask():
    return nn.Sequential(Scaled(torch.arange(8) > 1), nn.Linear(8, 3))

def passing():
    return nn.Sequential(Scaled(torch.ones(8), persistent=False), nn.Linear(8, 3))

def random():
    return nn.Sequential(Scaled(torch.rand(8), persistent=False), nn.Linear(8, 3))

def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3))

def double():
    return nn.Linear(8, 3, dtype=torch.float64)

def half():
    return nn.Linear(8, 3, dtype=torch.bfloat16)

def arrays():
    return [torch.arange(6.0).reshape(2, 3).double().numpy(), torch.ones(3)]

def imaginary():
    module = nn.Linear(8, 3)
    module.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
    return module

class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass

def extra():
    return Extra(8, 3)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.last.weight = self.first.weight
        self.again = self.last

    def forward(self, inputs):
        return self.head(self.last(functional.relu(self.first(inputs))))

tied = Tied

def twice():
    one = nn.Linear(8, 8)
    return nn.Sequential(one, nn.ReLU(), one, nn.Linear(8, 3))

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.scale = torch.tensor(2.0)
        self.linear = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.linear(inputs * self.scale) if inputs.sum() < 1e9 else self.linear(inputs)

class Net(nn.Module):
    pass

def unmade():
    return Net

def nothing():
    return [nn.Linear(8, 3)]
"""


@pytest.fixture(autouse=True)
def own_networks(tmp_path, monkeypatch):
    """Let this process import them, and forget them afterwards."""
    (tmp_path / "ownfaults.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.allow(["ownfaults:*"])
    yield
    registry.allow([])
    sys.modules.pop("ownfaults", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lazy", "parameter 0.weight is of a lazy layer: name the layer's size"),
        ("double", "parameter weight is float64: make it float32: .float()"),
        ("half", "parameter weight is bfloat16: make it float32: .float()"),
        ("imaginary", "buffer phase is complex64: make it one of float32, float64"),
        ("extra", "_extra_state in the state dict is a dict: store it in a buffer"),
        ("unmade", "returned the class Net; return a torch.nn.Module, or a shared.models.base.Model"),
        ("nothing", "returned a list; return a torch.nn.Module, or a shared.models.base.Model"),
    ],
)
def test_what_cannot_travel_is_named_with_what_to_write_instead(name, words):
    with pytest.raises(ConfigError) as refused:
        build_blank(Spec(name=f"ownfaults:{name}"))
    assert words in str(refused.value)


def test_random_constants_are_refused_since_each_device_would_have_others():
    with pytest.raises(ConfigError, match=r"0\.mask is drawn at random"):
        require_fixed_constants(Spec(name="ownfaults:random"))
    require_fixed_constants(Spec(name="ownfaults:passing"))


def test_an_outline_has_no_storage_but_its_constants():
    layers = build_blank(Spec(name="ownfaults:Reads")).layers
    assert layers.linear.weight.is_meta
    assert layers.scale.item() == 2.0
    tied = build_blank(Spec(name="ownfaults:tied"))
    assert sorted(tied.tree()) == ["first.bias", "first.weight", "head.bias", "head.weight", "last.bias"]
    passing = build_blank(Spec(name="ownfaults:passing"))
    assert torch.equal(passing.layers[0].mask, torch.ones(8))
    assert passing.layers[0].ids.is_meta
    assert "0.mask" not in passing.tree()


def replayed(folder, network, algorithm, **sections):
    sections = {
        "model": f'name = "ownfaults:{network}"',
        "algorithm": f'name = "{algorithm}"',
        "rounds": 2,
        "evaluation": "every = 1",
    } | sections
    more = '[partition]\nkind = "even"\n[[device]]\nname = "a"\ncount = 2'
    plan = load(write_plan(folder, data=write_examples(folder, 60), more=more, **sections), folder)
    state, records = replay_plan(plan, folder / "run")
    assert closed_rounds(records)[-1].accuracy is not None
    return state.tree


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "hcef", "local_only"])
@pytest.mark.parametrize("network", ["mask", "passing"])
def test_buffers_of_any_type_are_trained_with(tmp_path, network, algorithm):
    """A flag that every device sets is set in the mean; numbers that none changes stay."""
    tree = replayed(tmp_path, network, algorithm)
    assert torch.equal(tree["0.ids"], torch.arange(8))
    assert torch.equal(tree["0.bytes"], torch.arange(8, dtype=torch.uint8))
    assert torch.equal(tree["0.sixteen"], torch.full((8,), 0.5, dtype=torch.float16))
    assert torch.equal(tree["0.wide"], torch.full((8,), 0.5, dtype=torch.float64))
    assert ("0.mask" in tree) == (network == "mask")
    assert tree["0.seen"].item() is (algorithm != "local_only")


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedprox", "hcef", "local_only", "fedselect", "pruned_personalization"]
)
@pytest.mark.parametrize("network", ["tied", "twice", "Reads"])
def test_tied_weights_travel_once_and_stay_tied(tmp_path, network, algorithm):
    tree = replayed(tmp_path, network, algorithm)
    if network == "twice":
        assert {
            name for name in tree if name in build_initial(Spec(name="ownfaults:twice"), 0).layers.state_dict()
        } <= {*("0.weight", "0.bias", "3.weight", "3.bias")}
    assert not any(name.startswith("again") or name == "last.weight" for name in tree)


@pytest.mark.parametrize("codec", ["masked", "quantize", "float16", "topk", "chain"])
def test_every_codec_carries_buffers_of_any_type(tmp_path, codec):
    """Buffers that do not change arrive unchanged."""
    tree = replayed(tmp_path, "mask", "fedavg", codec=f'name = "{codec}"')
    assert torch.equal(tree["0.ids"], torch.arange(8))
    assert torch.equal(tree["0.mask"], torch.arange(8) > 1)
    assert torch.equal(tree["0.bytes"], torch.arange(8, dtype=torch.uint8))
    assert torch.equal(tree["0.wide"], torch.full((8,), 0.5, dtype=torch.float64))
    assert torch.equal(tree["0.sixteen"], torch.full((8,), 0.5, dtype=torch.float16))
    assert tree["0.seen"].item() is True


def test_a_list_of_arrays_is_a_model_without_a_network():
    """Of a Flower app without PyTorch: its arrays travel by their place, as float32."""
    model = build_initial(Spec(name="ownfaults:arrays"), 0)
    tree = model.tree()
    assert list(tree) == ["0", "1"]
    assert torch.equal(tree["0"], torch.arange(6.0).reshape(2, 3))
    assert {name: leaf.shape for name, leaf in build_blank(Spec(name="ownfaults:arrays")).tree().items()} == {
        "0": (2, 3),
        "1": (3,),
    }

"""Networks of users' own that could not be trained are refused before the run, with what to write in their place."""

from __future__ import annotations

import sys

import pytest
import torch

from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared import registry
from shared.errors import ConfigError
from shared.models.build import build_blank
from shared.protocol.messages import Spec
from tests.edge_server.harness import write_examples, write_plan

SOURCE = """
import torch
from torch import nn
from shared.models.base import Model

def model(*layers):
    return Model(nn.Sequential(*layers), {}, (8,))

class Scaled(nn.Module):
    def __init__(self, mask, persistent=True):
        super().__init__()
        self.register_buffer("ids", torch.arange(8))
        self.register_buffer("mask", mask, persistent=persistent)
        self.register_buffer("none", None)

    def forward(self, inputs):
        return inputs * self.mask + 0 * self.ids

def mask():
    return model(Scaled(torch.ones(8, dtype=torch.bool)), nn.Linear(8, 3))

def passing():
    return model(Scaled(torch.ones(8), persistent=False), nn.Linear(8, 3))

def lazy():
    return model(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3))

def double():
    return model(nn.Linear(8, 3, dtype=torch.float64))

def half():
    return model(nn.Linear(8, 3, dtype=torch.bfloat16))

def tied():
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    return model(one, nn.ReLU(), other)

def twice():
    one = nn.Linear(8, 8)
    return model(one, nn.ReLU(), one)

def good():
    return model(Scaled(torch.ones(8)), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
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
        ("mask", "buffer 0.mask is bool: make it as int64: .long()"),
        ("passing", "buffer 0.mask is not persistent: leave out persistent=False, or make it in forward"),
        ("lazy", "parameter 0.weight is of a lazy layer: name the layer's size"),
        ("double", "parameter 0.weight is float64: make it as float32: .float()"),
        ("half", "parameter 0.weight is bfloat16: make it as float32: .float()"),
        ("tied", "parameter 2.weight is tied to 0.weight: give each its own, or call one module"),
        ("twice", "parameter 2.weight is tied to 0.weight"),
    ],
)
def test_what_cannot_travel_is_named_with_what_to_write_instead(name, words):
    with pytest.raises(ConfigError) as refused:
        build_blank(Spec(name=f"ownfaults:{name}"))
    assert words in str(refused.value)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "hcef", "local_only"])
def test_buffers_of_whole_numbers_are_trained_with(tmp_path, algorithm):
    sections = {"model": 'name = "ownfaults:good"', "algorithm": f'name = "{algorithm}"', "rounds": 2}
    more = '[partition]\nkind = "even"\n[[device]]\nname = "a"\ncount = 2'
    plan = load(write_plan(tmp_path, data=write_examples(tmp_path, 60), more=more, **sections), tmp_path)
    state, _ = replay_plan(plan, tmp_path / "run")
    if "0.ids" in state.tree:
        assert torch.equal(state.tree["0.ids"], torch.arange(8))
        assert torch.equal(state.tree["0.mask"], torch.ones(8))

"""The chain that is derived from a module's forward: layers, names, cuts, and what has none."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.chain import LayerChain, named_layers
from shared.models.chain_trace import cut_places, trace_chain
from shared.models.evaluate import training_mode

SIDE = 12


class Written(nn.Module):
    """A network as tutorials write it: functions in its forward, and a number of examples read at its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn, self.pool = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(6 * 2 * 2, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        count = inputs.size(0)
        inputs = self.pool(functional.relu(self.bn(self.conv1(inputs))))
        inputs = functional.max_pool2d(torch.relu(self.conv2(inputs)), 2)
        inputs = inputs.view(count, -1)
        inputs = functional.dropout(self.fc1(inputs).relu(), 0.5, training=self.training)
        return self.fc2(inputs)


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.relu = nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.norm(self.first(inputs)))) + inputs)


class Residual(nn.Module):
    """A small ResNet with a parameter and a mask that its own forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
        self.stages = nn.ModuleList([Block(4), Block(4)])
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.register_buffer("mask", torch.tensor([True, True, False, True]).view(4, 1, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, factor: int = 1) -> Tensor:
        inputs = self.stem(inputs)
        for stage in self.stages:
            inputs = stage(inputs)
        inputs = inputs * self.scale * self.mask
        return self.head(inputs.mean((2, 3)) * factor)


class Recurrent(nn.Module):
    """A recurrent layer, whose last output is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(SIDE, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, (_, _) = self.rnn(inputs[:, 0])
        return self.head(outputs[:, -1])


class Attention(nn.Module):
    """A block of a vision transformer, whose shapes are read from its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.joint, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, inputs: Tensor) -> Tensor:
        count, length, width = inputs.shape
        joint = self.joint(self.norm(inputs)).reshape(count, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        queries, keys, values = joint.unbind(0)
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        return inputs + self.scale * self.out(mixed.transpose(1, 2).reshape(count, length, width))


class Transformer(nn.Module):
    """A small vision transformer, with a class token and positions as parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 8, 4, 4), nn.Parameter(torch.rand(1, 1, 8))
        self.positions = nn.Parameter(torch.rand(1, 10, 8))
        self.blocks, self.head = nn.Sequential(Attention(8), Attention(8)), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.patches(inputs).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(inputs.shape[0], -1, -1), patches], 1) + self.positions
        return self.head(self.blocks(tokens)[:, 0])


class Dense(nn.Module):
    """Layers that read the outputs of all layers below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.Linear(12, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.first(inputs)
        second = torch.cat([first, self.second(functional.relu(first))], 1)
        third = torch.cat([second, self.third(functional.relu(second))], 1)
        return self.head(third.mean([2, 3]))


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(4, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def seeded(call, *args):
    torch.manual_seed(5)
    return call(*args)


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        (Written, {1: 4, 2: 7, 3: 11}),
        (Residual, {1: 3, 3: 4, 5: 9}),
        (Recurrent, {1: 4}),
        (Dense, {1: 1, 2: 2, 3: 4}),
        (Transformer, {1: 2, 3: 3, 5: 5}),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_a_chain_computes_the_same_with_the_same_names_whole_and_cut(kind, cuts, train, inputs):
    torch.manual_seed(0)
    network = kind()
    before = copy.deepcopy(network.state_dict())
    chain = trace_chain(network)
    model = Model(network)
    assert cut_places(chain) == model.cut_places == cuts
    assert chain.state_dict().keys() == network.state_dict().keys()
    network.train(train)
    expected = seeded(network, inputs)
    for cut in cuts:
        below, above = model.below(cut), model.above(cut)
        assert below.state_dict().keys().isdisjoint(above.state_dict())
        assert below.state_dict().keys() | above.state_dict().keys() == before.keys()
        leaves = copy.deepcopy(before)
        with training_mode(model.chain, train=train):
            features = seeded(functional_call, below, {name: leaves[name] for name in below.state_dict()}, (inputs,))
            outputs = functional_call(above, {name: leaves[name] for name in above.state_dict()}, (features,))
        assert torch.equal(outputs, expected)
    assert network.training == train
    assert not any(isinstance(value, torch.fx.Proxy) for part in network.modules() for value in vars(part).values())


def test_layers_have_the_types_that_methods_know(inputs):
    layers = dict(named_layers(trace_chain(Written())))
    kinds = [type(layer).__name__ for layer in layers.values()]
    first = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Conv2d", "ReLU", "MaxPool2d"]
    assert kinds == [*first, "Flatten", "Linear", "ReLU", "Dropout", "Linear"]


def test_a_residual_block_is_one_layer_and_nested_chains_are_divided():
    names = [name for name, _ in named_layers(trace_chain(Residual()))]
    assert names[:5] == ["stem.0", "stem.1.0", "stem.1.1", "stages.0", "stages.1"]


def test_a_copy_of_a_part_has_parameters_of_its_own(inputs):
    """Also those that the network's forward itself uses."""
    chain = trace_chain(Residual())
    part = copy.deepcopy(chain[2:6])
    with torch.no_grad():
        for leaf in part.parameters():
            leaf.zero_()
        assert not part(torch.ones(1, 4, 5, 5)).any()
        assert chain[2:6](torch.ones(1, 4, 5, 5)).any()
    assert isinstance(part, LayerChain)
    assert part.to("meta").state_dict()["scale"].is_meta


def test_modes_of_functions_follow_the_chain(inputs):
    model = Model(Written().eval())
    with training_mode(model.chain, train=True):
        assert not torch.equal(model.chain(inputs), model.chain(inputs))
    with training_mode(model.chain, train=False):
        assert torch.equal(model.chain(inputs), model.chain(inputs))


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.sum() > 0:
            inputs = self.one(inputs)
        return self.other(inputs)


class Again(Flow):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.other(self.one(self.one(inputs)))


class Unused(Flow):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.other(inputs)


class Tied(Flow):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.other(self.one(inputs))


class Pair(Flow):
    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(inputs), self.other(inputs)


class Modes(Flow):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.one(self.other(inputs)) if self.training else self.one(inputs)


class Two(Flow):
    def forward(self, inputs: Tensor, more: Tensor) -> Tensor:
        return self.one(self.other(inputs) + more)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Flow, "the flow of its forward depends on values (test_chain_trace.py, line "),
        (Again, "one.weight is used by two layers"),
        (Unused, "its forward does not use parameter one.weight"),
        (Tied, "other.weight is tied to one.weight"),
        (Pair, "its forward returns a tuple, not one tensor"),
        (Modes, "its forward has other steps in training than in evaluation"),
        (Two, "missing 1 required positional argument: 'more'"),
    ],
)
def test_a_network_that_is_no_chain_is_named_with_the_reason(kind, reason):
    with pytest.raises(ConfigError) as refused:
        Model(kind()).below(1)
    assert f"model: {kind.__name__} is not a chain of layers: " in str(refused.value)
    assert reason in str(refused.value)


def test_an_untraceable_layer_within_a_chain_stays_whole():
    network = nn.Sequential(nn.Linear(4, 4), Flow(), nn.ReLU(), nn.Linear(4, 2))
    assert [name for name, _ in named_layers(Model(network).chain)] == ["0", "1", "2", "3"]
    assert Model(network).cut_places == {1: 1, 3: 3}


class InPlace(Flow):
    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.one(inputs)
        inputs.clamp_(-0.1, 0.1)
        return self.other(inputs)


class Windows(Flow):
    """Examples become several rows, and rows become examples again."""

    def forward(self, inputs: Tensor) -> Tensor:
        count = inputs.shape[0]
        rows = self.one(inputs.view(-1, 4))
        return self.other(rows.view(count, -1)[:, :4])


@pytest.mark.parametrize(("kind", "features"), [(InPlace, 4), (Windows, 8)])
def test_changes_in_place_and_foldings_are_kept(kind, features):
    network = kind()
    inputs = torch.randn(3, features)
    with torch.no_grad():
        assert torch.equal(trace_chain(network)(inputs), network(inputs))


def test_a_chain_is_traced_once_per_network_and_does_not_keep_it_alive():
    model = Model(Residual())
    other = replace(model, example=(1, SIDE, SIDE))
    assert other.chain is model.chain
    alive = weakref.ref(model.layers)
    del model, other
    gc.collect()
    assert alive() is None

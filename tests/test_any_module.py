"""Plain modules as networks: trained live and in replay, or refused with reason."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_server.journal.records import closed_rounds
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared import registry
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import RUN, write_plan
from tests.edge_server.textbook import DEVICES, require_equal
from tests.naming import naming

SOURCE = '''
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional
from shared.models.base import Model
from shared.models.named_inputs import with_named_inputs


class Plain(nn.Module):
    """As a tutorial writes it."""

    def __init__(self, hidden=8):
        super().__init__()
        self.base = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.ModuleDict({"conv2": nn.Conv2d(4, 6, 3, padding=1)})
        self.fc1 = nn.Linear(24, hidden)
        self.fc2 = nn.Linear(hidden, 3)

    def forward(self, inputs):
        inputs = functional.max_pool2d(functional.relu(self.base(inputs)), 2)
        inputs = functional.relu(self.body["conv2"](inputs))
        inputs = functional.max_pool2d(inputs, 2)
        inputs = functional.relu(self.fc1(inputs.view(inputs.size(0), -1)))
        return self.fc2(functional.dropout(inputs, 0.25, training=self.training))


def chain(hidden=8):
    layers = (
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24, hidden), nn.ReLU(), nn.Dropout(0.25), nn.Linear(hidden, 3)),
    )
    names = (f"{chr(ord('a') + place)}" for place in range(len(layers)))
    return Model(nn.Sequential(OrderedDict(zip(names, layers))), {1: 3, 2: 6, 3: 10})


def described():
    return Model(Plain(), example=(1, 8, 8))


class Block(nn.Module):
    def __init__(self, channels, wide):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wide, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.short = nn.Conv2d(channels, wide, 1) if channels != wide else nn.Identity()

    def forward(self, inputs):
        outputs = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(inputs)))))
        return functional.relu(outputs + self.short(inputs))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.layer1, self.layer2 = Block(4, 4), Block(4, 8)
        self.register_buffer("mask", torch.arange(8).view(8, 1, 1) > 0)
        self.fc = nn.Linear(8, 3)

    def forward(self, inputs):
        outputs = self.layer2(self.layer1(self.stem(inputs))) * self.mask
        return self.fc(outputs.mean((2, 3)))


class Tied(nn.Module):
    """An autoencoder's weights, used in both directions, before a head."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.steps += 1
        return self.head(functional.relu(self.decoder(functional.relu(self.encoder(inputs.flatten(1))))))


class Several(nn.Module):
    """A picture, numbers of words and a temperature."""

    def __init__(self):
        super().__init__()
        self.conv, self.words, self.head = nn.Conv2d(1, 2, 3), nn.Embedding(9, 4), nn.Linear(2 * 36 + 4 + 1, 3)

    def forward(self, words, picture, celsius):
        features = functional.relu(self.conv(picture)).flatten(1)
        return self.head(torch.cat([features, self.words(words).mean(1), celsius], 1))


def several(side=8):
    return with_named_inputs(Several(), {"words": torch.int64}, picture=(1, side, side), words=(5,), celsius=())


class Counting(nn.Module):
    """Whose outputs depend on the number of batches so far in a task."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 3)
        self.register_buffer("batches", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.batches = self.batches + 1
        return self.linear(inputs.flatten(1)) / (1 + self.batches)


class Flow(nn.Module):
    """Whose path depends on the values."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = self.one(inputs.flatten(1))
        if hidden.mean() > 0:
            hidden = hidden.relu()
        return self.two(hidden)
'''
NAMES = {"base": "a", "body.conv2": "d", "fc1": "h", "fc2": "k"}
"""Layers of the plain module, and of the same chain."""
numbers = itertools.count()


@pytest.fixture(autouse=True)
def _own_networks(tmp_path, monkeypatch):
    """Let this process import them, and forget them afterwards."""
    (tmp_path / "anynets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.allow(["anynets:*"])
    yield
    registry.allow([])
    sys.modules.pop("anynets", None)


def plan_of(folder: Path, network: str, algorithm: str, options: str = "", **sections: str) -> Plan:
    """Return a plan of three devices with pictures of 8 by 8."""
    random, arrays = np.random.default_rng(5), dict[str, np.ndarray]()
    for split, count in (("train", 90), ("test", 45)):
        labels = random.integers(0, 3, count)
        pictures = random.normal(size=(count, 1, 8, 8)) + np.eye(8)[labels][:, None, None, :]
        pictures = 1 / (1 + np.exp(-pictures))
        arrays |= {f"x_{split}": pictures.astype(np.float32), f"y_{split}": labels}
    np.savez(folder / "pictures.npz", **arrays)
    has_momentum = not ALGORITHMS[algorithm]().split and algorithm != "scaffold"
    written = {
        "algorithm": f'name = "{algorithm}"\noptions = {{ {options} }}',
        "model": f'name = "anynets:{network}"',
        "hyper": "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.1" + "\nmomentum = 0.5" * has_momentum,
        "cohort": "min_devices = 3",
        "data": 'source = "npz"\npath = "pictures.npz"\nholdout = 0.2',
        "evaluation": "every = 0\non_device = true" if algorithm == "pruned_personalization" else "every = 1",
        "partition": 'kind = "dirichlet"\nalpha = 2.0',
    } | sections
    return load(write_plan(folder, more=DEVICES, **written), folder)


def outcome(records) -> list[tuple[object, ...]]:
    return [(closed.outcome, closed.arrived, closed.loss, closed.accuracy) for closed in closed_rounds(records)]


def renamed(name: str) -> str:
    """Return the name that a leaf of the plain module has in the chain."""
    beside, slash, leaf = name.rpartition("/")
    layer, dot, kind = leaf.rpartition(".")
    return f"{beside}{slash}{NAMES.get(layer, layer)}{dot}{kind}"


METHODS = [
    *(("fedavg", ""), ("fedprox", ""), ("hcef", ""), ("local_only", ""), ("fedselect", "")),
    *(("pruned_personalization", ""), ("pruned_personalization", 'split = "conv_global"')),
    *(("fedspu", "keep = 0.5"), ("random_dropout", "keep = 0.5"), ("fjord", "keep = 0.5"), ("fedmp", "keep = 0.5")),
    *(("hermes", "keep = 0.5"), ("prunefl", "keep = 0.5")),
    *(("fedsl", "cut = 2"), ("fedsl", "cut = 1, recompute = true"), ("splitfed", "cut = 3")),
    *(("fedsl_channel", "cut = 2"), ("splitfed2", "cut = 1")),
]


@pytest.mark.parametrize(("algorithm", "options"), METHODS)
def test_a_plain_module_is_trained_as_the_same_chain(tmp_path, algorithm, options):
    ends = []
    for network in ("chain", "Plain"):
        folder = tmp_path / network
        folder.mkdir()
        ends.append(replay_plan(plan_of(folder, network, algorithm, options), folder / RUN))
    (chain, chain_records), (plain, plain_records) = ends
    require_equal({renamed(name): leaf for name, leaf in plain.tree.items()}, chain.tree)
    assert outcome(plain_records) == outcome(chain_records)


@pytest.mark.parametrize("network", ["Residual", "Tied", "Flow"])
@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedprox", "hcef", "local_only", "pruned_personalization", "fedselect"]
)
def test_methods_of_whole_models_train_any_module(tmp_path, network, algorithm):
    plan = plan_of(tmp_path, network, algorithm)
    state, records = replay_plan(plan, tmp_path / RUN)
    assert [closed.outcome for closed in closed_rounds(records)] == ["aggregated", "aggregated"]
    if network == "Tied":
        assert "decoder.weight" not in state.tree
        assert algorithm not in {"fedavg", "fedprox", "hcef"} or state.tree["steps"].item() > 1
    if network == "Residual" and "mask" in state.tree:
        assert torch.equal(state.tree["mask"].flatten(), torch.arange(8) > 0)


def test_a_residual_network_is_split_between_its_blocks(tmp_path):
    plan = plan_of(tmp_path, "Residual", "fedsl", "cut = 3")
    assert dict(build_blank(plan.model).cut_places) == {1: 2, 3: 3, 6: 6}
    state, records = replay_plan(plan, tmp_path / RUN)
    assert [closed.outcome for closed in closed_rounds(records)] == ["aggregated", "aggregated"]
    before = build_initial(plan.model, plan.seed).tree()
    assert state.tree.keys() == before.keys()
    assert all(not torch.equal(state.tree[name], before[name]) for name in ("layer1.conv1.weight", "layer2.short.bias"))


@pytest.mark.parametrize(
    ("network", "algorithm", "words"),
    [
        ("Flow", "fedsl", ("Flow", "anynets.py, line ", "if hidden.mean() > 0:", "fedavg")),
        ("Flow", "fedspu", ("Flow", "if hidden.mean() > 0:", "fedavg")),
        ("Tied", "splitfed", ("decoder.weight is tied to encoder.weight", "fedprox")),
        ("Residual", "fedspu", ("layer layer1 is a Block, whose neurons cannot be left out", "fedavg")),
        ("Plain", "fedsl", ("cannot be cut at 9", "cuts are 1, 2, 3")),
    ],
)
def test_a_method_that_cannot_train_a_module_says_why_and_names_others(tmp_path, network, algorithm, words):
    with pytest.raises(ConfigError) as refused:
        plan_of(tmp_path, network, algorithm, "cut = 9" if network == "Plain" else "")
    assert all(word in str(refused.value) for word in words)


def test_every_method_trains_a_module_with_control_flow_or_refuses_it_before_the_run(tmp_path):
    refused, trained = set(), set()
    for name, builder in ALGORITHMS.items():
        if builder().server is not None or name == "flower":  # which trains by the user's own app
            continue
        folder = tmp_path / name
        folder.mkdir()
        try:
            plan = plan_of(folder, "Flow", name)
        except ConfigError:
            refused.add(name)
            continue
        _, records = replay_plan(plan, folder / RUN)
        assert closed_rounds(records)[-1].outcome == "aggregated", name
        trained.add(name)
    assert {"fedsl", "splitfed", "fedspu", "fjord", "fedmp"} <= refused
    assert {"fedavg", "fedprox", "hcef", "local_only", "scaffold", "fedadam"} <= trained


@pytest.mark.parametrize(
    ("network", "algorithm"), [("Tied", "fedavg"), ("Counting", "fedavg"), ("Residual", "fedavg"), ("Plain", "fedsl")]
)
def test_a_replay_is_the_live_run(tmp_path, network, algorithm):
    plan = plan_of(tmp_path, network, algorithm)
    replayed, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    site = Site(Network(), plan, tmp_path, name=f"any{next(numbers)}")
    state, records = site.play()
    require_equal(state.tree, replayed.tree)
    assert outcome(records) == outcome(others)


def write_several(folder: Path) -> str:
    """Write pictures, words and temperatures, and return the plan's section of them."""
    random, arrays = np.random.default_rng(5), dict[str, np.ndarray]()
    for split, count in (("train", 60), ("test", 30)):
        arrays |= {
            f"x_{split}.picture": random.integers(0, 256, (count, 8, 8), dtype=np.uint8),
            f"x_{split}.words": random.integers(0, 9, (count, 5)),
            f"x_{split}.celsius": random.normal(size=count),
            f"y_{split}": random.integers(0, 3, count),
        }
    np.savez(folder / "several.npz", **arrays)
    return 'source = "npz"\npath = "several.npz"\nholdout = 0.2'


def test_a_network_with_several_inputs_is_trained_on_several_arrays(tmp_path):
    """Live as in a replay; its outputs are those of the module for the arrays of the file."""
    plan = plan_of(tmp_path, "several", "fedavg", data=write_several(tmp_path))
    replayed, others = replay_plan(plan, tmp_path / "replayed" / RUN)
    site = Site(Network(), plan, tmp_path, name=f"any{next(numbers)}")
    state, records = site.play()
    require_equal(state.tree, replayed.tree)
    assert outcome(records) == outcome(others)
    assert state.tree.keys() == {f"{name}.{kind}" for name in ("conv", "head") for kind in ("weight", "bias")} | {
        "words.weight"
    }
    network = importlib.import_module("anynets").Several()
    network.load_state_dict(state.tree)
    with np.load(tmp_path / "several.npz") as arrays, torch.no_grad():
        picture = torch.from_numpy(arrays["x_test.picture"].astype(np.float32)[:, None] / 255)
        celsius = torch.from_numpy(arrays["x_test.celsius"].astype(np.float32)[:, None])
        outputs = network.eval()(torch.from_numpy(arrays["x_test.words"]), picture, celsius)
        accuracy = (outputs.argmax(1).numpy() == arrays["y_test"]).mean()
    assert closed_rounds(records)[-1].accuracy == pytest.approx(accuracy)


def test_a_function_of_the_user_returns_several_arrays_by_name(tmp_path):
    """The model is that of a file of the same arrays, bit for bit."""
    section = write_several(tmp_path)
    (tmp_path / "severaldata.py").write_text(
        "import numpy as np\n\n\n"
        "def read(data, drop=''):\n"
        "    with np.load(data.path) as file:\n"
        "        prefix = f'x_{data.split}.'\n"
        "        inputs = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}\n"
        "        if drop:\n"
        "            inputs[drop] = inputs[drop][1:]\n"
        "        return inputs, file[f'y_{data.split}']\n"
    )
    registry.allow(["anynets:*", "severaldata:read"])
    own = section.replace('"npz"', '"severaldata:read"')
    states = []
    for name, data in (("file", section), ("function", own)):
        plan = plan_of(tmp_path, "several", "fedavg", data=data)
        states.append(replay_plan(plan, tmp_path / name / RUN)[0].tree)
    require_equal(*states)
    plan = plan_of(tmp_path, "several", "fedavg", data=f'{own}\noptions = {{ drop = "words" }}', evaluation="every = 0")
    with pytest.raises(ConfigError, match=naming("severaldata:read", "words 59", "picture 60")):
        replay_plan(plan, tmp_path / "short" / RUN)


def test_several_inputs_of_other_sizes_are_refused_before_the_run(tmp_path):
    model = 'name = "anynets:several"\noptions = { side = 9 }'
    plan = plan_of(tmp_path, "several", "fedavg", data=write_several(tmp_path), model=model)
    with pytest.raises(ConfigError, match=r"shape \(70,\), and celsius \(1,\), picture \(1, 9, 9\), words \(5,\)"):
        replay_plan(plan, tmp_path / RUN)
    with pytest.raises(ConfigError, match=naming("fedsl", "Several", "celsius, picture, words", "fedavg, fedprox")):
        plan_of(tmp_path, "several", "fedsl", data=write_several(tmp_path))


SEMISUPERVISED = [
    *(("supervised_only", "described"), ("semifl", "Flow"), ("fedmatch", "Flow"), ("fedswitch", "Tied")),
    *(("semifl", "Residual"), ("semisfl", "described"), ("fedswitch_sl", "described")),
]


@pytest.mark.parametrize(("algorithm", "network"), SEMISUPERVISED)
def test_semisupervised_methods_train_plain_modules(tmp_path, algorithm, network):
    """Methods of whole models any, split ones a chain whose builder says the shape of an example."""
    plan = plan_of(
        tmp_path,
        network,
        algorithm,
        server_data='source = "npz"\npath = "pictures.npz"\nlimit = 30',
        data='source = "npz"\npath = "pictures.npz"\nlabels = "none"'
        if algorithm != "supervised_only"
        else 'source = "npz"\npath = "pictures.npz"',
    )
    state, records = replay_plan(plan, tmp_path / RUN)
    assert [closed.outcome for closed in closed_rounds(records)] == ["aggregated", "aggregated"]
    assert closed_rounds(records)[-1].accuracy is not None
    assert algorithm == "fedmatch" or build_blank(plan.model).tree().keys() <= state.tree.keys()

"""Rounds of methods that give devices parts of a network, by hand; servers and devices keep what they keep.

Small chains of layers of every kind, and choices of their neurons; beside them the textbook's way to freeze.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.algorithms.base import Algorithm, Cohort, Result
from shared.algorithms.fedavg import local_sgd
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper
from shared.subnetworks.neurons import PREFIX, Active, coverage, draw_neurons, read_chain, unpack
from shared.tensors.generators import seed_torch
from shared.tensors.training_step import descend
from shared.tensors.tree import Mean, State, Tree
from tests.shared.algorithms.sessions import Own, examples, normed

HYPER = Hyper(local_epochs=3, batch_size=4, learning_rate=0.1)


def network(seed: int = 5) -> Model:
    """Return convolutions and a linear layer with BatchNorm; what comes replaces its parameters."""
    with seed_torch(seed):
        return normed()


def same(one: Tree, two: Tree) -> bool:
    return one.keys() == two.keys() and all(torch.equal(leaf, two[key]) for key, leaf in one.items())


def bare(tree: Tree) -> Tree:
    """Return a payload without its bitmaps."""
    return {key: leaf for key, leaf in tree.items() if not key.startswith(PREFIX)}


@dataclass
class Site:
    """A server and its devices, each with a share of the neurons."""

    algorithm: Algorithm
    shares: dict[str, float]
    hyper: Hyper = HYPER
    number: int = 0
    devices: dict[str, State] = field(default_factory=dict)
    told: dict[str, Assignment] = field(default_factory=dict)
    down: dict[str, Tree] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.algorithm.init(network(), 5)
        self.layout = read_chain(network().layers)

    def data(self, device: str):
        return examples((1, 6, 6), 10 + 4 * (ord(device) - ord("a")), seed=ord(device))  # BatchNorm takes no single one

    def tell(self, devices: Iterable[str]) -> None:
        """Begin a round."""
        self.number += 1
        allocation = {device: {"keep": self.shares[device]} for device in devices}
        cohort = Cohort(tuple(devices), self.hyper, seed=11)
        self.told = self.algorithm.assign(self.state, cohort, allocation, self.number)
        self.down = {device: self.algorithm.broadcast(self.state, device, told) for device, told in self.told.items()}

    def train(self, device: str, data=None) -> Result:
        """Have a device do its task; a payload is checked as the server does, outline first."""
        told, before = self.told[device], self.devices.get(device, State())
        model = network(6)
        with seed_torch(told.seed):
            own = Own(data or self.data(device), told)
            self.devices[device], result = self.algorithm.local(model, before, self.down[device], own, told)
        up = {key: leaf.clone() for key, leaf in result.tree.items()}
        if self.algorithm.check_update:
            self.algorithm.check_update(told, self.down[device], {key: leaf.to("meta") for key, leaf in up.items()})
            self.algorithm.check_update(told, self.down[device], up)
        return result

    def fold(self, results: dict[str, Result]) -> None:
        """End a round with the updates that came."""
        mean: Mean = self.algorithm.empty(self.state)
        for device, result in sorted(results.items()):
            mean = self.algorithm.absorb(mean, device, self.told[device], result)
        self.state = self.algorithm.aggregate(self.state, mean)

    def round(self, devices: str) -> dict[str, Result]:
        self.tell(devices)
        self.results = {device: self.train(device) for device in devices}
        self.fold(self.results)
        return self.results


def after_an_epoch(site: Site, device: str) -> tuple[Tree, Tree]:
    """Return the whole network and the sum of its gradients after one plain epoch on what the device was given."""
    told, model, sums = site.told[device], network(6), Tree()

    def gather(layers: torch.nn.Module, _start: Tree) -> None:
        for name, weight in layers.named_parameters():
            sums[name] = sums.get(name, torch.zeros_like(weight)) + weight.grad

    one = msgspec.structs.replace(told, hyper=msgspec.structs.replace(told.hyper, local_epochs=1))
    start = model.tree() | bare(site.down[device])
    start = {key: leaf.clone() for key, leaf in start.items()}
    with seed_torch(told.seed):
        moved = local_sgd(model, State(), start, Own(site.data(device), one), one, gather)[1].tree
    return {key: start[key] + leaf for key, leaf in moved.items()}, sums


def by_hand(of: Callable[[Tensor], float], tree: Tree, hidden: dict[str, int], keep: float) -> dict[str, list[int]]:
    """Return the neurons whose incoming numbers give the most, sorted out one by one."""
    found = {}
    for name, count in hidden.items():
        merits = [(-of(tree[f"{name}.weight"][neuron]), neuron) for neuron in range(count)]
        found[name] = sorted(neuron for _, neuron in sorted(merits)[: max(1, int(keep * count + 1e-9))])
    return found


def require_choice(algorithm: Algorithm, of: Callable[[Tensor], float], *, gradients: bool = False) -> None:
    """Require that a device's first update names the neurons that matter most after an epoch on what it received."""
    site = Site(algorithm, {"a": 0.5})
    site.tell("a")
    result = site.train("a")
    weights, sums = after_an_epoch(site, "a")
    chosen = unpack(result.tree, site.layout.hidden)
    expected = by_hand(of, sums if gradients else weights, site.layout.hidden, 0.5)
    assert {name: neurons.tolist() for name, neurons in chosen.items()} == expected


def require_mean(site: Site, before: Tree, results: dict[str, Result], chosen: dict[str, dict[str, Tensor]]) -> None:
    """Require each coordinate of the server's model to be the mean over its holders, or what it was without any."""
    full, masks = {}, {}
    for device, result in results.items():
        index = site.layout.index(chosen[device])
        masks[device] = coverage(index, before)
        full[device] = {}
        for key, leaf in bare(result.tree).items():
            whole = torch.zeros_like(before[key])
            whole[masks[device].get(key, torch.ones_like(whole, dtype=torch.bool))] = leaf.flatten()
            full[device][key] = whole
    for key in site.layout.leaves:
        for place in range(before[key].numel()):
            holders = [d for d in results if key not in masks[d] or bool(masks[d][key].flatten()[place])]
            got = site.state.tree[key].flatten()[place].item()
            if not holders:
                assert got == before[key].flatten()[place].item()
                continue
            total = sum(results[d].weight for d in holders)
            mean = sum(results[d].weight * full[d][key].flatten()[place].item() for d in holders) / total
            assert abs(got - mean) <= 1e-5 * (1 + abs(mean)), (key, place)


NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(12, 11), nn.ReLU(), nn.Linear(11, 7, bias=False), nn.ReLU(), nn.Linear(7, 4)),
        (12,),
    ),
    "flat-mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4)),
        (3, 4),
    ),
    "cnn": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(6, 9, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(9 * 9, 10), nn.ReLU(), nn.Linear(10, 4)),
        ),
        (1, 12, 12),
    ),
    "norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 5, 2, stride=2, padding=2), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(5, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.1, inplace=True)),
            *(nn.Conv2d(8, 6, 3, dilation=2, padding=2), nn.BatchNorm2d(6, affine=False), nn.Identity(), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
        ),
        (3, 14, 13),
    ),
    "all-convolutions": (
        lambda: nn.Sequential(
            *(nn.BatchNorm2d(2), nn.Conv2d(2, 4, (3, 2), stride=(2, 1)), nn.GELU()),
            *(
                nn.Conv2d(4, 6, 1),
                nn.AvgPool2d(2),
                nn.ReLU(),
                nn.Conv2d(6, 4, 2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            ),
        ),
        (2, 11, 9),
    ),
    "signals": (
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(5, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 4)),
        ),
        (2, 20),
    ),
}
BATCH, CLASSES = 7, 4


def net(name: str) -> nn.Sequential:
    """Return a network whose BatchNorms are not those of a fresh one."""
    torch.manual_seed(1)
    layers = NETS[name][0]()
    for key, leaf in layers.state_dict().items():
        if leaf.ndim == 1:
            leaf.copy_(torch.rand(leaf.shape) + (0.5 if "var" in key else -0.4))
    return layers


def tree_of(layers: nn.Sequential) -> Tree:
    return {key: leaf.clone() for key, leaf in layers.state_dict().items()}


def batch(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = NETS[name][1]
    return torch.randn(BATCH, *shape, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def some(layers: nn.Sequential, keep: float) -> Active:
    return draw_neurons(read_chain(layers).hidden, keep, seed=3)


def masks(layers: nn.Sequential, active: Active) -> dict[str, Tensor]:
    """Return 1 where a coordinate of a leaf is active, for all leaves of the index."""
    made = read_chain(layers)
    tree = layers.state_dict()
    found = coverage(made.index(active), tree)
    return {key: found.get(key, torch.ones(tree[key].shape, dtype=torch.bool)) for key in made.leaves}


def textbook(layers: nn.Sequential, active: Active, batches: list[tuple[Tensor, Tensor]], hyper: Hyper) -> Tree:
    """Train a copy with torch's own backward; after each step put back what is frozen."""
    shown, momenta = masks(layers, active), Tree()
    start = tree_of(layers)
    layers.train()
    for inputs, labels in batches:
        functional.cross_entropy(layers(inputs), labels).backward()
        descend(layers.named_parameters(), momenta, hyper)
        with torch.no_grad():
            for key, leaf in layers.named_parameters():
                leaf.copy_(torch.where(shown[key], leaf, start[key]))
    return {
        key: torch.where(shown[key], leaf, start[key]) if key in shown else start[key]
        for key, leaf in layers.state_dict().items()
    }

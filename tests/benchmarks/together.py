"""A cohort trained at once against one device after the other: where it pays, and by how much.

The same examples, batches and steps each time; processor seconds of one thread, so that what else runs on the machine
disturbs little; the ways take turns, and the best turn of each counts. `vmap` is torch.func's own way, for comparison.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from measure import Figure
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from edge_server.replay.stacked_networks import stack_networks
from edge_server.replay.stacked_training import devices_per_pass, train
from shared.algorithms.base import Batch
from shared.algorithms.fedavg import local_sgd
from shared.models.base import Model
from shared.models.cnn import cnn
from shared.models.mlp import mlp
from shared.protocol.messages import Assignment, Hyper
from shared.runtime import malloc
from shared.tensors.tree import State, Tree

TURNS, STEPS, CLASSES = 5, 6, 10
BATCH_SIZES, COHORTS = (8, 32), (2, 5, 10, 50)


def lenet() -> Model:
    """Return the network that the examples of other frameworks train: 5 x 5, 6 and 16 channels, 120 and 84 features."""
    convolutions = (nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
    linear = (nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES))
    return Model(nn.Sequential(*convolutions, nn.Flatten(), *linear))


MODELS: dict[str, tuple[Callable[[], Model], int]] = {
    "perceptron": (lambda: mlp(64, 128), 8),
    "perceptron of 28 x 28": (lambda: mlp(784, 13), 28),
    "wide perceptron": (lambda: mlp(784, 128), 28),
    "CNN of 8 x 8": (lambda: cnn(side=8, width=16, hidden=64), 8),
    "LeNet": (lenet, 28),
    "small CNN": (lambda: cnn(width=8, hidden=76), 28),
    "middle CNN": (lambda: cnn(width=32, hidden=64), 28),
    "large CNN": (lambda: cnn(width=32, hidden=512), 28),
}
TARGETS = {"perceptron": ">= 3"}
"""Of all others that share a pass: that it is no loss."""


@dataclass(frozen=True)
class Given:
    """The batches of one device."""

    batches: list[Batch]

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        return sum(len(labels) for _, labels in self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


@dataclass(frozen=True)
class Case:
    """A network, its examples, and how many devices train it."""

    model: Model
    example: torch.Size
    start: Tree
    cohort: list[Given]
    hyper: Hyper

    def alone(self) -> None:
        """Train one device after the other, as on the devices."""
        assignment = Assignment(seed=0, hyper=self.hyper)
        for own in self.cohort:
            local_sgd(self.model, State(), self.start, own, assignment)

    def together(self, most: int) -> None:
        """Train so many devices at once."""
        network = stack_networks(self.model.layers, self.example)
        rest = self.cohort
        for parts in range(-(-len(rest) // most), 0, -1):
            size = -(-len(rest) // parts)
            train(network, self.start, rest[:size], self.hyper)
            rest = rest[size:]

    def vmapped(self) -> None:
        """Train all at once by torch.func."""
        layers, count = self.model.layers, len(self.cohort)
        stacks = {name: leaf.expand(count, *leaf.shape).clone() for name, leaf in self.start.items()}
        gradients = vmap(
            grad(lambda tree, inputs, labels: cross_entropy(functional_call(layers, tree, inputs), labels))
        )
        for step in zip(*self.cohort, strict=True):
            inputs, labels = (torch.stack(one) for one in zip(*step, strict=True))
            for name, change in gradients(stacks, inputs, labels).items():
                stacks[name].add_(change, alpha=-self.hyper.learning_rate)


def case(name: str, batch_size: int, devices: int) -> Case:
    """Make up a case."""
    torch.manual_seed(0)
    build, side = MODELS[name]
    model, example = build(), torch.Size((1, side, side))
    cohort = [
        Given([(torch.rand(batch_size, *example), torch.randint(0, CLASSES, (batch_size,))) for _ in range(STEPS)])
        for _ in range(devices)
    ]
    start = {key: leaf.clone() for key, leaf in model.tree().items()}
    model.layers.to(memory_format=torch.channels_last)  # as a trainer lays it out
    return Case(model, example, start, cohort, Hyper(batch_size=batch_size, learning_rate=0.01))


def seconds(*ways: Callable[[], None], turns: int = TURNS) -> list[float]:
    """Return the processor seconds of each way's best turn."""
    best = [float("inf")] * len(ways)
    for _ in range(turns):
        for place, way in enumerate(ways):
            begun = time.process_time()
            way()
            best[place] = min(best[place], time.process_time() - begun)
    return best


def table(names: list[str]) -> None:
    """Print, for every case, what one step of one device takes alone, and how many times faster the others are."""
    sys.stdout.write("network                  weights  B   K  alone us  vmap   all  rule (at once)\n")
    for name in names:
        for batch_size in BATCH_SIZES:
            for devices in COHORTS:
                one = case(name, batch_size, devices)
                rule = devices_per_pass(one.model.layers, one.example, batch_size)
                ways = (one.alone, one.vmapped, lambda one=one: one.together(len(one.cohort)))
                ways += (lambda one=one, rule=rule: one.together(rule),) if rule > 1 else ()
                alone, by_vmap, all_, *by_rule = seconds(*ways, turns=max(2, TURNS * 10 // (devices + 10)))
                weights = sum(leaf.numel() for leaf in one.start.values())
                sys.stdout.write(
                    f"{name:22s} {weights:9d} {batch_size:2d} {devices:3d} {alone / devices / STEPS * 1e6:9.0f} "
                    f"{alone / by_vmap:5.2f} {alone / all_:5.2f} "
                    + (f"{alone / by_rule[0]:5.2f} ({rule})\n" if by_rule else "    - (1)\n")
                )
                sys.stdout.flush()


def run(*, quick: bool = False) -> list[Figure]:
    """Measure ten devices at batch 32, as many at once as the rule says; where it says one, nothing can be gained."""
    _prepare(1)
    figures, turns = [], 1 if quick else TURNS
    for name in list(MODELS)[:2] if quick else MODELS:
        one = case(name, 32, 10)
        rule = devices_per_pass(one.model.layers, one.example, 32)
        if rule > 1:
            alone, at = seconds(one.alone, lambda one=one, rule=rule: one.together(rule), turns=turns)
            figures.append(Figure(f"{name}, {min(rule, 10)} at once", alone / at, "x", TARGETS.get(name, ">= 1")))
        else:
            figures.append(Figure(f"{name}, one at a time", 1, "x"))
    return figures


def _prepare(threads: int) -> None:
    malloc.tune()
    torch.set_num_threads(threads)


if __name__ == "__main__":
    _prepare(int(sys.argv[1]))
    table(sys.argv[2:] or list(MODELS))

"""What BatchNorm's running statistics are worth as methods leave them, and measured anew on training examples.

    python tests/benchmarks/running_statistics.py runs/RUN [RUN ...]      # the last checkpoints of runs
    python tests/benchmarks/running_statistics.py --methods [NAME ...]    # a few rounds of every method, here

Of a run, its test accuracy with the statistics of its checkpoint and with those of so many batches of training examples
as they are, without dropping and without augmentation. Of a method, VGG-13 at an eighth of its width on handwritten
digits, eight devices whose shares are drawn by Dirichlet at 0.3: the server's model on test examples and, where devices
have models of their own, the mean over devices on examples of the classes that each has; two seeds of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from device_agent.trainer.workspace import TaskBatches
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RunOpened, closed_rounds
from edge_server.plan.data import test_data
from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Cohort, evaluated_parameters
from shared.data.examples import Examples
from shared.data.load import load
from shared.data.partition import split_dirichlet
from shared.data.spec import Data
from shared.models.base import Model
from shared.models.build import build_blank, build_initial, build_zeroed
from shared.models.evaluate import score
from shared.models.running_statistics import measure_statistics, statistic_names
from shared.protocol.messages import Hyper, Spec, derive_seed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State, Tree

COUNTS = (2, 4, 8, 16, 32, 64, 94)
"""Batches of 64 examples; 94 are 6,000."""
BATCH, DEVICES, ALPHA, ROUNDS, SEEDS = 64, 8, 0.3, 12, (1, 2)
MODEL = Spec(name="vgg13", options={"channels": 1, "width": 0.125})
HYPER = Hyper(local_epochs=1, batch_size=16, learning_rate=0.1)
PER_DEVICE = 2
"""Batches."""
KEEPS = (0.25, 0.5, 0.75, 1.0)


def main() -> int:
    """Print a table of runs or of methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.methods:
        Console(width=120).print(methods_table(options.names or alone(), options.rounds))
    else:
        Console(width=120).print(runs_table([Path(name) for name in options.names]))
    return 0


def alone() -> list[str]:
    """Return the methods whose devices train alone."""
    return sorted(name for name, build in ALGORITHMS.items() if build().split is None)


def runs_table(folders: Sequence[Path]) -> Table:
    """Return a row a run: accuracy with the statistics of its checkpoint, and with those of so many batches."""
    table = Table("run", "recorded", "stored", *(f"{count} batches" for count in COUNTS), box=None)
    for folder in folders:
        store = SqliteStore(folder)
        records = store.records()
        plan: Plan = next(one.plan for one in records if isinstance(one, RunOpened))
        last = [one for one in closed_rounds(records) if one.outcome == "aggregated"][-1]
        tree, model = store.load(last.round).tree, build_blank(plan.model)
        store.close()
        test, inputs = load(test_data(plan)), shuffled(load(plan.data)).inputs
        anew = [measure_statistics(model.layers, tree, first(inputs, count)) for count in COUNTS]
        shares = [score(model.layers, one, test).accuracy for one in (tree, *anew)]
        recorded = "-" if last.accuracy is None else f"{last.accuracy:.4f}"
        table.add_row(folder.name, recorded, *(f"{share:.4f}" for share in shares))
    return table


def shuffled(examples: Examples) -> Examples:
    """Return the examples in another order, always the same."""
    return examples.subset(torch.randperm(len(examples), generator=torch.Generator().manual_seed(3)))


def first(inputs: Tensor, count: int) -> Iterator[Tensor]:
    """Yield so many batches, fewer where there are no more."""
    for begin in range(0, min(len(inputs), count * BATCH), BATCH):
        yield inputs[begin : begin + BATCH]


@dataclass(frozen=True)
class Fleet:
    """Devices with their own examples, and examples that nobody trains on."""

    shares: Mapping[str, Examples]
    test: Examples

    def own_test(self, device: str) -> Examples:
        """Return the test examples of the classes that a device has."""
        classes = self.shares[device].labels.unique()
        return self.test.subset(torch.isin(self.test.labels, classes).nonzero().flatten())


def make_fleet(seed: int) -> Fleet:
    """Deal the digits."""
    train, test = (load(Data(source="digits", split=split)) for split in ("train", "test"))
    parts = split_dirichlet(train.labels.numpy(), alpha=ALPHA, parts=DEVICES, seed=seed, min_examples=32)
    return Fleet({f"d{place}": train.subset(torch.from_numpy(part)) for place, part in enumerate(parts)}, test)


def methods_table(names: Sequence[str], rounds: int) -> Table:
    """Return a row a method, figures the mean over seeds."""
    heads = (
        "server's, stored",
        "measured anew",
        "by devices",
        "by devices, pooled",
        "devices' own, stored",
        "measured anew",
    )
    table = Table("method", *heads, box=None)
    for name in names:
        found = [method_accuracies(name, seed, rounds) for seed in SEEDS]
        means = [[one for one in column if one is not None] for column in zip(*found, strict=True)]
        table.add_row(name, *(f"{fmean(column):.4f}" if column else "-" for column in means))
        sys.stderr.write(f"{name} {found}\n")
    return table


def method_accuracies(name: str, seed: int, rounds: int) -> tuple[float | None, ...]:
    """Return test accuracies after some rounds: stored and measured anew, of the server's model and devices' own."""
    algorithm, fleet = ALGORITHMS[name](), make_fleet(seed)
    state, devices, trees = train(algorithm, fleet, seed, rounds)
    model, everybody = build_blank(MODEL), shuffled(load(Data(source="digits"))).inputs
    server: tuple[float | None, ...] = (None, None, None, None)
    judged = evaluated_parameters(algorithm, model, state)
    if {key for key, _ in model.layers.named_parameters()} <= judged.keys():
        server = (*pair(model, judged, everybody, fleet.test), *by_devices(model, judged, fleet))
    if algorithm.personal is None:
        return (*server, None, None)
    own = [
        pair(model, trees[device], shuffled(fleet.shares[device]).inputs, fleet.own_test(device)) for device in devices
    ]
    return (*server, *(fmean(column) for column in zip(*own, strict=True)))


def by_devices(model: Model, tree: Tree, fleet: Fleet) -> tuple[float, float]:
    """Return accuracies with the mean of what devices measure, each over two batches of its own.

    The second with the variance of their means added to the mean of their variances, as of all examples in one.
    """
    own = [
        measure_statistics(model.layers, tree, first(shuffled(one).inputs, PER_DEVICE)) for one in fleet.shares.values()
    ]
    mean, pooled = dict(tree), dict(tree)
    for name in statistic_names(model.layers):
        stacked = torch.stack([one[name] for one in own])
        mean[name] = pooled[name] = stacked.mean(0)
        if name.endswith("running_var"):
            means = torch.stack([one[name.replace("_var", "_mean")] for one in own])
            pooled[name] = mean[name] + means.var(0, correction=0)
    return score(model.layers, mean, fleet.test).accuracy, score(model.layers, pooled, fleet.test).accuracy


def pair(model: Model, tree: Tree, inputs: Tensor, test: Examples) -> tuple[float, float]:
    """Return accuracies with stored and with measured statistics."""
    anew = measure_statistics(model.layers, tree, first(inputs, COUNTS[-1]))
    return score(model.layers, tree, test).accuracy, score(model.layers, anew, test).accuracy


def train(algorithm: Algorithm, fleet: Fleet, seed: int, rounds: int) -> tuple[State, list[str], Mapping[str, Tree]]:
    """Run rounds without a network between; return the server's state, the devices, and the models that they use."""
    model, names = build_zeroed(MODEL), tuple(fleet.shares)
    state, own, trees = (
        algorithm.init(build_initial(MODEL, seed), seed),
        dict.fromkeys(names, State()),
        dict[str, Tree](),
    )
    allocation = {name: {"keep": KEEPS[place % len(KEEPS)], "prune": 0.5} for place, name in enumerate(names)}
    for number in range(1, rounds + 1):
        mean = algorithm.empty(state)
        assert isinstance(mean, Mean)
        for name, told in algorithm.assign(state, Cohort(names, HYPER, seed, rounds), allocation, number).items():
            down = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told).items()}
            batches = TaskBatches(fleet.shares[name], told, lambda: False)
            with seed_torch(derive_seed(seed, number, name)):
                own[name], result = algorithm.local(model, own[name], dict(down), batches, told)  # type: ignore[misc]
            mean = algorithm.absorb(mean, name, told, result)
            if algorithm.personal and number == rounds:
                used = algorithm.personal.parameters(model, own[name], down, told)
                trees[name] = {key: used.get(key, leaf).clone() for key, leaf in model.layers.state_dict().items()}
        state = algorithm.aggregate(state, mean)
    return state, list(names), trees


if __name__ == "__main__":
    sys.exit(main())

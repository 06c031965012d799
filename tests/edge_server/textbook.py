"""FedAvg as a textbook has it, in one loop and plain torch, and the plan that tells a whole fleet to do the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from edge_server.plan.plan import Plan, devices, share
from edge_server.rounds.check_plan import load
from shared.data.examples import Examples, split_holdout
from shared.data.load import load as load_examples
from tests.edge_server.harness import beginning, write_examples, write_plan

NAMES = ("a", "b", "c")
ROUNDS = 3
SLOW = """
[[device]]
name = "a"
compute_s = 2.0
up_mbit_s = 0.01
down_mbit_s = 0.02
delay_s = 3.0
[[device]]
name = "b"
compute_s = 7.0
up_mbit_s = 0.004
down_mbit_s = 0.05
delay_s = 8.0
[[device]]
name = "c"
compute_s = 0.5
delay_s = 0.01
"""
"""Devices behind links so slow that offers are repeated."""
LINKS = """
[[device]]
name = "a"
compute_s = 2.0
up_mbit_s = 1.0
down_mbit_s = 4.0
delay_s = 0.02
[[device]]
name = "b"
compute_s = 3.0
up_mbit_s = 2.0
down_mbit_s = 5.0
delay_s = 0.03
[[device]]
name = "c"
compute_s = 0.5
up_mbit_s = 3.0
down_mbit_s = 1.0
delay_s = 0.01
"""
"""Devices with links and delays, one of which the others wait for."""
DEVICES = "\n".join(f'[[device]]\nname = "{name}"' for name in NAMES)


def make_plan(folder: Path, rounds: int = ROUNDS, more: str = DEVICES, **sections: str) -> Plan:
    """Return a plan of three devices with shares of their own."""
    written = {
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }',
        "hyper": "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.2\nmomentum = 0.5",
        "cohort": "min_devices = 3",
        "data": write_examples(folder, 90),
        "evaluation": "every = 1",
        "partition": 'kind = "dirichlet"\nalpha = 1.0',
    } | sections
    path = write_plan(folder, rounds=rounds, more=more, **written)
    path.write_text(f"seed = 11\n{path.read_text()}")
    return load(path, folder)


def shares(plan: Plan, count: int = 0) -> list[Examples]:
    """Return what each device trains on."""
    fleet = devices(plan, count)
    return [split_holdout(load_examples(share(plan, fleet, k)), plan.data.holdout, 0)[0] for k in range(len(fleet))]


def textbook(
    plan: Plan, count: int = 0, sent: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tree: tree
) -> dict[str, Tensor]:
    """FedAvg, McMahan et al. 2017, algorithm 1, with all clients in every round and momentum in their SGD.

    `sent` is what becomes of an update on its way.
    """
    fleet = devices(plan, count)
    features, hidden, classes = (plan.model.options[key] for key in ("features", "hidden", "classes"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    model.load_state_dict(beginning(plan))
    for number in range(1, plan.rounds + 1):
        start = copy.deepcopy(model.state_dict())
        total = {key: torch.zeros_like(leaf) for key, leaf in start.items()}
        for device, examples in zip(fleet, shares(plan, count), strict=True):
            model.load_state_dict(start)
            sgd = torch.optim.SGD(model.parameters(), lr=plan.hyper.learning_rate, momentum=plan.hyper.momentum)
            seed = xxhash.xxh3_64_intdigest(f"{plan.seed}/{number}/{device.name}".encode()) >> 1
            order = torch.Generator().manual_seed(seed)
            for _ in range(plan.hyper.local_epochs):
                for index in torch.randperm(len(examples), generator=order).split(plan.hyper.batch_size):
                    sgd.zero_grad()
                    functional.cross_entropy(model(examples.inputs[index]), examples.labels[index]).backward()
                    sgd.step()
            for key, leaf in sent({key: leaf - start[key] for key, leaf in model.state_dict().items()}).items():
                total[key].add_(leaf, alpha=len(examples))
        everybody = sum(len(examples) for examples in shares(plan, count))
        model.load_state_dict({key: start[key] + total[key] / everybody for key in start})
    return model.state_dict()


def require_equal(tree: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert tree.keys() == expected.keys()
    for key, leaf in expected.items():
        assert torch.equal(tree[key], leaf), key

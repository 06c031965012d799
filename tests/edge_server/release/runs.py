"""Runs whose models are exported: a journal and checkpoints, written as a server writes them, of any network."""

from __future__ import annotations

from pathlib import Path

import torch

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Origin, SqliteStore
from edge_server.journal.records import RoundClosed, RunClosed, RunOpened
from edge_server.journal.runs import FOLDER, Run, find
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from shared.models.build import initial
from shared.protocol.messages import Spec
from shared.tensors.tree import State, Tree

RUN = "tiny-20260101T000000Z-aaaa"
TINY = {
    "alexnet": {"width": 0.1, "hidden": 16},
    "cnn": {"width": 2, "hidden": 8},
    "cnn1d": {"width": 2, "hidden": 8},
    "mlp": {"hidden": 4},
    "resnet20": {"width": 2},
    "vgg13": {"width": 0.05},
    "vgg16": {"width": 0.05},
    "vgg19": {"width": 0.05},
}
"""Options that make built-in networks small."""
ACCURACIES = {1: 0.5, 2: 0.875, 3: 0.75}


def trained(model: Spec, seed: int) -> Tree:
    """Return leaves as training might leave them: no two alike, variances above zero."""
    generator = torch.Generator().manual_seed(seed)
    tree = initial(model, seed).tree()
    for name, leaf in tree.items():
        if name.endswith("running_var"):
            leaf.copy_(torch.rand(leaf.shape, generator=generator) + 0.5)
        elif leaf.is_floating_point():
            leaf.add_(torch.randn(leaf.shape, generator=generator), alpha=0.1)
    return tree


def leave_run(
    folder: Path, name: str, *, run: str = RUN, seed: int = 1, more: Tree | None = None, **sections: object
) -> Run:
    """Leave a finished run of three rounds, of which the second was the most accurate.

    Args:
        folder: Of runs.
        name: The network, made small by `TINY`.
        run: The run's name.
        seed: Of the parameters.
        more: Leaves of the server's state beside these, or in their place.
        **sections: Of the plan.
    """
    model = Chosen(name=name, options=TINY.get(name, {}))
    plan = Plan(**{"name": "tiny", "rounds": 3, "algorithm": Chosen(name="fedavg"), "model": model, **sections})
    store = SqliteStore(folder / run, durable=False)
    store.append(RunOpened(run=run, plan=plan, started=run[5:21]))
    for number, accuracy in ACCURACIES.items():
        tree = {**trained(plan.model, seed + number), **(more or {})}
        origin = Origin(run, number, 0)
        checkpoints.save(folder / run / FOLDER, number, State(tree), durable=False, origin=origin, best=2)
        store.append(RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=1.0, accuracy=accuracy))
    store.append(RunClosed(outcome="finished"))
    store.close()
    return find(folder, run)

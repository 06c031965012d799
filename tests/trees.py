"""Small boards of a test's own: their profile, files below a root, and files that refuse as real ones do.

The plainest split method there is, for tests: bottom and top by SGD, nothing dropped, pruned or quantized.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from device_agent.profile.schema import Profile
from device_agent.trainer.workspace import TaskBatches
from edge_server.plan.plan import Plan, devices, share
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Allocation, Batches, Cohort, Result, Session, Split, assign_alike
from shared.data.examples import split_holdout
from shared.data.load import load
from shared.errors import WireError
from shared.models.base import Model
from shared.models.build import blank, initial, seeded
from shared.protocol.messages import Assignment, Missed, mix
from shared.registry import build
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree

NOBODY = 65534


def grow(root: Path, files: Mapping[str, object]) -> Path:
    """Write the files below the root and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if content != "" else "")
    return root


def profile(**tables: object) -> Profile:
    """Return a profile that says no more than a test needs."""
    return Profile(schema=1, id="board", name="Board", **tables)  # type: ignore[arg-type]


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Make a file that answers EAGAIN: a pipe that is held open and into which nobody writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(holder)


@contextmanager
def open_to_all() -> Iterator[Path]:
    """Give a folder that every user may enter; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block as a user without rights; root may read files of mode 0."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


CUT = 3
"""Layers of the MLP that stay on the device: all but the last."""


def _bottom(state: Tree) -> Tree:
    return {key: leaf for key, leaf in state.items() if int(key.partition(".")[0]) < CUT}


def _local(model: Model, _state: State, start: Tree, batches: Batches, assignment: Assignment) -> Session:
    own = {key: leaf.clone().requires_grad_() for key, leaf in start.items()}
    skip, seen, losses = 0, 0, list[float]()
    for inputs, labels in islice(batches, assignment.steps):
        if skip:
            skip -= 1
            continue
        noise = torch.rand(())  # from the global generator, which whoever drives the session seeds
        features = functional_call(model.layers[:CUT], own, (inputs,))
        down = yield {"features": features.detach(), "labels": labels.to(torch.uint8), "noise": noise}
        if isinstance(down, Missed):
            skip = down.steps - 1
            continue
        features.backward(down["gradient"])
        with torch.no_grad():
            for leaf in own.values():
                leaf.sub_(leaf.grad, alpha=assignment.hyper.learning_rate)
                leaf.grad = None
        seen += len(labels)
        losses.append(float(down["loss"]))
    ended = {key: leaf.detach() for key, leaf in own.items()}
    loss = sum(losses) / len(losses) if losses else None
    return State(facts={"seen": seen}), Result(ended, 1.0, seen, loss)


def _serve(
    model: Model, state: State, _told: Mapping[str, Assignment], ups: Mapping[str, Tree]
) -> tuple[State, dict[str, Tree]]:
    rate = float(state.facts["rate"])
    top = {key: leaf.requires_grad_() for key, leaf in state.tree.items() if key not in _bottom(state.tree)}
    down, count = {}, len(ups)
    for device, up in ups.items():
        features = up["features"].clone().requires_grad_()
        loss = functional.cross_entropy(functional_call(model.layers[CUT:], top, (features,)), up["labels"].long())
        (loss / count).backward()
        assert features.grad is not None
        down[device] = {"gradient": features.grad * count, "loss": loss.detach()}
    with torch.no_grad():
        for leaf in top.values():
            leaf.sub_(leaf.grad * (1 + 0.001 * torch.rand(())), alpha=rate)  # as a dropout of the top would draw
            leaf.grad = None
    return State(state.tree | {key: leaf.detach() for key, leaf in top.items()}, state.facts), down


def _check_features(model: Model, _state: State, assignment: Assignment, up: Tree) -> None:
    width = model.layers[CUT].in_features
    features = up.get("features")
    if features is None or features.ndim != 2 or features.shape[1] != width:
        raise WireError("features of another shape", reason="shape")
    if not torch.isfinite(features).all():
        raise WireError("features that are no numbers", reason="not-finite")
    if len(up.get("labels", Tensor())) != len(features) or len(features) > assignment.hyper.batch_size:
        raise WireError("labels for other features", reason="shape")


def plain(steps: int = 4, rate: float = 0.2) -> Algorithm:
    """Build the method; a round has `steps` steps, the server's top learns at `rate`."""

    def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
        told = assign_alike(state, cohort, allocation, number)
        hyper = msgspec.structs.replace(cohort.hyper, local_epochs=steps)
        return {
            device: msgspec.structs.replace(one, hyper=hyper, steps=steps, values={"first_step": (number - 1) * steps})
            for device, one in told.items()
        }

    return Algorithm(
        init=lambda model, _seed: State({key: leaf.clone() for key, leaf in model.tree().items()}, {"rate": rate}),
        assign=assign,
        broadcast=lambda state, _device, _assignment: _bottom(state.tree),
        local=_local,
        absorb=lambda mean, _device, _assignment, result: tree.accumulate(mean, result.tree, result.weight),
        aggregate=lambda state, mean: State(state.tree | tree.finish_mean(mean), state.facts),
        split=Split(_serve, _check_features),
    )


def alone(plan: Plan) -> Tree:
    """Return what a run comes to in one loop: no messages, no files, every device's step after the other's."""
    fleet, algorithm = devices(plan, 0), build(ALGORITHMS, plan.algorithm, "algorithm")
    shares = [split_holdout(load(share(plan, fleet, k)), plan.data.holdout, 0)[0] for k in range(len(fleet))]
    names, model = [device.name for device in fleet], blank(plan.model)
    state = algorithm.init(initial(plan.model, plan.seed), plan.seed)
    for number in range(1, plan.rounds + 1):
        told = algorithm.assign(state, Cohort(tuple(names), plan.hyper, plan.seed, plan.rounds), {}, number)
        sessions, ups = {}, {}
        for name, own in zip(names, shares, strict=True):
            batches = TaskBatches(own, told[name], lambda: False)
            start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told[name]).items()}
            sessions[name] = algorithm.local(model, State(), start, batches, told[name])
            with seeded(mix(told[name].seed, 1, name)):
                ups[name] = next(sessions[name])
        results, top = {}, State({key: leaf.clone() for key, leaf in sorted(state.tree.items())}, state.facts)
        for step in range(1, told[names[0]].steps + 1):
            with seeded(mix(plan.seed, (number - 1) * told[names[0]].steps + step, "_server")):
                top, downs = algorithm.split.serve(model, top, told, ups)
            for name in names:
                try:
                    with seeded(mix(told[name].seed, step + 1, name)):
                        ups[name] = sessions[name].send(downs[name])
                except StopIteration as done:
                    results[name] = done.value[1]
        mean = Mean()
        for name in sorted(names):
            mean = algorithm.absorb(mean, name, told[name], results[name])
        state = algorithm.aggregate(top, mean)
    return state.tree

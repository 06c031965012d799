"""Methods in one loop and plain torch, and plans that tell a fleet to do the same.

FedAvg as a textbook has it; the plainest split method; a method of which the server trains too, on labels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from device_agent.trainer.workspace import TaskBatches
from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan, devices
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Batch,
    Batches,
    Cohort,
    Result,
    ServerTraining,
    Session,
    Split,
    assign_alike,
)
from shared.algorithms.fedavg import fedavg
from shared.data.examples import Examples, split_holdout
from shared.data.load import load as load_examples
from shared.errors import WireError
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Assignment, Missed, derive_seed
from shared.registry import build
from shared.tensors import tree
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State, Tree
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
    return load(path, folder, several_sites=True)


def shares(plan: Plan, count: int = 0) -> list[Examples]:
    """Return what each device trains on."""
    fleet = devices(plan, count)
    return [
        split_holdout(load_examples(device_data(plan, fleet, k)), plan.data.holdout, 0)[0] for k in range(len(fleet))
    ]


def textbook(
    plan: Plan, count: int = 0, sent: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tree: tree
) -> dict[str, Tensor]:
    """FedAvg, McMahan et al. 2017, algorithm 1, with all clients in every round and momentum in their SGD.

    `sent` is what becomes of an update on its way.
    """
    fleet = [device.name for device in devices(plan, count)]
    state = beginning(plan)
    for number in range(1, plan.rounds + 1):
        state = textbook_round(plan, number, state, fleet, count=count, sent=sent)
    return state


def textbook_round(
    plan: Plan,
    number: int,
    start: dict[str, Tensor],
    names: Collection[str],
    *,
    count: int = 0,
    sent: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tree: tree,
) -> dict[str, Tensor]:
    """One round of it with the devices of these names."""
    features, hidden, classes = (plan.model.options[key] for key in ("features", "hidden", "classes"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    total = {key: torch.zeros_like(leaf) for key, leaf in start.items()}
    pairs = zip(devices(plan, count), shares(plan, count), strict=True)
    those = [(device, examples) for device, examples in pairs if device.name in names]
    for device, examples in those:
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
    everybody = sum(len(examples) for _, examples in those)
    return {key: start[key] + total[key] / everybody for key in start}


def require_equal(tree: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert tree.keys() == expected.keys()
    for key, leaf in expected.items():
        assert torch.equal(tree[key], leaf), key


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


def _check_features(model: Model, _state: State, assignment: Assignment, up: Tree) -> float:
    width = model.layers[CUT].in_features
    features = up.get("features")
    if features is None or features.ndim != 2 or features.shape[1] != width:
        raise WireError("features of another shape", reason="shape")
    if not torch.isfinite(features).all():
        raise WireError("features that are no numbers", reason="not-finite")
    if len(up.get("labels", Tensor())) != len(features) or len(features) > assignment.hyper.batch_size:
        raise WireError("labels for other features", reason="shape")
    return tree.tree_norm(up)


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
    names, model, own_shares = [device.name for device in fleet], build_blank(plan.model), shares(plan)
    state = algorithm.init(build_initial(plan.model, plan.seed), plan.seed)
    for number in range(1, plan.rounds + 1):
        told = algorithm.assign(state, Cohort(tuple(names), plan.hyper, plan.seed, plan.rounds), {}, number)
        sessions, ups = {}, {}
        for name, own in zip(names, own_shares, strict=True):
            batches = TaskBatches(own, told[name], lambda: False)
            start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told[name]).items()}
            sessions[name] = algorithm.local(model, State(), start, batches, told[name])
            with seed_torch(derive_seed(told[name].seed, 1, name)):
                ups[name] = next(sessions[name])
        results, top = {}, State({key: leaf.clone() for key, leaf in sorted(state.tree.items())}, state.facts)
        for step in range(1, told[names[0]].steps + 1):
            with seed_torch(derive_seed(plan.seed, (number - 1) * told[names[0]].steps + step, "_server")):
                top, downs = algorithm.split.serve(model, top, told, ups)
            for name in names:
                try:
                    with seed_torch(derive_seed(told[name].seed, step + 1, name)):
                        ups[name] = sessions[name].send(downs[name])
                except StopIteration as done:
                    results[name] = done.value[1]
        mean = Mean()
        for name in sorted(names):
            mean = algorithm.absorb(mean, name, told[name], results[name])
        state = algorithm.aggregate(top, mean)
    return state.tree


TEACHER, DECAY = "teacher/", 0.5


def part(state: State, *, teacher: bool) -> Tree:
    """Return the teacher, by the network's names, or the student."""
    keys = [key for key in state.tree if key.startswith(TEACHER) == teacher]
    return {key.removeprefix(TEACHER): state.tree[key] for key in keys}


def train(model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Do as many steps as the round's number on batches drawn at random; the teacher follows after each."""
    student = {key: leaf.clone().requires_grad_() for key, leaf in part(state, teacher=False).items()}
    teacher = {key: leaf.clone() for key, leaf in part(state, teacher=True).items()}
    inputs, labels = labelled
    for _ in range(number):
        batch = torch.randint(len(labels), (cohort.hyper.batch_size,))
        functional.cross_entropy(functional_call(model.layers, student, (inputs[batch],)), labels[batch]).backward()
        with torch.no_grad():
            for key, leaf in student.items():
                leaf.sub_(leaf.grad, alpha=cohort.hyper.learning_rate)
                leaf.grad = None
                teacher[key].lerp_(leaf, 1 - DECAY)
    return joined({key: leaf.detach() for key, leaf in student.items()}, teacher)


def joined(student: Tree, teacher: Tree) -> State:
    """Return both as one state."""
    return State(student | {TEACHER + key: leaf for key, leaf in teacher.items()})


def aggregate(state: State, mean: Mean) -> State:
    """Move the student by the mean change."""
    return joined(tree.add(part(state, teacher=False), tree.finish_mean(mean)), part(state, teacher=True))


def labelled_server() -> Algorithm:
    """Build the method: FedAvg between."""
    return replace(
        fedavg(),
        init=lambda model, _seed: joined(*({key: leaf.clone() for key, leaf in model.tree().items()} for _ in "st")),
        broadcast=lambda state, _device, _assignment: part(state, teacher=False),
        aggregate=aggregate,
        evaluated=lambda state: part(state, teacher=True),
        server=ServerTraining(train),
    )

"""A method of which the server trains too, for tests: labelled steps of its own, judged by a mean of what it was."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Algorithm, Batch, Cohort, ServerTraining
from shared.algorithms.fedavg import fedavg
from shared.models.base import Model
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree

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
        server=ServerTraining(train, lambda state: part(state, teacher=True)),
    )

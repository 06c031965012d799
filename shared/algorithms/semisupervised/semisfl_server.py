"""The server half of SemiSFL: supervised steps before a round, then one step of the server part at every barrier.

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. Optimizers begin anew with every round, and the session's
is not the supervised steps' one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shared.algorithms.base import Batch, Cohort
from shared.algorithms.semisupervised.learner import Learner, SessionPass
from shared.algorithms.semisupervised.round_terms import added, begun, number_fact
from shared.algorithms.semisupervised.settings import (
    HEAD,
    MOMENTUM,
    LabelledSettings,
    SemisflSettings,
    SteppedSettings,
    select,
)
from shared.algorithms.semisupervised.supervised_steps import StepHistory
from shared.algorithms.semisupervised.switch import use_teacher
from shared.algorithms.split.cut_shapes import count_outputs, features_at_cut
from shared.algorithms.split.settings import MATRIX, is_finite
from shared.data.views.pair import Strength, make_views
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Scalar, mix
from shared.tensors.tree import State, Tree, check_like

HISTORY = "history/"
FOLLOWED, LABELLED = "followed", "labelled"
SUPERVISED_LOSS, UNLABELLED_LOSS, SESSION_STEPS = "supervised_loss", "unlabelled_loss", "session_steps"
"""Facts of the state: steps that the teacher followed, examples of the server, and the open round's losses."""
LABELLER, STUDENT = "labeller/", "student"
"""Begins the facts that say of which devices the student labels the examples; of all others the teacher does."""
ANSWERS = "answers/"
"""Begins the leaves that sum up the classes' shares that were predicted of a device's examples in the open session."""


def train(settings: SemisflSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the supervised steps of a round: see `ServerTraining.train`.

    Args:
        model: The whole network, without storage.
        state: The server's before the round; not changed.
        labelled: The server's own examples.
        cohort: Hyperparameters, seed, and rounds of the run.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know.
    """
    require_classes(model, labelled)
    tree = {name: leaf.clone() for name, leaf in state.tree.items() if not name.startswith(MOMENTUM)}
    learner = Learner.from_tree(settings, model, tree, int(number_fact(state.facts, FOLLOWED)))
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    steps = StepHistory.from_facts(state.facts, HISTORY).steps + (0 if learner.followed else settings.warmup_steps)
    losses, sums = list[float](), defaultdict[str, float](float)
    batches = labelled_batches(settings, labelled, cohort, number, count=2 if settings.projects else 1)
    for (view, *other), classes in itertools.islice(batches, steps):
        loss, terms = learner.supervised_step(view, next(iter(other), None), classes, hyper)
        losses.append(loss)
        for name, term in terms.items():
            sums[name] += term
    learner.momenta = {}
    facts: dict[str, Scalar] = {
        **begun(state.facts, steps, {name: total / len(losses) for name, total in sums.items()}),
        FOLLOWED: learner.followed,
        LABELLED: len(labelled[1]),
        SUPERVISED_LOSS: math.fsum(losses) / len(losses),
        UNLABELLED_LOSS: 0.0,
        SESSION_STEPS: 0,
    }
    return State(learner.tree(), facts)


def labelled_batches(
    settings: SteppedSettings, labelled: Batch, cohort: Cohort, number: int, *, count: int = 1
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield views of a batch of labelled examples and their labels, for one supervised step of a round after the other.

    Every method that takes such steps draws alike, so that a difference between two is not one of batches.

    Args:
        settings: How many examples a step takes, and which views.
        labelled: The server's own examples.
    """
    seed, size = mix(cohort.seed, number, "supervised"), settings.server_batch_of(cohort.hyper, len(labelled[1]))
    places = enumerate(batch_places(len(labelled[1]), size, seed))
    return view_batches(settings, labelled, places, (settings.server_views,) * count, seed)


def view_batches(
    settings: LabelledSettings,
    labelled: Batch,
    places: Iterable[tuple[int, Tensor]],
    strengths: tuple[Strength, ...],
    seed: int,
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield views of one batch of labelled examples after the other, and their labels.

    Args:
        settings: Whether views may be mirrored.
        labelled: The server's own examples.
        places: Of each batch, with the number of its step.
        seed: Of the round's views.
    """
    inputs, labels = labelled
    for step, index in places:
        yield make_views(inputs[index], strengths, mix(seed, step, "views"), mirrors=settings.mirrors), labels[index]


def batch_places(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the places of one batch after the other, all of a size, of example orders strung together."""
    generator, left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(left) < size:
            left = torch.cat([left, torch.randperm(count, generator=generator)])
        yield left[:size]
        left = left[size:]


def require_classes(model: Model, labelled: Batch, _hyper: Hyper | None = None) -> None:
    """Refuse labelled examples of other classes than the network has: see `ServerTraining.check`.

    Args:
        labelled: The server's own examples.

    Raises:
        ConfigError: They are such.
    """
    sizes = labelled[1].bincount().tolist()
    outputs = next(leaf for leaf in reversed([*model.layers.parameters()])).shape[0]
    if len(sizes) > outputs:
        raise ConfigError(f"server_data: labels up to {len(sizes) - 1}, and the model has {outputs} outputs")
    if missing := [number for number in range(outputs) if number >= len(sizes) or not sizes[number]]:
        raise ConfigError(f"server_data: class {missing[0]} has no labelled example; the model has {outputs} outputs")


def check_labelled(settings: SemisflSettings, model: Model, labelled: Batch, hyper: Hyper) -> None:
    """Refuse labelled examples that the method could not train on, and a queue that holds no batch: `check` of it.

    Args:
        labelled: The server's own examples.

    Raises:
        ConfigError: As `require_classes`; or a queue has less room than a batch whose projections go there.
    """
    require_classes(model, labelled)
    own = settings.server_batch_of(hyper, len(labelled[1]))
    for key, room, size, is_used in (
        ("labelled_queue", settings.labelled_queue, own, settings.projects),
        ("unlabelled_queue", settings.unlabelled_queue, hyper.batch_size, settings.clustering),
    ):
        if is_used and 0 < room < size:
            whose = "the server's" if key == "labelled_queue" else "a device's"
            raise ConfigError(f"{key}: {room} is less than {whose} batch of {size}; raise it, or set 0")


def check_features(settings: SemisflSettings, model: Model, state: State, assignment: Assignment, up: Tree) -> float:
    """Refuse what the server part could not take: see `Split.check_features`.

    Raises:
        WireError: A tensor is missing, unknown, or of another dtype or shape; there are more examples than a batch
            has; a number is NaN or infinite.
    """
    if set(up) != {"features", "teacher"}:
        raise WireError(f"tensors {', '.join(map(repr, sorted(up)))}", reason="unknown-tensor")
    features = up["features"]
    shape, cut = tuple(features.shape), settings.cut_of(model)
    if features.dtype != torch.float32:
        raise WireError(f"features of {features.dtype}", reason="dtype")
    if len(shape) < MATRIX or not 1 <= shape[0] <= assignment.largest_batch:
        raise WireError(f"features of shape {shape} for batches of {assignment.largest_batch}", reason="shape")
    norm = check_like(up, {"features": features, "teacher": features})
    if model.example and shape[1:] != (own := features_at_cut(model, cut, state.tree)):
        raise WireError(f"an example has features of shape {shape[1:]}, one of the server's {own}", reason="shape")
    head = select(state.tree, HEAD)
    if head and math.prod(shape[1:]) != head["0.weight"].shape[1]:
        raise WireError(f"features of shape {shape[1:]}, the head takes {head['0.weight'].shape[1]}", reason="shape")
    count_outputs(model, cut, state.tree, shape)
    return norm


def serve(
    settings: SemisflSettings,
    model: Model,
    state: State,
    assignments: Mapping[str, Assignment],
    ups: Mapping[str, Tree],
) -> tuple[State, dict[str, Tree]]:
    """Server half of a step: see `Split.serve`.

    A device without which all numbers are finite, and with which they are not, is answered with nothing, and does not
    move.
    """
    learner = Learner.from_tree(settings, model, state.tree, int(number_fact(state.facts, FOLLOWED)))
    sent = {device: (up["features"], up["teacher"]) for device, up in ups.items()}
    by_student = {device for device in ups if state.facts.get(LABELLER + device) == STUDENT}
    found = learner.session_pass(sent, by_student)
    if not _counts(found):
        sent = {device: one for device, one in sent.items() if _counts(learner.session_pass({device: one}, by_student))}
        if not sent or not _counts(found := learner.session_pass(sent, by_student)):
            return state, {device: {} for device in ups}
    learner.take(found, assignments[next(iter(ups))].hyper)
    facts: dict[str, Scalar] = {
        **added(state.facts, found.terms),
        UNLABELLED_LOSS: number_fact(state.facts, UNLABELLED_LOSS) + found.loss,
        SESSION_STEPS: int(number_fact(state.facts, SESSION_STEPS)) + 1,
    }
    answers = _added_answers(state.tree, found) if settings.switch else {}
    return State({**learner.tree(), **answers}, facts), {
        device: {"gradient": found.down[device]} if device in found.down else {} for device in ups
    }


def _added_answers(tree: Tree, found: SessionPass) -> Tree:
    """Return what was predicted of all devices' examples so far in a session, summed by class."""
    sums = {name: leaf for name, leaf in tree.items() if name.startswith(ANSWERS)}
    for device, shares in found.answers.items():
        before = sums.get(ANSWERS + device)
        sums[ANSWERS + device] = shares.sum(0) if before is None else before + shares.sum(0)
    return sums


def decide_labellers(settings: SemisflSettings, tree: Tree) -> dict[str, Scalar]:
    """Return who labels each device's examples in its next session, as facts, by what was predicted in this one."""
    return {
        LABELLER + name.removeprefix(ANSWERS): "teacher" if use_teacher(leaf, settings.switch_divergence) else STUDENT
        for name, leaf in tree.items()
        if name.startswith(ANSWERS)
    }


def _counts(found: SessionPass) -> bool:
    """Tell whether every number of a pass can be used."""
    return math.isfinite(found.loss) and all(map(is_finite, (*found.down.values(), *found.gradients.values())))

"""SemiSFL server half: supervised training on labelled data, then split-session steps.

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. Every round starts with new optimizers, and the session
does not share that of the supervised steps.
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
from shared.algorithms.semisupervised.round_terms import add_terms, begin_terms, read_number
from shared.algorithms.semisupervised.settings import (
    HEAD,
    MOMENTUM,
    LabelledSettings,
    SemisflSettings,
    SteppedSettings,
    take_prefix,
)
from shared.algorithms.semisupervised.supervised_steps import StepHistory
from shared.algorithms.semisupervised.switch import use_teacher
from shared.algorithms.split.cut_shapes import infer_feature_shape, infer_output_shape
from shared.algorithms.split.settings import MATRIX, is_finite
from shared.data.views.pair import Strength, make_views
from shared.errors import ConfigError, WireError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.build import build_initial
from shared.models.evaluate import output_shape
from shared.protocol.messages import Assignment, Hyper, Scalar, derive_seed
from shared.tensors.tree import State, Tree, check_like

HISTORY = "history/"
FOLLOWED, LABELLED = "followed", "labelled"
SUPERVISED_LOSS, UNLABELLED_LOSS, SESSION_STEPS = "supervised_loss", "unlabelled_loss", "session_steps"
"""Facts: steps that the teacher followed, the server's examples, and the losses of the open round."""
LABELLER, STUDENT = "labeller/", "student"
"""Prefix and value of the facts for devices whose examples the student labels instead of the teacher."""
ANSWERS = "answers/"
"""Prefix of the leaves with a device's class probabilities, summed over the open session."""


def train(settings: SemisflSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the supervised steps of a round: see `ServerTraining.train`.

    Args:
        model: The whole network, without storage.
        state: The server's before the round; not changed.

    Raises:
        ConfigError: A class has no example, or is unknown to the network.
    """
    require_classes(model, labelled)
    tree = {name: leaf.clone() for name, leaf in state.tree.items() if not name.startswith(MOMENTUM)}
    learner = Learner.from_tree(settings, model, tree, int(read_number(state.facts, FOLLOWED)))
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
        **begin_terms(state.facts, steps, {name: total / len(losses) for name, total in sums.items()}),
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
    """Yield views of a labelled batch and their labels, for one supervised step of a round after the other.

    All methods with such steps draw alike, so that batches cause no difference between them.
    """
    seed, size = (
        derive_seed(cohort.seed, number, "supervised"),
        settings.server_batch_of(cohort.hyper, len(labelled[1])),
    )
    places = enumerate(draw_batch_positions(len(labelled[1]), size, seed))
    return view_batches(settings, labelled, places, (settings.server_views,) * count, seed)


def view_batches(
    settings: LabelledSettings,
    labelled: Batch,
    places: Iterable[tuple[int, Tensor]],
    strengths: tuple[Strength, ...],
    seed: int,
) -> Iterator[tuple[Sequence[Tensor], Tensor]]:
    """Yield views of one labelled batch after the other, and their labels.

    Args:
        places: Positions of each batch, with the number of its step.
    """
    inputs, labels = labelled
    for step, index in places:
        yield (
            make_views(inputs[index], strengths, derive_seed(seed, step, "views"), mirrors=settings.mirrors),
            labels[index],
        )


def draw_batch_positions(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the positions of batches of equal size, from concatenated random orders."""
    generator, remaining = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(remaining) < size:
            remaining = torch.cat([remaining, torch.randperm(count, generator=generator)])
        yield remaining[:size]
        remaining = remaining[size:]


def require_classes(model: Model, labelled: Batch, _hyper: Hyper | None = None) -> None:
    """Reject labelled examples whose classes differ from the network's: see `ServerTraining.check`.

    Raises:
        ConfigError: They differ.
    """
    sizes = labelled[1].bincount().tolist()
    if model.spec and model.spec.name not in MODELS:  # a user's network, whose last parameter may be any
        layers = build_initial(model.spec, 0).layers
        outputs = output_shape(layers, {}, labelled[0].cpu(), "server_data, model").numel()
    else:
        outputs = next(leaf for leaf in reversed([*model.layers.parameters()])).shape[0]
    if len(sizes) > outputs:
        raise ConfigError(f"server_data: labels go up to {len(sizes) - 1}, but the model has {outputs} outputs")
    if missing := [number for number in range(outputs) if number >= len(sizes) or not sizes[number]]:
        raise ConfigError(f"server_data: class {missing[0]} has no labelled example; the model has {outputs} outputs")


def check_labelled(settings: SemisflSettings, model: Model, labelled: Batch, hyper: Hyper) -> None:
    """Reject labelled examples that the method cannot train on, and a queue smaller than a batch.

    Raises:
        ConfigError: As `require_classes`; or a queue has less room than a batch of projections.
    """
    require_classes(model, labelled)
    server_batch = settings.server_batch_of(hyper, len(labelled[1]))
    for key, room, size, is_used in (
        ("labelled_queue", settings.labelled_queue, server_batch, settings.projects),
        ("unlabelled_queue", settings.unlabelled_queue, hyper.batch_size, settings.clustering),
    ):
        if is_used and 0 < room < size:
            owner = "the server's" if key == "labelled_queue" else "a device's"
            raise ConfigError(f"{key}: {room} is less than {owner} batch of {size}; raise it, or set 0")


def check_features(settings: SemisflSettings, model: Model, state: State, assignment: Assignment, up: Tree) -> float:
    """Reject features that the server part could not use: see `Split.check_features`.

    Raises:
        WireError: A tensor is missing, unknown, or of another dtype or shape; there are more examples than in a batch;
            a number is NaN or infinite.
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
    if model.example and shape[1:] != (expected := infer_feature_shape(model, cut, state.tree)):
        raise WireError(f"an example has features of shape {shape[1:]}, one of the server's {expected}", reason="shape")
    head = take_prefix(state.tree, HEAD)
    if head and math.prod(shape[1:]) != head["0.weight"].shape[1]:
        raise WireError(f"features of shape {shape[1:]}, the head takes {head['0.weight'].shape[1]}", reason="shape")
    infer_output_shape(model, cut, state.tree, shape)
    return norm


def serve(
    settings: SemisflSettings,
    model: Model,
    state: State,
    assignments: Mapping[str, Assignment],
    ups: Mapping[str, Tree],
) -> tuple[State, dict[str, Tree]]:
    """Server half of a step: see `Split.serve`.

    Devices with non-finite numbers are excluded, get an empty answer and do not move.
    """
    learner = Learner.from_tree(settings, model, state.tree, int(read_number(state.facts, FOLLOWED)))
    features = {device: (up["features"], up["teacher"]) for device, up in ups.items()}
    by_student = {device for device in ups if state.facts.get(LABELLER + device) == STUDENT}
    result = learner.session_pass(features, by_student)
    if not _is_finite_pass(result):
        features = {
            device: pair
            for device, pair in features.items()
            if _is_finite_pass(learner.session_pass({device: pair}, by_student))
        }
        if not features or not _is_finite_pass(result := learner.session_pass(features, by_student)):
            return state, {device: {} for device in ups}
    learner.take(result, assignments[next(iter(ups))].hyper)
    facts: dict[str, Scalar] = {
        **add_terms(state.facts, result.terms),
        UNLABELLED_LOSS: read_number(state.facts, UNLABELLED_LOSS) + result.loss,
        SESSION_STEPS: int(read_number(state.facts, SESSION_STEPS)) + 1,
    }
    answers = _sum_answers(state.tree, result) if settings.switch else {}
    return State({**learner.tree(), **answers}, facts), {
        device: {"gradient": result.down[device]} if device in result.down else {} for device in ups
    }


def _sum_answers(tree: Tree, result: SessionPass) -> Tree:
    sums = {name: leaf for name, leaf in tree.items() if name.startswith(ANSWERS)}
    for device, shares in result.answers.items():
        before = sums.get(ANSWERS + device)
        sums[ANSWERS + device] = shares.sum(0) if before is None else before + shares.sum(0)
    return sums


def decide_labellers(settings: SemisflSettings, tree: Tree) -> dict[str, Scalar]:
    """Return the labeller of each device in its next session, as facts, from the predictions of this session."""
    return {
        LABELLER + name.removeprefix(ANSWERS): "teacher" if use_teacher(leaf, settings.switch_divergence) else STUDENT
        for name, leaf in tree.items()
        if name.startswith(ANSWERS)
    }


def _is_finite_pass(result: SessionPass) -> bool:
    return math.isfinite(result.loss) and all(map(is_finite, (*result.down.values(), *result.gradients.values())))

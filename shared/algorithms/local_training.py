"""Local training in stretches: a device's batches epoch by epoch, and the mean loss over all of them.

Methods that rank neurons (Z. Niu, H. Dong, A. K. Qin, https://arxiv.org/abs/2403.11464) do so after one of them, and
FedSelect (https://arxiv.org/abs/2404.02478) trains two kinds of parameters in turn.

Early stopping by a device's own loss: one that gets worse from one participation to the next leaves for good.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464 (equation 5)

    L_t = lambda * L_train + (1 - lambda) * L_validation        stop if L_t > L_t-1

L_train is the mean loss while learning, L_validation that of the trained network in evaluation mode on examples that
are neither trained on nor tested with; t - 1 is the device's participation before this one, so that the first never
stops. A device without such examples goes by L_train alone. Whoever stops is still aggregated in this round.

A device's own full model: what it has kept of it, or what every device begins with.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

It never travels, nor does the first one, w^0: that follows from the model's builder, the run's seed and who draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Algorithm, Batch, Batches, Departure, Result
from shared.algorithms.fedavg import REMEDY, descend_batches
from shared.errors import Diverged, TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import TORCHS, initial
from shared.protocol.messages import Assignment, Hyper, Scalar
from shared.tensors.placement import to_device
from shared.tensors.tree import Mean, State, Tree, check_like

LEFT = "left/"
AT_ONCE = 512
STOPPING_OPTIONS = ("early_stopping", "share", "min_alive")
"""Of a task: what `[early_stopping]` of its plan became."""


def epochs(batches: Batches) -> Iterator[Iterator[Batch]]:
    """Yield the batches of one epoch after the other; each must be used up before the next is asked for."""
    flow = iter(batches)
    for first in flow:
        yield _epoch(first, flow, batches.num_examples)


def _epoch(first: Batch, flow: Iterator[Batch], count: int) -> Iterator[Batch]:
    seen = len(first[1])
    yield first
    while seen < count:
        try:
            batch = next(flow)
        except StopIteration:
            return
        seen += len(batch[1])
        yield batch


@dataclass
class Tally:
    """The mean loss of a training in stretches.

    Attributes:
        seen: Examples so far, as often as they were trained on.
        total: Sum of their losses.
    """

    seen: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """Loss of an example; None where there was none."""
        return self.total / self.seen if self.seen else None

    def train(
        self,
        network: Callable[[Tensor], Tensor],
        weights: Sequence[tuple[str, Tensor]],
        batches: Iterable[Batch],
        hyper: Hyper,
        correct: Callable[[], None] | None = None,
    ) -> None:
        """Do SGD for one stretch, with a momentum of its own; arguments as those of `descend_batches`.

        Args:
            network: Logits of shape (N, classes) of inputs.
            weights: Parameters by name, changed in place.
            batches: Inputs of shape (N, ...), labels of shape (N,).
            hyper: Learning rate, momentum, weight decay.
            correct: Changes gradients before each step.
        """
        before = self.seen
        loss = descend_batches(network, weights, self._counted(batches), hyper, correct)
        self.total += 0.0 if loss is None else loss * (self.seen - before)

    def _counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.seen += len(batch[1])
            yield batch


STOPPED, LOSS = "stopped", "stopping_loss"
"""What a device says it did, and what it remembers: the loss L of its last participation."""

MODEL_SEED, MODEL_DRAW = "model_seed", "model_draw"
"""Of the server's facts and of a task's values: how all models began. Without the second torch's generator drew them,
as in runs that are older than it."""


@dataclass(frozen=True)
class Stopping:
    """When a device stops.

    Attributes:
        is_on: Whether any ever does.
        share: Of the training loss in L; lambda.
        min_alive: The run ends when fewer have not stopped; FedSPU's authors take 10.
    """

    is_on: bool = False
    share: float = 0.7
    min_alive: int = 1

    def __post_init__(self) -> None:
        """Refuse a share that is none, and a run without devices.

        Raises:
            ValueError: The share is not in [0, 1], `min_alive` is below 1, or the switch is no boolean: "false" in
                quotes would be on.
        """
        if not isinstance(self.is_on, bool):
            raise ValueError(f"early_stopping must be true or false, not {self.is_on!r}")  # noqa: TRY004
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], not {self.share}")
        if self.min_alive < 1:
            raise ValueError(f"min_alive must be >= 1, not {self.min_alive}")

    def judge(
        self, facts: dict[str, Scalar], train_loss: float | None, layers: nn.Module, tree: Tree, validation: Batch
    ) -> tuple[dict[str, Scalar], dict[str, float]]:
        """Return what a device remembers from now on, and what it tells: whether it stops, and by which losses.

        Args:
            facts: What it remembers of its participation before.
            train_loss: Mean over this one's mini-batches; None where there were none, which says nothing.
            layers: The network, for `tree`; it is left in evaluation mode.
        """
        if not self.is_on or train_loss is None:
            return facts, {}
        loss, metrics = train_loss, {}
        if len(validation[1]):
            metrics["validation_loss"] = mean_loss(layers, tree, validation)
            loss = self.share * train_loss + (1 - self.share) * metrics["validation_loss"]
        before = facts.get(LOSS)
        stops = isinstance(before, float) and loss > before
        return facts | {LOSS: loss}, metrics | {LOSS: loss, STOPPED: float(stops)}


@torch.no_grad()
def mean_loss(layers: nn.Module, tree: Tree, batch: Batch) -> float:
    """Return the mean cross-entropy in evaluation mode; running statistics stay as they are.

    Args:
        tree: Its parameters and buffers.
        batch: Inputs of shape (B, ...), labels of shape (B,).
    """
    layers.eval()
    parts = zip(batch[0].split(AT_ONCE), batch[1].split(AT_ONCE), strict=True)
    losses = [
        functional.cross_entropy(functional_call(layers, tree, (inputs,)), labels, reduction="sum").item()
        for inputs, labels in parts
    ]
    return sum(losses) / len(batch[1])


def stops_early(builder: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Return a builder with the three options of early stopping in place of the `Stopping` that it takes.

    Args:
        builder: Takes `stopping`, and builds a device half that asks it (`Stopping.judge`).
    """

    @wraps(builder)
    def built(
        *own: object, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1, **options: object
    ) -> Algorithm:
        stopping = Stopping(early_stopping, share, min_alive)
        return with_departures(builder(*own, **options, stopping=stopping), stopping)

    shown, added = signature(builder), signature(built, follow_wrapped=False).parameters
    kept = [option for name, option in shown.parameters.items() if name != "stopping"]
    options = [*kept, *(added[name] for name in STOPPING_OPTIONS)]
    built.__signature__ = shown.replace(parameters=options)  # type: ignore[attr-defined]  # what `signature` reads
    return built


def can_stop_early(builder: Callable[..., object]) -> bool:
    """Tell whether a builder takes the options of early stopping."""
    return signature(builder).parameters.keys() >= set(STOPPING_OPTIONS)


def with_departures(algorithm: Algorithm, stopping: Stopping) -> Algorithm:
    """Return the algorithm, whose device half says in its metrics whether it stops, with a server that remembers it."""
    if not stopping.is_on:
        return algorithm

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        mean = algorithm.absorb(mean, device, assignment, result)
        gone = {f"{LEFT}{device}": True} if result.metrics.get(STOPPED) else {}
        return replace(mean, facts=mean.facts | gone)

    def aggregate(state: State, mean: Mean) -> State:
        after = algorithm.aggregate(state, mean)
        return State(after.tree, after.facts | {key: True for key in mean.facts if key.startswith(LEFT)})

    return replace(
        algorithm, absorb=absorb, aggregate=aggregate, departure=Departure(departed_devices, stopping.min_alive)
    )


def departed_devices(state: State) -> frozenset[str]:
    """Return who has stopped."""
    return frozenset(key.removeprefix(LEFT) for key in state.facts if key.startswith(LEFT))


def origin(model: Model, seed: int) -> dict[str, Scalar]:
    """Return the facts by which a device draws what `model` began with."""
    seeded: dict[str, Scalar] = {MODEL_SEED: seed}
    return seeded if model.draw == TORCHS else {**seeded, MODEL_DRAW: model.draw}


def origin_in(facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return what `origin` gave the server's facts."""
    return {key: facts[key] for key in (MODEL_SEED, MODEL_DRAW) if key in facts}


def personal_model(model: Model, state: State, _came: Tree, assignment: Assignment) -> Tree:
    """Return the parameters that a device has kept, those of the run's beginning where it has none yet.

    Args:
        state: What the device kept.
        assignment: Its task; says from what model and seed first weights follow.

    Raises:
        TaskFailed: What it kept is of another model, or nobody knows how this model began.
    """
    own = state.tree or first(model, assignment)
    if {key: leaf.shape for key, leaf in own.items()} != {key: leaf.shape for key, leaf in model.tree().items()}:
        raise TaskFailed("the personal model that this device has kept is another one; remove its state")
    return own


def require_finite(own: Tree) -> None:
    """Refuse to keep what has diverged: nothing that comes later would take the place of all of it.

    Raises:
        Diverged: A number is NaN or infinite; what the device had kept before stays.
    """
    try:
        check_like(own, own)
    except WireError as error:
        raise Diverged(
            f"training has diverged, {error} after the last step, nothing of it is kept: {REMEDY}"
        ) from error


def first(model: Model, assignment: Assignment) -> Tree:
    """Return the parameters that every device began with, where the model is.

    Raises:
        ConfigError: They are drawn in a way that is not known here.
        TaskFailed: The task does not say how the model began, or the model not what it was built from.
    """
    seed, draw = assignment.values.get(MODEL_SEED), assignment.values.get(MODEL_DRAW, TORCHS)
    if model.spec is None or not isinstance(seed, int) or not isinstance(draw, str):
        raise TaskFailed("the task does not say from what model and seed personal models begin")
    return to_device(initial(model.spec, seed, draw).tree(), model.device)

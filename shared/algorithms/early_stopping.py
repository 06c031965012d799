"""Early stopping: devices leave a run for good when their loss rises.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464 (equation 5)

    L_t = lambda * L_train + (1 - lambda) * L_validation        stop if L_t > L_t-1

L_train is the mean loss during training, L_validation that of the trained network in evaluation mode on examples that
are used neither for training nor for testing. t - 1 is the device's previous participation, so the first one never
stops. A device without validation examples uses L_train alone. The update of the stopping round is still aggregated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature

import torch

from shared.algorithms.base import Algorithm, Batch, Departure, Result
from shared.models.base import Model
from shared.models.leaves import call_with
from shared.protocol.messages import Assignment, Scalar
from shared.tensors.tree import Mean, State, Tree

LEFT = "left/"
AT_ONCE = 512
STOPPING_OPTIONS = ("early_stopping", "share", "min_alive")
"""Options of a task, from `[early_stopping]` of its plan."""
STOPPED, LOSS = "stopped", "stopping_loss"
"""Metrics of an update: whether the device stops, and the loss L; the device's state stores L under the same name."""


@dataclass(frozen=True)
class Stopping:
    """Condition under which a device stops.

    Attributes:
        is_on: Whether devices stop at all.
        share: lambda, the weight of the training loss in L.
        min_alive: The run ends when fewer devices have not stopped; FedSPU's authors take 10.
    """

    is_on: bool = False
    share: float = 0.7
    min_alive: int = 1

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: The share is not in [0, 1], `min_alive` is below 1, or the switch is not a boolean: "false" in
                quotes would count as true.
        """
        if not isinstance(self.is_on, bool):
            raise ValueError(f"early_stopping must be true or false, not {self.is_on!r}")  # noqa: TRY004
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], not {self.share}")
        if self.min_alive < 1:
            raise ValueError(f"min_alive must be >= 1, not {self.min_alive}")

    def judge(
        self, facts: dict[str, Scalar], train_loss: float | None, model: Model, tree: Tree, validation: Batch
    ) -> tuple[dict[str, Scalar], dict[str, float]]:
        """Return a device's new facts, and its metrics: whether it stops, and the losses that decide it.

        Args:
            facts: The device's facts after its previous participation.
            train_loss: Mean over the mini-batches; None without any, which decides nothing.
            model: The network, for `tree`; left in evaluation mode.
        """
        if not self.is_on or train_loss is None:
            return facts, {}
        loss, metrics = train_loss, {}
        if len(validation[1]):
            metrics["validation_loss"] = mean_loss(model, tree, validation)
            loss = self.share * train_loss + (1 - self.share) * metrics["validation_loss"]
        before = facts.get(LOSS)
        stops = isinstance(before, float) and loss > before
        return facts | {LOSS: loss}, metrics | {LOSS: loss, STOPPED: float(stops)}


@torch.no_grad()
def mean_loss(model: Model, tree: Tree, batch: Batch) -> float:
    """Return the mean loss in evaluation mode; running statistics stay unchanged.

    Args:
        batch: Inputs of shape (B, ...), labels of shape (B,).
    """
    model.layers.eval()
    parts = zip(batch[0].split(AT_ONCE), batch[1].split(AT_ONCE), strict=True)
    losses = [
        model.objective.loss_sum(call_with(model.layers, tree, inputs), labels).item() for inputs, labels in parts
    ]
    return sum(losses) / len(batch[1])


def stops_early(builder: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Replace a builder's parameter `stopping` by the three options of early stopping.

    Args:
        builder: Takes `stopping`, and builds a device half that calls `Stopping.judge`.
    """

    @wraps(builder)
    def build(
        *args: object, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1, **options: object
    ) -> Algorithm:
        stopping = Stopping(early_stopping, share, min_alive)
        return with_departures(builder(*args, **options, stopping=stopping), stopping)

    builder_signature, added = signature(builder), signature(build, follow_wrapped=False).parameters
    retained = [option for name, option in builder_signature.parameters.items() if name != "stopping"]
    options = [*retained, *(added[name] for name in STOPPING_OPTIONS)]
    build.__signature__ = builder_signature.replace(parameters=options)  # type: ignore[attr-defined]
    return build


def can_stop_early(builder: Callable[..., object]) -> bool:
    """Return True if a builder takes the options of early stopping."""
    return signature(builder).parameters.keys() >= set(STOPPING_OPTIONS)


def with_departures(algorithm: Algorithm, stopping: Stopping) -> Algorithm:
    """Return the algorithm with a server that records the devices that stop, as their metrics say."""
    if not stopping.is_on:
        return algorithm

    def absorb(mean: Mean, device: str, assignment: Assignment, result: Result) -> Mean:
        mean = algorithm.absorb(mean, device, assignment, result)
        departures = {f"{LEFT}{device}": True} if result.metrics.get(STOPPED) else {}
        return replace(mean, facts=mean.facts | departures)

    def aggregate(state: State, mean: Mean) -> State:
        after = algorithm.aggregate(state, mean)
        return State(after.tree, after.facts | {key: True for key in mean.facts if key.startswith(LEFT)})

    return replace(
        algorithm, absorb=absorb, aggregate=aggregate, departure=Departure(departed_devices, stopping.min_alive)
    )


def departed_devices(state: State) -> frozenset[str]:
    """Return the devices that have stopped."""
    return frozenset(key.removeprefix(LEFT) for key in state.facts if key.startswith(LEFT))

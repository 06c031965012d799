"""The algorithm seam: one frozen record of functions, a device half and a server half.

Neither half sees a topic, a socket, a file or a clock. A federated device half is a function; a split device half is a
generator that yields what goes up and is sent what comes down, so that whoever drives it owns the network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Missed, Value, mix
from shared.tensors.tree import Mean, State, Tree

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs of shape (B, ...) and integer labels of shape (B,)."""


class Batches(Protocol):
    """A device's examples for one task, in the order that the task's seed gives."""

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        ...

    @property
    def validation(self) -> Batch:
        """Examples that are neither trained on nor held out for evaluation; perhaps none."""
        ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Result:
    """What a device half proposes.

    Attributes:
        tree: A change or values, for the leaves this device holds.
        weight: Its weight in the mean, above zero.
        num_examples: Examples it trained on.
        loss: Mean training loss, None where nothing was trained.
        coverage: Boolean masks for leaves of which only some coordinates count.
        metrics: Other figures, by name.
    """

    tree: Tree
    weight: float
    num_examples: int
    loss: float | None = None
    coverage: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """The devices of one round, with what the plan says of all of them.

    Attributes:
        devices: By name.
        hyper: The plan's hyperparameters.
        seed: The plan's seed.
        rounds: Of the whole run, for schedules.
    """

    devices: tuple[str, ...]
    hyper: Hyper
    seed: int
    rounds: int = 0


Allocation: TypeAlias = Mapping[str, Mapping[str, Value]]
"""What the resource optimizer gives each device; a device without an entry gets the plan's defaults."""

Outcome: TypeAlias = tuple[State, Result]


Session: TypeAlias = Generator[Tree, Tree | Missed, Outcome]
"""A split device half: yields what goes up at a step, is sent what comes down. Sessions of several devices may take
turns in one process, so it keeps its parameters to itself and draws from generators of its own."""


@dataclass(frozen=True)
class Algorithm:
    """One method: what every round does, on the server and on a device.

    Attributes:
        init: (model, seed) -> server state.
        assign: (state, cohort, allocation, round) -> what each device is told. Pure and seeded.
        broadcast: (state, assignment) -> the tree that goes down. Devices given the same leaves share one transmission.
        local: (model, device state, tree, batches, assignment) -> (device state, result); or a generator, if split:
            its model is a skeleton without storage then, and `tree` has the leaves below the cut alone.
        absorb: (mean, assignment, result) -> mean. Called once an update, in device order.
        aggregate: (state, mean) -> state.
        between: state -> state, after every aggregation: the server's own training.
        serve: Split methods only: (model, state, assignments, {device: up}) -> (state, {device: down}), one step after
            the barrier. The model is a skeleton without storage; the given state's tensors may be used up. Assignments
            are at least those of the devices that sent; keys are in order; torch's global generator was seeded.
        admit: Split methods only: (model, state, assignment, up) raises WireError where `serve` could not take it.
        measure: Optional: (model, tree, batches) -> figures that a resource optimizer asks for.
        timed: Optional: as `local`, a plain step on every batch: what `[measure]` times where `local` takes a number of
            steps of its own.
        work: Optional: (model, assignment) -> the share of a whole network's training step, in operations, that a step
            of `local` is; for a replay. The model is a skeleton without storage. In its place: all of it.
        serves: Optional: (model, device state, what came, assignment) -> the parameters that the device itself uses,
            where these are not those that came: its personal model. Evaluated on the device after training.
        shows: Optional: (state, assignment) -> what goes down in place of `broadcast` where a device only evaluates.
        accepts: Optional: (assignment, what went down, what came up) raises WireError where `absorb` could not take it;
            leaves may have no storage. In place of the rule that goes without it: leaves that went down, of the same
            shape. Where it is given, the device half checks what came down itself: any leaves may.
        empty: state -> the mean that `absorb` adds a round's first update to; what absorbing must know of the state can
            lie in its facts.
        left: state -> devices that take no further part.
        min_alive: The run ends when fewer devices than that have not left.
        heeds: Names of those values of an allocation that change what a device trains, such as `keep`. Others it is
            told as well: to a share of the uplink a device keeps whatever it trains.
    """

    init: Callable[[Model, int], State]
    assign: Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]
    broadcast: Callable[[State, Assignment], Tree]
    local: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session]
    absorb: Callable[[Mean, Assignment, Result], Mean]
    aggregate: Callable[[State, Mean], State]
    between: Callable[[State], State] = lambda state: state
    serve: (
        Callable[[Model, State, Mapping[str, Assignment], Mapping[str, Tree]], tuple[State, dict[str, Tree]]] | None
    ) = None
    admit: Callable[[Model, State, Assignment, Tree], None] | None = None
    measure: Callable[[Model, Tree, Batches], dict[str, float]] | None = None
    timed: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session] | None = None
    work: Callable[[Model, Assignment], float] | None = None
    serves: Callable[[Model, State, Tree, Assignment], Tree] | None = None
    shows: Callable[[State, Assignment], Tree] | None = None
    accepts: Callable[[Assignment, Tree, Tree], None] | None = None
    empty: Callable[[State], Mean] = lambda _state: Mean()
    left: Callable[[State], frozenset[str]] = lambda _state: frozenset()
    min_alive: int = 1
    heeds: frozenset[str] = frozenset()


def assign_alike(_state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
    """Tell every device the plan's hyperparameters, its own seed and its own allocation."""
    return {
        device: Assignment(
            seed=mix(cohort.seed, number, device), hyper=cohort.hyper, values=dict(allocation.get(device, {}))
        )
        for device in cohort.devices
    }

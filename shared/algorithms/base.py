"""The algorithm seam: one frozen record of functions, a device half and a server half.

Neither half sees a topic, a socket, a file or a clock. A federated device half is a function; a split device half is a
generator that yields what goes up and is sent what comes down, so that whoever drives it owns the network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Missed, Scalar, Value, mix
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

    def inputs_at(self, places: Tensor) -> Tensor:
        """Return a copy of some examples' inputs, as they are before any augmentation.

        Args:
            places: From 0 to `num_examples` - 1, int64 of shape (B,).
        """
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


ServeStep: TypeAlias = Callable[
    [Model, State, Mapping[str, Assignment], Mapping[str, Tree]], tuple[State, dict[str, Tree]]
]
"""(model, state, assignments, {device: up}) -> (state, {device: down})."""


@dataclass(frozen=True)
class Split:
    """A split method's server half, asked at every step of a session.

    Attributes:
        serve: (model, state, assignments, {device: up}) -> (state, {device: down}), one step after the barrier. The
            model is a skeleton without storage; the given state's tensors may be used up. Assignments are at least
            those of the devices that sent; keys are in order; torch's global generator was seeded.
        check_features: (model, state, assignment, up) raises WireError where `serve` could not take it; returns the
            Euclidean norm of its floating-point values, which whoever looks at each of them for NaN has anyway.
        measure: As `serve`, in a session that trains nothing (`Assignment.measures_statistics`): the state's running
            statistics become the mean over what was sent so far. None: the method has no such session.
        undropped: Options of the method in such a session, in place of the plan's, so that devices send all features.
        passes: How often a device passes a batch through layers below the cut in a step, of which it trains by one.
        cut_of: (model) -> the cut. None: where it is cut is the method's own affair.
    """

    serve: ServeStep
    check_features: Callable[[Model, State, Assignment, Tree], float]
    measure: ServeStep | None = None
    undropped: Mapping[str, Scalar] = field(default_factory=dict)
    passes: int = 1
    cut_of: Callable[[Model], int] | None = None


@dataclass(frozen=True)
class Personal:
    """Devices that use parameters other than those that came: a model of their own.

    Attributes:
        parameters: (model, device state, what came, assignment) -> what the device uses, evaluated after training.
        sent_for_evaluation: (state, device, assignment) -> what goes down in place of `broadcast` where a device only
            evaluates.
        own_statistics: Whether running statistics of a device's own examples are those of its model; not where that is
            everybody's average.
    """

    parameters: Callable[[Model, State, Tree, Assignment], Tree]
    sent_for_evaluation: Callable[[State, str, Assignment], Tree] | None = None
    own_statistics: bool = True


@dataclass(frozen=True)
class ServerTraining:
    """A server that trains on labelled examples of its own before every broadcast.

    Attributes:
        train: (model, state, labelled examples, cohort, round) -> the state that the round begins with. The model is a
            skeleton without storage; torch's global generator was seeded, by the run's seed and the round, so that a
            round gone on with after a restart begins with the same. A round that is missed leaves nothing of it.
        evaluated: State -> parameters that are evaluated in place of the state's own, such as a teacher's.
        check: (model, labelled examples, the plan's hyperparameters) raises ConfigError where it could not train on
            these. Asked once, before any device is given a task.
        terms: State at the end of a round, aggregated unless it was missed -> figures of its training to be recorded,
            by name: loss terms, and how many steps the server took.
    """

    train: Callable[[Model, State, Batch, Cohort, int], State]
    evaluated: Callable[[State], Tree] | None = None
    check: Callable[[Model, Batch, Hyper], None] | None = None
    terms: Callable[[State], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Resources:
    """What a resource optimizer and a replay have to be told of a method's training.

    Attributes:
        uses: Names of those values of an allocation that change what a device trains, such as `keep`. Others it is
            told as well: to a share of the uplink a device keeps whatever it trains.
        step_share: (model, assignment) -> the share of a whole network's training step, in operations, that a step of
            `local` is. The model is a skeleton without storage. None: all of it.
        timed_step: As `local`, a plain step on every batch: what `[measure]` times where `local` takes a number of
            steps of its own.
        frees_memory: Whether it frees memory while it trains, at the price of time, for its process to give back.
        settled: (server state, device) -> the values that this device was given once and for all, such as its `keep`,
            whatever is decided later; none for a device that has not begun. None: each round decides anew.
    """

    uses: frozenset[str] = frozenset()
    step_share: Callable[[Model, Assignment], float] | None = None
    timed_step: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session] | None = None
    frees_memory: bool = False
    settled: Callable[[State, str], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Mixing:
    """What servers of several sites mix of their states, so that together they train one model.

    Attributes:
        mixed: State -> the tree of which a site takes a weighted mean over itself and its neighbours. Of every site it
            has the same leaves.
        with_mixed: (state, that mean) -> the state that the site goes on with.
    """

    mixed: Callable[[State], Tree]
    with_mixed: Callable[[State, Tree], State]


@dataclass(frozen=True)
class Departure:
    """Devices that leave a run for good before it ends.

    Attributes:
        left: State -> devices that take no further part.
        min_alive: The run ends when fewer devices than that have not left.
    """

    left: Callable[[State], frozenset[str]]
    min_alive: int = 1


@dataclass(frozen=True)
class Algorithm:
    """One method: what every round does, on the server and on a device; and, by name, what only some methods have.

    Attributes:
        init: (model, seed) -> server state.
        assign: (state, cohort, allocation, round) -> what each device is told. Pure and seeded.
        broadcast: (state, device, assignment) -> the tree that goes down. Devices given the same leaves share one
            transmission.
        local: (model, device state, tree, batches, assignment) -> (device state, result); or a generator, if split:
            its model is a skeleton without storage then, and `tree` has the leaves below the cut alone.
        absorb: (mean, device, assignment, result) -> mean. Called once an update, in device order.
        aggregate: (state, mean) -> state.
        empty: State -> the accumulator that `absorb` adds a round's first update to; what absorbing must know of the
            state can lie in its facts.
        check_update: (assignment, what went down, what came up) raises WireError where `absorb` could not take it;
            leaves may have no storage. None: leaves that went down, of the same shape. Where it is given, the device
            half checks what came down itself: any leaves may.
        split: Every training step goes through the server.
        personal: Devices use models of their own.
        server: The server trains as well.
        resources: What its training costs, and which decisions it trains by.
        departure: Devices may leave for good.
        mixing: Several servers can train together.
        reads_labels: Whether devices train on labels; where not, none of theirs is read.
        sends_changes: Whether an update is a change, so that what does not come of it does not move: codec `topk`.
    """

    init: Callable[[Model, int], State]
    assign: Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]
    broadcast: Callable[[State, str, Assignment], Tree]
    local: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session]
    absorb: Callable[[Mean, str, Assignment, Result], Mean]
    aggregate: Callable[[State, Mean], State]
    empty: Callable[[State], Mean] = lambda _state: Mean()
    check_update: Callable[[Assignment, Tree, Tree], None] | None = None
    split: Split | None = None
    personal: Personal | None = None
    server: ServerTraining | None = None
    resources: Resources = Resources()
    departure: Departure | None = None
    mixing: Mixing | None = None
    reads_labels: bool = True
    sends_changes: bool = False


def evaluated(algorithm: Algorithm, state: State) -> Tree:
    """Return the parameters of a server state by which a method is judged."""
    own = algorithm.server and algorithm.server.evaluated
    return own(state) if own else state.tree


def join_network(algorithm: Algorithm, model: Model, state: State) -> Tree:
    """Return the one network that is tested, exported and served: of a split method bottom and top, SemiSFL's teacher.

    Args:
        model: The network, of any storage or none.
        state: The server's, as a checkpoint has it.

    Raises:
        ConfigError: A part of it is on the devices.
    """
    judged, names = evaluated(algorithm, state), model.layers.state_dict().keys()
    if missing := sorted(names - judged.keys()):
        raise ConfigError(f"{missing[0]} and {len(missing) - 1} more parameters are on the devices: no whole network")
    return {name: judged[name] for name in names}


def assign_alike(_state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
    """Tell every device the plan's hyperparameters, its own seed and its own allocation.

    Args:
        cohort: Devices of the round, their hyperparameters and the seed.
        allocation: What was decided for each device.
    """
    return {
        device: Assignment(
            seed=mix(cohort.seed, number, device), hyper=cohort.hyper, values=dict(allocation.get(device, {}))
        )
        for device in cohort.devices
    }

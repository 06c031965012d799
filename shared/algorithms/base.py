"""Algorithm interface: a frozen record of functions for server and device.

Neither half sees a topic, a socket, a file or a clock. A federated device half is a function. A split device half is a
generator that yields uploads and receives downloads, so that its driver owns the network.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Missed, Scalar, Value, derive_seed
from shared.protocol.objective import Kind
from shared.tensors.tree import Mean, State, Tree

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs of shape (B, ...) and integer labels of shape (B,)."""

BESIDE = "/"
"""Part of the name of every leaf that a method keeps beside the network, such as `momentum/0.weight`."""


class Batches(Protocol):
    """A device's examples for one task, in the order that the task's seed determines."""

    @property
    def num_examples(self) -> int:
        """Examples per epoch."""
        ...

    @property
    def validation(self) -> Batch:
        """Examples used neither for training nor for testing; may be empty."""
        ...

    def inputs_at(self, places: Tensor) -> Tensor:
        """Return a copy of the inputs of some examples, without augmentation.

        Args:
            places: From 0 to `num_examples` - 1, int64 of shape (B,).
        """
        ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Result:
    """Update that a device half proposes.

    Attributes:
        tree: A change or values, for the leaves that this device has.
        weight: Weight in the mean, above zero.
        num_examples: Number of examples in the training.
        loss: Mean training loss, None where nothing was trained.
        coverage: Boolean masks for leaves of which only some coordinates count.
    """

    tree: Tree
    weight: float
    num_examples: int
    loss: float | None = None
    coverage: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """Devices of one round, and the plan's settings for all of them.

    Attributes:
        rounds: Number of rounds of the whole run, for schedules.
    """

    devices: tuple[str, ...]
    hyper: Hyper
    seed: int
    rounds: int = 0


Allocation: TypeAlias = Mapping[str, Mapping[str, Value]]
"""Values from the resource optimizer, by device; a device without an entry uses the plan's defaults."""

Outcome: TypeAlias = tuple[State, Result]


Session: TypeAlias = Generator[Tree, Tree | Missed, Outcome]
"""A split device half: yields the upload of a step and receives the download. Sessions of several devices may take
turns in one process, so each has private parameters and private random generators."""


ServeStep: TypeAlias = Callable[
    [Model, State, Mapping[str, Assignment], Mapping[str, Tree]], tuple[State, dict[str, Tree]]
]
"""(model, state, assignments, {device: up}) -> (state, {device: down})."""


@dataclass(frozen=True)
class Split:
    """Server half of a split method, called at every step of a session.

    Attributes:
        serve: (model, state, assignments, {device: up}) -> (state, {device: down}), one step after the barrier. The
            model is a skeleton without storage; `serve` may modify the state's tensors. The assignments include at
            least those of the devices that sent; keys are in order; torch's global generator is seeded before the call.
        check_features: (model, state, assignment, up) raises WireError where `serve` could not use the upload; returns
            the Euclidean norm of its floating-point values, a by-product of the check for NaN.
        measure: Like `serve`, in a session that trains nothing (`Assignment.measures_statistics`): the state's running
            statistics become the mean over all batches so far. None: the method has no such session.
        statistics_options: The method's options in such a session, in place of the plan's, so that devices send all
            features.
        passes: Passes of a batch through the layers below the cut per step; a device trains by one of them.
        cut_of: (model) -> the cut. None: the method alone decides where the network is cut.
    """

    serve: ServeStep
    check_features: Callable[[Model, State, Assignment, Tree], float]
    measure: ServeStep | None = None
    statistics_options: Mapping[str, Scalar] = field(default_factory=dict)
    passes: int = 1
    cut_of: Callable[[Model], int] | None = None


@dataclass(frozen=True)
class Personal:
    """Personal models: devices use parameters other than those received.

    Attributes:
        parameters: (model, device state, received tree, assignment) -> the tree that the device uses, evaluated after
            training.
        sent_for_evaluation: (state, device, assignment) -> the tree that is sent instead of `broadcast` to a device
            that only evaluates.
        own_statistics: Whether the model uses running statistics of the device's own examples; False where they are an
            average over all devices.
    """

    parameters: Callable[[Model, State, Tree, Assignment], Tree]
    sent_for_evaluation: Callable[[State, str, Assignment], Tree] | None = None
    own_statistics: bool = True


@dataclass(frozen=True)
class Program:
    """User's program on a device that reads examples of its own; `[data]` of the device may be `none`.

    Attributes:
        evaluate: (model, device state, parameters, assignment) -> figures of its evaluation: `eval_accuracy`,
            `eval_loss` and `eval_examples` if known, and others by name. The model is a skeleton without storage.
    """

    evaluate: Callable[[Model, State, Tree, Assignment], dict[str, float]]


@dataclass(frozen=True)
class ServerTraining:
    """Server-side training on labelled examples before every broadcast.

    Attributes:
        train: (model, state, labelled examples, cohort, round) -> the state at the start of the round. The model is a
            skeleton without storage. torch's global generator is seeded by the run's seed and the round, so that a
            round resumed after a restart starts with the same state. A missed round discards it.
        check: (model, labelled examples, the plan's hyperparameters) raises ConfigError where training on these is
            impossible. Called once, before any device gets a task.
        terms: State at the end of a round, aggregated unless the round was missed -> figures of the training for the
            journal, by name: loss terms, and the number of server steps.
    """

    train: Callable[[Model, State, Batch, Cohort, int], State]
    check: Callable[[Model, Batch, Hyper], None] | None = None
    terms: Callable[[State], Mapping[str, float]] | None = None


@dataclass(frozen=True)
class Resources:
    """Cost of a method's training, for resource optimizers and replays.

    Attributes:
        uses: Names of the allocated values that change the training of a device, such as `keep`. Other values are sent
            as well: a device observes its share of the uplink whatever it trains.
        step_share: (model, assignment) -> operations of a step of `local`, as a share of a training step of the whole
            network. The model is a skeleton without storage. None: 1.
        timed_step: Like `local`, but one plain step per batch: `[measure]` times it where `local` chooses its number of
            steps itself.
        frees_memory: Whether training frees memory at the price of time, for the process to return to the system.
        fixed_values: (server state, device) -> values that this device got at its first participation, such as `keep`,
            and retains whatever is decided later; empty for a device that has not begun. None: decided in each round.
        uploaded: Download -> leaves as large as those of an update that leaves nothing out. None: all of the download.
    """

    uses: frozenset[str] = frozenset()
    step_share: Callable[[Model, Assignment], float] | None = None
    timed_step: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session] | None = None
    frees_memory: bool = False
    fixed_values: Callable[[State, str], Mapping[str, float]] | None = None
    uploaded: Callable[[Tree], Tree] | None = None


@dataclass(frozen=True)
class Mixing:
    """Mixing of models between the servers of several sites, which together train one model.

    Attributes:
        shared_tree: State -> the tree that a site averages, with weights, over itself and its neighbours. It has the
            same leaves on every site.
        with_mean: (state, that mean) -> the state with which the site continues.
    """

    shared_tree: Callable[[State], Tree]
    with_mean: Callable[[State, Tree], State]


@dataclass(frozen=True)
class Departure:
    """Devices that leave a run for good before it ends.

    Attributes:
        departed: State -> devices that take no further part.
        min_alive: The run ends when fewer devices remain.
    """

    departed: Callable[[State], frozenset[str]]
    min_alive: int = 1


@dataclass(frozen=True)
class Algorithm:
    """A learning method: the functions of every round on server and device, and named optional capabilities.

    Attributes:
        init: (model, seed) -> server state.
        assign: (state, cohort, allocation, round) -> task of each device. Pure and seeded.
        broadcast: (state, device, assignment) -> the tree that the server sends. Devices with the same leaves share one
            transmission.
        local: (model, device state, tree, batches, assignment) -> (device state, result); or a generator, if split:
            then the model is a skeleton without storage, and `tree` has only the leaves below the cut.
        absorb: (mean, device, assignment, result) -> mean. Called once per update, in device order.
        aggregate: (state, mean) -> state.
        evaluated: State -> the parameters that are evaluated, exported and served, such as a teacher's; leaves that the
            network lacks are ignored. None: the network's leaves of the state.
        empty: State -> the accumulator to which `absorb` adds a round's first update; its facts can carry parts of the
            state that `absorb` needs.
        check_update: (assignment, download, upload) raises WireError where `absorb` could not use the upload; leaves
            may have no storage. None: the leaves of the download, with the same shapes. If set, the device half checks
            the download itself, which may have any leaves.
        split: Every training step goes through the server.
        personal: Devices have personal models.
        program: A user's program trains, on examples that it reads itself: `local` gets no batches, and a model without
            storage.
        server: The server trains as well.
        resources: Cost of the training, and the allocated values that it uses.
        departure: Devices may leave for good.
        mixing: Several servers can train together.
        step_options: Names in `STEP_FEATURES` of what its training steps support beyond plain SGD; plans with others
            are refused.
        check_hyper: (the plan's hyperparameters) raises ConfigError where the method cannot train with them. None: it
            trains with any.
        reads_labels: Whether devices train on labels; if not, none of theirs is read.
        kinds: Kinds of task that it can train; empty for all.
        trains_parts: Whether it can leave parameters frozen, which devices then do not send, or train adapters.
        sends_changes: Whether an update is a change, so that a missing coordinate means no change: codec `topk`.
    """

    init: Callable[[Model, int], State]
    assign: Callable[[State, Cohort, Allocation, int], dict[str, Assignment]]
    broadcast: Callable[[State, str, Assignment], Tree]
    local: Callable[[Model, State, Tree, Batches, Assignment], Outcome | Session]
    absorb: Callable[[Mean, str, Assignment, Result], Mean]
    aggregate: Callable[[State, Mean], State]
    evaluated: Callable[[State], Tree] | None = None
    empty: Callable[[State], Mean] = lambda _state: Mean()
    check_update: Callable[[Assignment, Tree, Tree], None] | None = None
    split: Split | None = None
    personal: Personal | None = None
    program: Program | None = None
    server: ServerTraining | None = None
    resources: Resources = Resources()
    departure: Departure | None = None
    mixing: Mixing | None = None
    step_options: frozenset[str] = frozenset()
    check_hyper: Callable[[Hyper], None] | None = None
    reads_labels: bool = True
    sends_changes: bool = False
    trains_parts: bool = False
    kinds: frozenset[Kind] = frozenset()


def evaluated_parameters(algorithm: Algorithm, model: Model, state: State) -> Tree:
    """Return the network's parameters and buffers of a server state that are evaluated, in the network's order.

    Parameters that exist only on the devices are absent; `join_network` refuses them.

    Args:
        model: The network, with or without storage.
    """
    parameters = algorithm.evaluated(state) if algorithm.evaluated else state.tree
    return {name: parameters[name] for name in model.tree() if name in parameters}


def network_leaves(tree: Tree) -> Tree:
    """Return the leaves of a server state without those beside the network, whose names contain a slash."""
    return {name: leaf for name, leaf in tree.items() if BESIDE not in name}


def join_network(algorithm: Algorithm, model: Model, state: State) -> Tree:
    """Return the complete network that is tested, exported and served: bottom and top if split, SemiSFL's teacher.

    Args:
        model: The network, with or without storage.
        state: Server state, as in a checkpoint.

    Raises:
        ConfigError: A part of it exists only on the devices.
    """
    parameters = evaluated_parameters(algorithm, model, state)
    if missing := sorted(model.tree().keys() - parameters.keys()):
        raise ConfigError(
            f"{missing[0]} and {len(missing) - 1} more parameters exist only on the devices: no complete network"
        )
    return parameters


def assign_alike(_state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
    """Assign every device the plan's hyperparameters, a seed and its allocation."""
    return {
        device: Assignment(
            seed=derive_seed(cohort.seed, number, device), hyper=cohort.hyper, values=dict(allocation.get(device, {}))
        )
        for device in cohort.devices
    }

"""What every section of a plan is, and every choice in one.

The table `[budget]` of a plan: what a whole run may take.

What a run looks at beside its training.

The table `[replay]` of a plan: what a replay may do that devices cannot.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from shared.protocol.messages import Hyper, Scalar, Spec

MAX_MEASURE_S = 600.0


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan's sections."""


class Chosen(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice by name.

    Attributes:
        name: One of the names that have a section of options below.
        options: Options of that choice.
    """


class HyperPlan(Hyper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local training on a device.

    Attributes:
        local_epochs: Passes over a device's examples in a round; 0 trains nothing.
        batch_size: Examples of a training step.
        learning_rate: Step size of SGD.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: Share of each weight that is added to its gradient.
    """


class EarlyStoppingPlan(Section, frozen=True, kw_only=True):
    """Early stopping: a device whose own loss L gets worse leaves for good; absent: none does.

    Attributes:
        share: Lambda, share of the mean training loss in L, 0 to 1; the rest is the loss on `[data] validation`. A
            device without validation examples goes by its training loss alone.
        min_alive: The run ends when fewer devices than that have not left; FedSPU's authors take 10.
    """

    share: float = 0.7
    min_alive: int = 1

    def __post_init__(self) -> None:
        """Refuse a share that is none, and a run without devices."""
        if not 0 <= self.share <= 1 or self.min_alive < 1:
            raise ValueError("share must be 0 to 1, min_alive >= 1")

    def added_to(self, algorithm: Chosen) -> Chosen:
        """Return a method with this among its options, where tasks, records and plans of before have it.

        Raises:
            ValueError: The method has such options of its own.
        """
        if twice := algorithm.options.keys() & {"early_stopping", *self.__struct_fields__}:
            raise ValueError(f"[early_stopping] stands beside the algorithm's option {min(twice)}: take out the option")
        fields = {field.name: field.default for field in msgspec.structs.fields(self)}
        own = {name: getattr(self, name) for name, usual in fields.items() if getattr(self, name) != usual}
        return msgspec.structs.replace(algorithm, options={**algorithm.options, "early_stopping": True, **own})


class BudgetPlan(Section, frozen=True, kw_only=True):
    """What the whole run may take; absent for no limit.

    A run, live or replayed, ends after the round that reaches a budget (`journal.budget` says what is counted). A round
    whose tasks would take more joules than are left is begun with fewer devices, the cheapest, or not at all; what
    a device's task takes is told by its earlier ones, so that a first round is begun whole. What devices evaluate is
    charged as well, and left out where less is left than the last evaluation took. A replay whose devices cannot keep
    to a budget at all says so before it begins.

    Attributes:
        time_s: Time of all rounds together, with waiting for devices.
        joules: Energy of all devices together, idle power included, while they download, compute, exchange features and
            gradients, and upload. A device that reports none takes no part after its first task.
    """

    time_s: float | None = None
    joules: float | None = None

    def __post_init__(self) -> None:
        """Refuse what nobody could keep to."""
        if not all(limit is None or 0 < limit < math.inf for limit in (self.time_s, self.joules)):
            raise ValueError("time_s and joules must be > 0 and finite; leave them out for no limit")


class EvaluationPlan(Section, frozen=True, kw_only=True):
    """When models are evaluated.

    Attributes:
        every: The server evaluates on its test data after every n-th round and the last; 0: never.
        on_device: Whether devices evaluate on their held-out examples: those of each round, and after the last round.
        devices_every: All connected devices evaluate after every n-th round and the last; 0: never. With a method that
            gives devices models of their own, each evaluates its own. A split network goes down whole for it, its top
            too. With a method that trains without labels this alone has devices that have some read them, of what they
            hold back, and only accuracy, loss and count go up.
        runtime: What devices compute it with where a task of theirs is to evaluate alone: `torch`, in the trainer; or
            `onnx`, ONNX Runtime, without torch: of a small network in a quarter of the memory. The graph goes to each
            device once; the accuracy is the same within an example. Not for methods that give devices models of their
            own. Absent: `torch`.
        statistics_batches: Of a network with BatchNorm: batches over which running statistics are measured anew,
            without training, before it is evaluated and after the last round; of all devices of the round together
            where the server evaluates, of each device where it evaluates a model of its own. 0: those that training
            left are used; absent: 16.
        keep: Which model stays on disk beside the last ones: `best`, the most accurate on the server's test data; or
            `last`, no other.
    """

    every: int = 1
    on_device: bool = False
    devices_every: int = 0
    runtime: Literal["torch", "onnx"] | msgspec.UnsetType = msgspec.UNSET  # likewise
    statistics_batches: int | msgspec.UnsetType = msgspec.UNSET  # records of plans without it are those of before
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        """Refuse a step backwards."""
        if self.every < 0 or self.devices_every < 0 or self.measured_batches < 0:
            raise ValueError("statistics_batches, every and devices_every must be >= 0")

    @property
    def measured_batches(self) -> int:
        """Batches over which running statistics are measured; 0: they are not, as in runs of before."""
        return self.statistics_batches if isinstance(self.statistics_batches, int) else 0

    def number(self, rounds: int, after: int) -> int:
        """Return the number of the tasks by which all devices evaluate after a round; it is beyond all `rounds`."""
        return rounds + 1 + (after if self.devices_every else 0)


class MeasurePlan(Section, frozen=True, kw_only=True):
    """What is measured on the devices before the first round.

    Attributes:
        seconds: Time for which every device times training steps; 0: nothing is measured. Two seconds give a sensor of
            5 Hz ten samples.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a measurement that has no end."""
        if not 0 <= self.seconds <= MAX_MEASURE_S:
            raise ValueError(f"seconds must be 0 to {MAX_MEASURE_S:g}")


class PartitionPlan(Section, frozen=True, kw_only=True):
    """How local agents and replayed devices share one data set; a real device brings its own examples.

    Attributes:
        kind: `none`: every device has all examples; `dirichlet`: shares of the classes are drawn for each device;
            `shards`: each has a few runs of the examples sorted by class; `even`: equal parts; `client`: the examples
            of the client of the data set (`[data] client_column`) that is named as the device is.
        alpha: Of `dirichlet`: concentration; 0.1 is very unequal, 100 nearly even.
        shards_per_device: Of `shards`: how many runs of examples each device has.
        min_examples: Of `dirichlet`: no device has fewer.
        seed: Of what is drawn.
    """

    kind: Literal["none", "dirichlet", "shards", "even", "client"] = "none"
    alpha: float = 0.5
    shards_per_device: int = 2
    min_examples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what the journal could not hold; the rest is for the data set to say."""
        if not 0 < self.alpha < math.inf:
            raise ValueError("alpha must be > 0 and finite")


class ReplayPlan(Section, frozen=True, kw_only=True):
    """How a replay computes; a live run does not ask.

    Attributes:
        together: Whether devices of a cohort may be trained in one pass where that is faster. Their models then agree
            with a live run's within the rounding of floats, no longer bit for bit.
    """

    together: bool = False


class OptimizerPlan(Section, frozen=True, kw_only=True):
    """What decides how much each device is given in a round, and within which limits.

    Attributes:
        name: One of the optimizers that have a section of options below.
        solver: `numpy`, or for `bandwidth` and `hcef` also `cvxpy`, which is slower by far and there to compare.
        options: Options of that optimizer.
    """

    name: str
    solver: Literal["numpy", "cvxpy"] = "numpy"
    options: dict[str, Scalar] = msgspec.field(default_factory=dict)

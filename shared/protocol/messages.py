"""Messages of rounds and split sessions: plain structs without tensors or torch.

Class names are the tags on the wire, so they must not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import xxhash

from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.inputs import Inputs
from shared.protocol.measurements import Absent, Cost, Reading, StepCost, TaskCost
from shared.protocol.objective import ObjectiveSpec

Scalar: TypeAlias = bool | int | float | str
Verdict: TypeAlias = Literal["accepted", "duplicate", "late", "refused", "void"]
Value: TypeAlias = bool | int | float | str | list[int | float]

STATISTICS = "statistics"  # among the values of an assignment: see `Assignment.measures_statistics`
STATISTICS_BATCHES = "statistics_batches"
INPUT_SUMS = "input_sums"  # among the values of an assignment: see `Assignment.sums_inputs`
MERGES_SINGLE = "merges_single"  # among the values of an assignment: see `Assignment.merges_single`
"""Among the metrics of an update: batches over which its device measured the running statistics that it sends. Among
the values of an assignment: the most batches to measure over."""
MISSED_STEPS = "missed_steps"  # among the metrics of an update: steps of its split session that went on without it
MAX_CLASSES, MAX_CLASS_CHARS = 4096, 1 << 15
"""Limits of a device's class names, which are sent in one message."""
MAX_FIELDS, MAX_FIELD_CHARS = 64, 1 << 11
"""Limits of the fields of a task that a device says it knows."""
OBJECTIVE, NORMALISE, PLUGINS, ADAPTATION = "objective", "normalise", "plugins", "adaptation"
PAYLOAD = "payload"
INLINE_BYTES = 16 << 10
"""Largest payload inside a Task or an Update; larger ones travel in frames."""
STEP_FIELD = "hyper."
STEP_FEATURES = ("optimizer", "clip_norm", "precision")
"""Options of a training step that a method and a device may support or not."""
TASK_FIELDS = (OBJECTIVE, NORMALISE, PLUGINS, ADAPTATION, PAYLOAD, *(STEP_FIELD + name for name in STEP_FEATURES))
"""Fields of a task that this version heeds beyond those of version 0.1: see `Status.knows`."""
BLOCK_BYTES = 1024
"""Frames carry whole blocks of a payload; missing parts are counted in blocks."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; unknown fields are ignored, so that minor versions interoperate."""


class Blob(msgspec.Struct, frozen=True):
    """One tensor as raw little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded tensors; only the codec that wrote them reads the keys of `blobs`."""

    codec: str
    blobs: dict[str, Blob]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor data in bytes, without the payload's header."""
        return sum(blob.data.nbytes for blob in self.blobs.values())


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A registered object by name, with options for its builder."""

    name: str
    options: dict[str, Scalar] = {}


class PluginVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity of a plugin: an algorithm, model or other object from outside this package.

    Attributes:
        kind: Kind of object, such as `algorithm`.
        name: Name in a plan: an entry point's, or `module:attribute`.
        distribution: Distribution that it belongs to; empty if it was not installed.
        version: Version of that distribution.
        digest: SHA-256 of its source files, hexadecimal; see `shared.plugins`.
    """

    kind: str
    name: str
    distribution: str = ""
    version: str = ""
    digest: str = ""


class ProjectVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A project, the user's code that a task needs, in one version."""

    name: str
    version: str


LOSSLESS = Spec(name="dense")
"""Lossless codec; a message omits it as a default."""


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a training step beyond plain SGD; names are those of the plan's `[hyper]`.

    Attributes:
        optimizer: Rule of the step. Momentum is SGD's alone.
        beta1: Decay of Adam's mean of gradients.
        beta2: Decay of Adam's mean of squared gradients.
        eps: Term in the denominator of Adam's step.
        clip_norm: Norm to which all gradients together are scaled down; 0: none.
        precision: Type of the forward pass and its gradients where the device computes in it; parameters, their
            changes and losses are of 32 bits.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 0.0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        """Refuse values that no training can use; all faults are listed."""
        rules = {
            "beta1": (0 <= self.beta1 < 1, "0 or more, and below 1"),
            "beta2": (0 <= self.beta2 < 1, "0 or more, and below 1"),
            "eps": (0 < self.eps < math.inf, "above 0 and finite"),
            "clip_norm": (0 <= self.clip_norm < math.inf, "0 for none, or above 0 and finite"),
        }
        faults = [f"{name} is {getattr(self, name)}: give {what}" for name, (holds, what) in rules.items() if not holds]
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def features(self) -> frozenset[str]:
        """Kinds of options other than plain SGD: `optimizer`, `clip_norm`, `precision`."""
        return frozenset(name for name in STEP_FEATURES if getattr(self, name) != getattr(PLAIN_STEP, name))


PLAIN_STEP = StepOptions()
"""A step of plain SGD."""


class SgdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of plain local training; with zero epochs, no training."""

    local_epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that no training can use; all faults are listed."""
        rules = {
            "local_epochs": (self.local_epochs >= 0, "at least 0"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0 and finite"),
            "momentum": (0 <= self.momentum < 1, "0 or more, and below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0 and finite"),
        }
        faults = [f"{name} is {getattr(self, name)}: give {what}" for name, (holds, what) in rules.items() if not holds]
        if faults:
            raise ValueError("; ".join(faults))


class Hyper(SgdOptions, frozen=True, kw_only=True):
    """Hyperparameters of a task's local training.

    Attributes:
        step_options: Absent for plain SGD, as in earlier versions, which do not know it: a server gives a task with it
            only to a device that says in its birth that it does.
    """

    step_options: StepOptions | msgspec.UnsetType = msgspec.UNSET

    @property
    def step(self) -> StepOptions:
        """Options of the training step."""
        return self.step_options or PLAIN_STEP


class AllocatedValues(msgspec.Struct, frozen=True, kw_only=True):
    """Values of an assignment that mean the same for every algorithm; None where absent or not a number.

    They travel and are recorded in `Assignment.values` and are parsed only here, for interoperability of versions.

    Attributes:
        keep: Share of each hidden layer's neurons that the device trains.
        prune: Share of the weights that are pruned.
        sent: Share of its update that it sends, by the codec `topk`.
        share: Share of the site's uplink that it may use.
        up_bits_per_s: Upload rate to keep to.
        local_steps: Training steps of its task.
    """

    keep: float | None = None
    prune: float | None = None
    sent: float | None = None
    share: float | None = None
    up_bits_per_s: float | None = None
    local_steps: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> AllocatedValues:
        """Read them from the values of an assignment or a recorded decision."""
        shares = ("keep", "prune", "sent", "share", "up_bits_per_s")
        numbers = {name: float(value) for name in shares if isinstance(value := values.get(name), int | float)}
        steps = values.get("local_steps")
        return cls(**numbers, local_steps=steps if isinstance(steps, int) else None)


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server's instructions for one device in one round.

    Attributes:
        seed: Seed of all randomness on the device in this round.
        hyper: Hyperparameters of its local training.
        steps: Steps of a split session, each of which goes through the server; 0 where the device trains alone.
        values: Values of the algorithm and the resource optimizer: ratios, active neurons, bits, shares.
        classes: Class names of the run in label order, if the device reported others or none; a device that has a class
            beyond them fails the task.
        mean: Subtracted from each channel of the inputs, where the run measures it over all devices; else empty.
        std: Divides each channel after that, likewise.
        graph: ONNX graph for a task that evaluates; fetched in frames if the device lacks it.
    """

    seed: int
    hyper: Hyper
    steps: int = 0
    values: dict[str, Value] = {}
    classes: list[str] = []
    graph: Transfer | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a negative number of steps."""
        if self.steps < 0:
            raise ValueError("steps must be >= 0")

    @property
    def is_split(self) -> bool:
        """True if every training step goes through the server."""
        return self.steps > 0

    @property
    def allocation(self) -> AllocatedValues:
        """The values that mean the same for every algorithm, parsed."""
        return AllocatedValues.of(self.values)

    @property
    def measures_statistics(self) -> bool:
        """True if nothing is trained, and BatchNorm's running statistics are measured over `batches_to_measure`.

        In a split session they are measured on the devices' features. A device that does not know this value gets an
        answer without a loss at every step, and so it changes nothing either.
        """
        return self.values.get(STATISTICS) is True

    @property
    def sums_inputs(self) -> bool:
        """True if the device sends counts, sums and sums of squares of its inputs; see `shared.data.moments`."""
        return self.values.get(INPUT_SUMS) is True

    @property
    def merges_single(self) -> bool:
        """True if a last batch of one example joins the previous batch: BatchNorm cannot train on one example.

        Set for networks with BatchNorm. An agent that does not know this value fails such a task, as earlier versions
        did.
        """
        return self.values.get(MERGES_SINGLE) is True

    @property
    def largest_batch(self) -> int:
        """Size of the largest batch that the device may train on."""
        return self.hyper.batch_size + (1 if self.merges_single and self.hyper.batch_size > 1 else 0)

    @property
    def batches_to_measure(self) -> int:
        """Number of batches for measuring running statistics, in a task for that or before an evaluation."""
        batches = self.steps if self.is_split else self.values.get(STATISTICS_BATCHES, 0)
        return batches if isinstance(batches, int) else 0


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A payload that travels in frames, identified by its content.

    Attributes:
        digest: XXH3-128 of the whole payload, 16 bytes.
        size: Size of the whole payload in bytes.
        frame_bytes: Payload bytes per frame unless the receiver wants smaller frames.
    """

    digest: bytes
    size: int
    frame_bytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks of 1 KiB; the last one may be shorter."""
        return max(1, -(-self.size // BLOCK_BYTES))


class Status(Message, frozen=True, kw_only=True):
    """Retained presence of a device or of the server; birth and will of a session carry the same number.

    Attributes:
        ended: Of a server: its finished runs, the newest first; a device may delete its data of them.
        classes: In a device's birth, its class names in label order, empty where they are plain numbers; nil if
            unknown, and from versions without this field.
        trains: Whether a device can be given training tasks; without torch it only evaluates.
        inputs: In a device's birth, the preparation of its inputs; nil if unknown, and from versions without this
            field.
        knows: In a device's birth, the fields of a task that its agent heeds beyond those of version 0.1: a server
            gives a task with such a field only to agents that know it. In a server's birth, the fields of an update.
    """

    device: str
    session: int
    instance: str
    online: bool
    state: str = ""
    version: str = ""
    ended: tuple[str, ...] = ()
    classes: list[str] | None = None
    trains: bool = True
    inputs: Inputs | None = None
    knows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse more names than any data set or version has: a server stores those of all devices."""
        if len(self.knows) > MAX_FIELDS or sum(map(len, self.knows)) > MAX_FIELD_CHARS:
            raise ValueError(f"knows must be {MAX_FIELDS} names and {MAX_FIELD_CHARS} characters at most")
        if self.classes and (len(self.classes) > MAX_CLASSES or sum(map(len, self.classes)) > MAX_CLASS_CHARS):
            raise ValueError(f"classes must be {MAX_CLASSES} names and {MAX_CLASS_CHARS} characters at most")


class Task(Message, frozen=True, kw_only=True):
    """Server -> device: fetch these parameters, evaluate or train, send an update.

    Attributes:
        params: The payload to start from, fetched in frames.
        shared: Whether its frames come on the topic common to all devices.
        cut_codec: Codec of features and gradients of a split session.
        measure_s: Seconds of training steps to time; their result is dropped. 0 for none.
        deadline_s: Seconds the server will wait, counted from when it sent the task.
        plugins: Plugins that the task uses; a device with another digest of one refuses the task.
        objective: Loss and metrics of the run; absent for cross-entropy and accuracy. An agent that does not know the
            field would train for these: the server sends it only to agents that do.
        project: Project with their code, which the device installs if its operator lists it.
        adaptation: What of the network is not trained; absent for nothing. Sent only to agents that know
            the field.
        base: Payload with the frozen leaves, which `params` lacks; fetched in frames if the device does not store it.
        payload: Content of `params` if it is small and the agent knows the field; else empty.
    """

    run: str
    round: int
    device: str
    algorithm: Spec
    model: Spec
    codec: Spec
    cut_codec: Spec = LOSSLESS
    assignment: Assignment
    params: Transfer
    shared: bool
    train: bool = True
    evaluate: bool = False
    measure_s: float = 0.0
    deadline_s: float
    plugins: tuple[PluginVersion, ...] = ()
    objective: ObjectiveSpec | None = None
    project: ProjectVersion | None = None
    adaptation: NetworkAdaptation | None = None
    base: Transfer | None = None
    payload: bytes = b""


class Report(Message, frozen=True, kw_only=True):
    """Device -> server, retained: the board's last measurements, and causes of absent ones.

    Attributes:
        board: Id of the board's firmware profile.
        readings: Figures by name; a name ends in its unit, such as `thermal.cpu-thermal_celsius`.
        absent: Absent figures, or whole absent probes, by name.
        facts: Values that are not figures: power mode, governor, versions.
        spent: The cost of the task that was acknowledged last.
        earlier: Costs of earlier tasks that no report has carried yet, in order.
        instance: Process id as in its Status, to distinguish reports of an earlier process; `at` orders the reports of
            one process.
    """

    device: str
    at: float
    board: str = ""
    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}
    spent: TaskCost | None = None
    earlier: list[TaskCost] = []
    instance: str = ""

    def __post_init__(self) -> None:
        """Refuse a time that cannot be ordered or recorded."""
        if not math.isfinite(self.at):
            raise ValueError("at must be finite")


class Update(Message, frozen=True, kw_only=True):
    """Device -> server: result of a task. Also the offer of its payload, which the server then requests.

    `start` is the digest of the parameters that the task began with: a server that lost a round repeats it, and updates
    trained from other parameters must not count. `trained_on` is the processor: the CPU, the default of older agents,
    or `cuda` and the name of the GPU. `sums` are those of the metrics over the held-out examples, which add over
    devices. `payload` is the content of `params` if it is small and the server knows the field; else empty.
    """

    run: str
    round: int
    device: str
    params: Transfer | None
    start: bytes = b""
    weight: float = 0.0
    num_examples: int = 0
    loss: float | None = None
    metrics: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    cost: Cost = Cost()
    step: StepCost | None = None
    failure: str | None = None
    trained_on: str = "cpu"
    payload: bytes = b""


class Want(Message, frozen=True, kw_only=True):
    """Receiver -> sender: send these blocks now, in frames of at most `frame_bytes`. A pair is a half-open range."""

    digest: bytes
    frame_bytes: int
    ranges: list[tuple[int, int]]


class Leave(Message, frozen=True, kw_only=True):
    """Server -> device: unsubscribe from the shared topic for this payload; its frames will be sent directly."""

    digest: bytes


class Ack(Message, frozen=True, kw_only=True):
    """Server -> device: the update is processed and may leave the outbox.

    The verdict `void` is only for a split session: the server has lost it, and its task must be repeated.
    """

    run: str
    round: int
    device: str
    start: bytes = b""
    verdict: Verdict
    reason: str = ""


class Room(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Credit for unrequested blocks of the next payload, and their frame size."""

    blocks: int = 0
    frame_bytes: int = BLOCK_BYTES


class SessionMessage(Message, frozen=True, kw_only=True):
    """Common fields of the messages of a split session.

    Attributes:
        start: Digest of the parameters that the session began with: it distinguishes repetitions of a round.
        step: Step of the session, from 1.
    """

    run: str
    round: int
    device: str
    start: bytes
    step: int


class Features(SessionMessage, frozen=True, kw_only=True):
    """Device -> server: offer one step's activations at the cut, with labels.

    Attributes:
        pushed: Blocks that follow at once, unrequested; the server requests the others.
        room: Credit for unrequested blocks of the gradient.
    """

    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Gradient(SessionMessage, frozen=True, kw_only=True):
    """Server -> device: offer the gradient for one step's features.

    Attributes:
        answers: Digest of those features: a restarted session has others at the same step.
        pushed: Blocks that follow at once, unrequested; the device requests the others.
        room: Credit for unrequested blocks of the next step's features.
    """

    answers: bytes
    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Skip(SessionMessage, frozen=True, kw_only=True):
    """Server -> device: that step went on without you, or is over; the next one open to you is `step`.

    A `step` beyond the last one means that the session is over. One before the device's own step means that the server
    has lost the session and the device must restart it.

    Attributes:
        offered: The step of the features that this answers, or would have; older answers are ignored.
    """

    offered: int


class Missed(msgspec.Struct, frozen=True):
    """Passed to a split device half in place of a gradient: its step went on without it, the `steps`-th one so far."""

    steps: int


def derive_seed(seed: int, number: int, device: str) -> int:
    """Derive the seed of one device in one round; stable across versions and platforms."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{number}/{device}".encode()) >> 1


def count_batches(examples: int, batch_size: int, *, merges_single: bool) -> tuple[int, int]:
    """Return the number of full batches in an epoch and the size of its last batch, 0 if none is smaller.

    `merges_single` is that of `Assignment`.
    """
    full, remainder = divmod(examples, batch_size)
    if merges_single and remainder == 1 and full and batch_size > 1:
        return full - 1, batch_size + 1
    return full, remainder


def count_steps(assignment: Assignment, examples: int) -> int:
    """Return the training steps of a task: the assigned number, or one for each batch of its epochs."""
    if assignment.is_split:
        return assignment.steps
    local_steps = assignment.allocation.local_steps
    if local_steps is not None:
        return local_steps
    full, last = count_batches(examples, assignment.hyper.batch_size, merges_single=assignment.merges_single)
    return assignment.hyper.local_epochs * (full + (last > 0))

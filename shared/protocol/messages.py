"""The messages of a round, and of a split session whose steps go through the server: bytes, no tensors, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import xxhash

from shared.protocol.inputs import Inputs
from shared.protocol.measurements import Absent, Cost, Reading, Spent, StepCost

Scalar: TypeAlias = bool | int | float | str
Verdict: TypeAlias = Literal["accepted", "duplicate", "late", "refused", "void"]
Value: TypeAlias = bool | int | float | str | list[int | float]

STATISTICS = "statistics"  # among the values of an assignment: see `Assignment.measures_statistics`
STATISTICS_BATCHES = "statistics_batches"
MERGES_SINGLE = "merges_single"  # among the values of an assignment: see `Assignment.merges_single`
"""Among the metrics of an update: batches over which its device measured the running statistics that it sends. Among
the values of an assignment: over how many it is to, at most."""
MISSED_STEPS = "missed_steps"  # among the metrics of an update: steps of its split session that went on without it
MAX_CLASSES, MAX_CLASS_CHARS = 4096, 1 << 15
"""Of the names of a device's classes, which it tells in one message."""
BLOCK_BYTES = 1024
"""A payload travels in frames of whole blocks; what of it lacks is counted in them."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of what travels; unknown fields are ignored so that minor versions may meet."""


class Blob(msgspec.Struct, frozen=True):
    """One tensor as raw little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of tensors after a codec; only that codec reads the keys of `blobs`."""

    codec: str
    blobs: dict[str, Blob]

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data, without the payload's header."""
        return sum(blob.data.nbytes for blob in self.blobs.values())


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A registered thing by name, with the options its builder takes."""

    name: str
    options: dict[str, Scalar] = {}


LOSSLESS = Spec(name="dense")
"""Every tensor as it is; where a message says no more than this very default, it is left out."""


class Hyper(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters of local training; zero epochs train nothing."""

    local_epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no training can use, every figure of it."""
        wanted = {
            "local_epochs": (self.local_epochs >= 0, "at least 0"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0 and finite"),
            "momentum": (0 <= self.momentum < 1, "0 or more, and below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "at least 0 and finite"),
        }
        faults = [
            f"{name} is {getattr(self, name)}: give {what}" for name, (holds, what) in wanted.items() if not holds
        ]
        if faults:
            raise ValueError("; ".join(faults))


class Allocated(msgspec.Struct, frozen=True, kw_only=True):
    """Values of an assignment that mean the same for every algorithm; None where nothing is said, or no number.

    They travel and are recorded among `Assignment.values` and are read here alone, so that versions may meet.

    Attributes:
        keep: Share of each hidden layer's neurons that the device trains.
        prune: Share of the weights that it leaves out.
        sent: Share of its update that it sends, by the codec `topk`.
        share: Share of the site's uplink that it may use.
        up_bits_per_s: Rate up that it keeps to.
        local_steps: Training steps of its task.
    """

    keep: float | None = None
    prune: float | None = None
    sent: float | None = None
    share: float | None = None
    up_bits_per_s: float | None = None
    local_steps: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Allocated:
        """Read them from what an assignment or a recorded decision says."""
        shares = ("keep", "prune", "sent", "share", "up_bits_per_s")
        found = {name: float(one) for name in shares if isinstance(one := values.get(name), int | float)}
        steps = values.get("local_steps")
        return cls(**found, local_steps=steps if isinstance(steps, int) else None)


class Assignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server decided for one device in one round.

    Attributes:
        seed: Seed of everything random that the device does in this round.
        hyper: Hyperparameters of its local training.
        steps: Steps of a split session, each of which goes through the server; 0 where the device trains alone.
        values: What the algorithm and the resource optimizer add: ratios, active neurons, bits, shares.
        classes: Names of the run's classes in the order of their numbers, where the device has told others or none; a
            device that has a class beyond them fails the task.
        graph: Of a task that evaluates: what by, with ONNX Runtime; fetched in frames where the device has none of it.
    """

    seed: int
    hyper: Hyper
    steps: int = 0
    values: dict[str, Value] = {}
    classes: list[str] = []
    graph: Transfer | None = None

    def __post_init__(self) -> None:
        """Refuse a session that could not be."""
        if self.steps < 0:
            raise ValueError("steps must be >= 0")

    @property
    def is_split(self) -> bool:
        """Whether every training step goes through the server."""
        return self.steps > 0

    @property
    def allocated(self) -> Allocated:
        """The values that mean the same for every algorithm."""
        return Allocated.of(self.values)

    @property
    def measures_statistics(self) -> bool:
        """Whether the task trains nothing: BatchNorm's running statistics are measured, over `batches_to_measure`.

        In a split session they are measured of what devices send. A device that does not know of it is answered without
        a loss at every step, and so it moves nothing either.
        """
        return self.values.get(STATISTICS) is True

    @property
    def merges_single(self) -> bool:
        """Whether a last batch of one example joins the batch before it: BatchNorm cannot train on one example.

        Said for networks with BatchNorm. An agent that does not know of it fails such a task, as it did before.
        """
        return self.values.get(MERGES_SINGLE) is True

    @property
    def largest_batch(self) -> int:
        """Examples of the largest batch that the device may train on."""
        return self.hyper.batch_size + (1 if self.merges_single and self.hyper.batch_size > 1 else 0)

    @property
    def batches_to_measure(self) -> int:
        """Batches over which a device measures running statistics, in a task for that or before it evaluates."""
        told = self.steps if self.is_split else self.values.get(STATISTICS_BATCHES, 0)
        return told if isinstance(told, int) else 0


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A payload that travels in frames, named by its content.

    Attributes:
        digest: XXH3-128 of the whole payload, 16 bytes.
        size: Bytes of the whole payload.
        frame_bytes: Bytes of payload that the sender puts into a frame unless the receiver wants smaller ones.
    """

    digest: bytes
    size: int
    frame_bytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks of 1 KiB, the last of which may be shorter."""
        return max(1, -(-self.size // BLOCK_BYTES))


class Status(Message, frozen=True, kw_only=True):
    """Retained presence of a device or of the server; birth and will of a session carry the same number.

    Attributes:
        ended: Of a server: its runs that are over, the newest first; a device may forget what it keeps of them.
        classes: In a device's birth the names of its classes in the order of their numbers, none where they are plain
            numbers; nil where nobody knows, and from versions that do not tell.
        trains: Whether a device is given tasks that train; one without torch evaluates alone.
        inputs: In a device's birth, how it prepares its examples; nil where it does not know, and from versions that
            do not tell.
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

    def __post_init__(self) -> None:
        """Refuse more names than any data set has: a server keeps those of all devices."""
        if self.classes and (len(self.classes) > MAX_CLASSES or sum(map(len, self.classes)) > MAX_CLASS_CHARS):
            raise ValueError(f"classes must be {MAX_CLASSES} names and {MAX_CLASS_CHARS} characters at most")


class Task(Message, frozen=True, kw_only=True):
    """Server -> device: fetch these parameters, evaluate or train, send an update.

    Attributes:
        params: The payload to start from, fetched in frames.
        shared: Whether its frames come on the topic common to all devices.
        cut_codec: How features and gradients of a split session are encoded.
        measure_s: Seconds of training steps to time; what they learn is thrown away. 0 for none.
        deadline_s: Seconds the server will wait, counted from when it sent the task.
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


class Report(Message, frozen=True, kw_only=True):
    """Device -> server, retained: what the board measured last; what it cannot measure is an absence with its cause.

    Attributes:
        board: Id of the board's firmware profile.
        readings: Figures by name; a name ends in its unit, such as `thermal.cpu-thermal_celsius`.
        absent: Names of figures, or of whole probes, that are not there.
        facts: What is no figure: power mode, governor, versions.
        spent: The cost of the task that was settled last.
        earlier: Costs of tasks settled before that one which no report has told yet, in order.
        instance: That of the process's Status, so that what an earlier process said can be told apart; `at` orders
            what one process says.
    """

    device: str
    at: float
    board: str = ""
    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}
    spent: Spent | None = None
    earlier: list[Spent] = []
    instance: str = ""

    def __post_init__(self) -> None:
        """Refuse a time by which nothing can be ordered, and which no journal could hold."""
        if not math.isfinite(self.at):
            raise ValueError("at must be finite")


class Update(Message, frozen=True, kw_only=True):
    """Device -> server: what a task gave. Also the offer of its payload, which the server then asks for.

    `start` is the digest of the parameters that the task began with: a server that lost a round repeats it, and what
    was trained from other parameters must not count in it. `trained_on` is where the task was computed: the CPU, as
    with all agents that do not say so, or `cuda` and the name of the GPU.
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
    cost: Cost = Cost()
    step: StepCost | None = None
    failure: str | None = None
    trained_on: str = "cpu"


class Want(Message, frozen=True, kw_only=True):
    """Receiver -> sender: send these blocks now, in frames of at most `frame_bytes`. A pair is a half-open range."""

    digest: bytes
    frame_bytes: int
    ranges: list[tuple[int, int]]


class Leave(Message, frozen=True, kw_only=True):
    """Server -> device: stop listening to the shared topic for this payload; its frames will come to you alone."""

    digest: bytes


class Ack(Message, frozen=True, kw_only=True):
    """Server -> device: the update is settled and may leave the outbox.

    `void` is said of a split session's alone: the server has lost that session, and its task is to be done anew.
    """

    run: str
    round: int
    device: str
    start: bytes = b""
    verdict: Verdict
    reason: str = ""


class Room(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a receiver takes unasked of the next payload: so many blocks, in frames of so many bytes at most."""

    blocks: int = 0
    frame_bytes: int = BLOCK_BYTES


class OfSession(Message, frozen=True, kw_only=True):
    """What every message of a session says first.

    Attributes:
        start: Digest of the parameters that the session began with: it tells a round that is repeated from itself.
        step: Of the session, from 1.
    """

    run: str
    round: int
    device: str
    start: bytes
    step: int


class Features(OfSession, frozen=True, kw_only=True):
    """Device -> server: one step's activations at the cut, with labels, offered.

    Attributes:
        pushed: Blocks of it that come right behind this, unasked; the rest is asked for.
        room: What may come unasked the other way, of the gradient.
    """

    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Gradient(OfSession, frozen=True, kw_only=True):
    """Server -> device: the answer to one step's features, offered; fields as there.

    Attributes:
        answers: Digest of those features: a session begun anew has others at the same step.
        room: What may come unasked of the next step's features.
    """

    answers: bytes
    params: Transfer
    pushed: int = 0
    room: Room = Room()


class Skip(OfSession, frozen=True, kw_only=True):
    """Server -> device: that step went on without you, or is over; the next one that is open to you is `step`.

    Beyond the last step it says that the session is over, before the device's own that the server has lost it and
    the device is to begin it anew.

    Attributes:
        offered: The step of the features that it answers, or would have: an older one's is of no concern any more.
    """

    offered: int


class Missed(msgspec.Struct, frozen=True):
    """Given to a split device half in place of a gradient: its step, and so many in all, went on without it."""

    steps: int


def mix(seed: int, number: int, device: str) -> int:
    """Return the seed of one device in one round; the same everywhere and for ever."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{number}/{device}".encode()) >> 1


def split_epoch(examples: int, batch_size: int, *, merges_single: bool) -> tuple[int, int]:
    """Return how many full batches an epoch begins with, and the examples of its last one; 0 where all are full.

    Args:
        batch_size: Of a full batch.
        merges_single: As `Assignment.merges_single`.
    """
    whole, rest = divmod(examples, batch_size)
    if merges_single and rest == 1 and whole and batch_size > 1:
        return whole - 1, batch_size + 1
    return whole, rest


def steps_of(told: Assignment, examples: int) -> int:
    """Return the training steps of a task: as many as it says, or one for each batch of its epochs."""
    if told.is_split:
        return told.steps
    said = told.allocated.local_steps
    if said is not None:
        return said
    whole, last = split_epoch(examples, told.hyper.batch_size, merges_single=told.merges_single)
    return told.hyper.local_epochs * (whole + (last > 0))

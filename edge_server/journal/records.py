"""Journal records of a run: decisions, observations and messages of its server."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import msgspec

from edge_server.journal.compared_metric import ComparedMetric
from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan
from edge_server.plan.plan import Plan
from edge_server.plan.sites import restore_site_order
from shared.protocol.inputs import Inputs
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, PluginVersion, Transfer, Update

R = TypeVar("R")
IMPLAUSIBLE_COST, SERVER_RESTARTED = "implausible-cost", "server-restarted"
"""Reasons of notes."""


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of records that belong to no round. Seconds are of the server's monotonic clock."""


class ServerBegan(Observed, frozen=True, kw_only=True):
    """A server process started or continued the run; the clocks of two processes are unrelated.

    Second `t` of this process's clock is second `run_s + (t - at)` of the run; see `edge_server.journal.run_clock`.

    Attributes:
        at: On the process's clock.
        run_s: The same moment in seconds of the run.
        utc_s: The same moment in calendar seconds, if the calendar is known.
    """

    at: float
    run_s: float = 0.0
    utc_s: float | None = None
    versions: dict[str, str] = {}


class Joined(Observed, frozen=True, kw_only=True):
    """A device is online: it connected, `reconnected`, or its process was `restarted`."""

    device: str
    at: float
    cause: Literal["connected", "reconnected", "restarted"] = "connected"
    version: str = ""


class Left(Observed, frozen=True, kw_only=True):
    """A device is offline: announced by it or its broker, or absent when this server process began (`unheard`)."""

    device: str
    at: float
    cause: Literal["gone", "unheard"] = "gone"


class Sensed(Observed, frozen=True, kw_only=True):
    """The relevant part of a report; `edge_server.fleet.observe` selects the reports.

    Attributes:
        at: When the server received it.
        readings: Values by name; the name ends in the unit.
        ages: Seconds before `at` at which a value was measured, if more than one.
        provenance: Source and quality of those values for which it changed.
        board: Id of the firmware profile, if it changed.
    """

    device: str
    at: float
    readings: dict[str, float]
    ages: dict[str, float] = {}
    provenance: dict[str, Provenance] = {}
    board: str = ""
    facts: dict[str, str] = {}


class LeftOut(Observed, frozen=True, kw_only=True):
    """A device is excluded until its agent restarts, because its operator must correct something.

    Attributes:
        instance: Id of its agent's process.
        cause: Cause that it reported, or what it failed to do.
        silent: Whether it sent nothing at all; it then takes part again with its first message.
    """

    device: str
    instance: str
    cause: str
    round: int
    at: float
    silent: bool = False


class Noted(Observed, frozen=True, kw_only=True):
    """A warning to readers of the run's values, such as a gap in a trace that was filled.

    Attributes:
        reason: Code of a note that is looked for later; empty for others, and in old journals.
        device: Device that it is about, if any.
    """

    what: str
    reason: str = ""
    device: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of records of rounds. Seconds are of the server's monotonic clock unless stated otherwise."""


class RunOpened(Record, frozen=True, kw_only=True):
    """A run began.

    Attributes:
        started: Calendar time for people; empty in replay.
        imported: Whether it was imported from a trace; it cannot be resumed.
        draw: Generator of initial weights, see `shared.models.build`; empty for torch's, as in old journals.
        statistics_batches: Batches over which running statistics are measured; 0 for never, as in old journals.
        sites: Site names in the plan's order, which a table with sorted keys loses; a plan read back has it.
        plugins: Plugins that the plan uses; unset without any, as in old journals.
        compared: Metric by which its models are compared; unset for the accuracy, as in old journals.
        weights: SHA-256 of the file of pretrained weights, hexadecimal; unset without one.
        personal: Whether devices have their own models; unset if not, and in old journals.
    """

    run: str
    plan: Plan
    started: str = ""
    imported: bool = False
    draw: str = ""
    statistics_batches: int = 0
    sites: tuple[str, ...] = ()
    plugins: tuple[PluginVersion, ...] | msgspec.UnsetType = msgspec.UNSET
    compared: ComparedMetric | msgspec.UnsetType = msgspec.UNSET
    weights: str | msgspec.UnsetType = msgspec.UNSET
    personal: bool | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        restore_site_order(self)


class Measured(Record, frozen=True, kw_only=True):
    """Costs of training steps, timed before the first round.

    Attributes:
        by_device: Cost of one local iteration by device.
        metrics: Further measurements of the algorithm, such as gradient variance.
        inputs: Mean and deviation of the inputs over all devices, if the plan asks for them.
    """

    by_device: dict[str, StepCost]
    metrics: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    inputs: Inputs | msgspec.UnsetType = msgspec.UNSET


class RoundOpened(Record, frozen=True, kw_only=True):
    """A round began with these assignments. A restart repeats them exactly.

    Attributes:
        at: When the cohort was drawn, after the wait for devices.
        online: Number of online devices.
        decision: Decision of the plan's optimizer with its inputs; None without one.
        classes: Class names, if the devices had agreed on them by then; later processes read them here.
        inputs: Input preparation that the devices agreed on, likewise.
    """

    round: int
    assignments: dict[str, Assignment]
    at: float | None = None
    online: int | None = None
    decision: Decision | None = None
    classes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    inputs: Inputs | msgspec.UnsetType = msgspec.UNSET


class UpdateAccepted(Record, frozen=True, kw_only=True):
    """A device's update is stored and counts from now on, once. `at` is when its last frame arrived."""

    round: int
    device: str
    update: Update
    bytes_up: int
    at: float | None = None


class CostSettled(Record, frozen=True, kw_only=True):
    """Total cost of a task, upload included; known only after the update was delivered."""

    round: int
    device: str
    cost: Cost


class RoundClosed(Record, frozen=True, kw_only=True):
    """A round ended.

    Attributes:
        outcome: `aggregated`; or `missed`: too few updates, the model is unchanged.
        arrived: Devices whose update counts.
        refused: Rejected bytes by reason.
        loss: Mean training loss, weighted by examples.
        accuracy: Of the aggregated model on the server's test data.
        class_accuracy: The same by class in the order of the labels; None for a class without examples. Unset if the
            server tested nothing, or beyond a hundred classes.
        device_accuracy: On the devices' held-out examples: of the model the round began with, weighted by examples; of
            personal models after training, unweighted.
        seconds: From the wait for devices to the stored aggregated model; `RoundOpened.at` is when that wait ended.
        bytes_up: Bytes of frames received from each device.
        bytes_down: Bytes of frames that each device reports as received.
        steps: Of a split round: steps served.
        missed: Of a split round: steps that each device missed; devices that missed none are left out.
        statistics_batches: Of a split round: batches over which running statistics were measured again after it. Those
            tasks have numbers beyond the rounds, like evaluations; see EvaluationPlan.number.
        restored: Whether its record was lost: the state after it exists, nothing else is known.
        terms: Metrics of the algorithm by name, such as mean loss terms and supervised steps; unset without any.
        metrics: The task's metrics of the aggregated model on the server's test data; unset if it tested nothing, and
            in runs without a table `[task]`.
        device_metrics: The same, and the loss, on the devices' held-out examples, taken together; of personal models
            the means over devices.
    """

    round: int
    outcome: Literal["aggregated", "missed"]
    arrived: tuple[str, ...]
    failed: dict[str, str] = {}
    refused: dict[str, int] = {}
    loss: float | None = None
    accuracy: float | None = None
    test_loss: float | None = None
    device_accuracy: float | None = None
    seconds: float
    bytes_up: dict[str, int] = {}
    bytes_down: dict[str, int] = {}
    at: float | None = None
    steps: int | None = None
    missed: dict[str, int] = {}
    statistics_batches: int | None = None
    restored: bool = False
    class_accuracy: tuple[float | None, ...] | msgspec.UnsetType = msgspec.UNSET
    terms: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    device_metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class Evaluated(Record, frozen=True, kw_only=True):
    """Evaluation of the model, or of personal models, on the devices' held-out examples.

    Attributes:
        accuracy: Mean: of one model weighted by examples, of personal models unweighted.
        by_device: Metrics measured by each device.
        round: The round before it; None in old journals, which evaluated the finished model.
        personal: Whether each device evaluated its personal model.
        metrics: As `RoundClosed.device_metrics`.
    """

    accuracy: float | None
    by_device: dict[str, dict[str, float]]
    round: int | None = None
    personal: bool = False
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class Rewound(Record, frozen=True, kw_only=True):
    """All earlier records of `round` and later rounds are void: these rounds are repeated.

    Causes: a damaged checkpoint; a server restart within a split round, whose top model was in memory; a missed round
    under a plan that repeats them; or diverged training that went back to its last good model.

    Attributes:
        round: The first round to repeat.
        reopened: Whether the round's opening stays valid: the same devices repeat it with the same assignments.
        missed: Whether it is repeated only because it was missed; no model is lost.
    """

    round: int
    cause: str
    reopened: bool = False
    missed: bool = False


class EdgeSettled(Record, frozen=True, kw_only=True):
    """State of the edge to a neighbour in the gossip after a round, recorded before it is announced.

    Attributes:
        round: The last edge round of a global round.
        run: The neighbour's name of its run; once an edge was on, other runs of it are ignored.
        on: Whether the two sites mix their models; if not, `cause` is one word: `deadline`; `unheard`: the owner of the
            edge never announced its state; or why the model was refused, such as `norm`. The suffix `-there` means that
            the other end refused this site's model.
    """

    round: int
    site: str
    run: str
    on: bool
    cause: str = ""
    at: float | None = None


class Gossiped(Record, frozen=True, kw_only=True):
    """A site gossiped after a round; `RoundClosed` describes the resulting model.

    Attributes:
        round: The last edge round of a global round.
        on, off: Neighbours that it mixed with, and the others with the cause.
        bytes_up, bytes_down: Bytes of frames sent to and received from each neighbour.
        refused: Rejected messages of peers, counted by reason.
        seconds: From this site's model to the models of all neighbours whose edges are on; it ended `at`.
        transfer_s: Part of them, from a neighbour's offer to its complete model.
        before, after: Sketches of the model before and after mixing, from which sites estimate the distance between
            their models; see `edge_server.sites.sketch`. Empty in old journals.
        parameters: Sketch of the trainable parameters after mixing, if the model has other leaves too.
    """

    round: int
    on: tuple[str, ...]
    off: dict[str, str] = {}
    bytes_up: dict[str, int] = {}
    bytes_down: dict[str, int] = {}
    refused: dict[str, int] = {}
    seconds: float
    at: float | None = None
    transfer_s: dict[str, float] = {}
    before: bytes = b""
    after: bytes = b""
    parameters: bytes = b""


class RunClosed(Record, frozen=True, kw_only=True):
    """A run ended: by its plan, because training `diverged`, or `refused` by all devices or by this server.

    `cause` is set if it ended before its last round.
    """

    outcome: Literal["finished", "stopped", "diverged", "refused"]
    cause: str = ""


Seen: TypeAlias = ServerBegan | Joined | Left | Sensed | LeftOut | Noted
BetweenSites: TypeAlias = TermBegan | Pledged | Granted | Coordinated | EdgeSettled | Gossiped
OfRounds: TypeAlias = RoundOpened | UpdateAccepted | CostSettled | RoundClosed | Evaluated | Rewound
AnyRecord: TypeAlias = RunOpened | Measured | OfRounds | Seen | BetweenSites | RunClosed


class Journal(Protocol):
    """Records of one run, in order.

    Attributes:
        folder: Folder of the run, without the accepted updates.
        updates: Folder of the open round's accepted updates, one file per device.
        retry_s: Seconds before a failed write is repeated; None to give up.
    """

    folder: Path
    updates: Path
    retry_s: float | None

    def append(self, record: AnyRecord) -> None:
        """Add a record durably. Raises Unwritable, and then it is not added."""
        ...

    def extend(
        self, records: Sequence[AnyRecord], payloads: Mapping[str, bytes] = {}, *, may_wait: bool = False
    ) -> None:
        """Add all records or, raising Unwritable, none.

        Args:
            payloads: Small payloads of these updates, by the names under which they are read.
            may_wait: Whether they may wait a moment for the next write, which is never written without them.
        """
        ...

    def read_payload(self, name: str, transfer: Transfer) -> memoryview:
        """Return an accepted update's payload. Raises FileNotFoundError if it was deleted."""
        ...

    def records(self, after: int = 0) -> Sequence[AnyRecord]:
        """Return the records so far in order without the first `after`; each iteration reads them again."""
        ...


@runtime_checkable
class ReadByType(Protocol):
    """Records that are read by type, such as those of a journal on disk."""

    def enumerate_records(self, *kinds: type[AnyRecord], newest_first: bool = False) -> Iterator[tuple[int, AnyRecord]]:
        """Yield the records of some types, or all, with their numbers from 1."""
        ...

    def read_numbers(self, numbers: Iterable[int]) -> Sequence[AnyRecord]:
        """Return the records with some numbers, which ascend."""
        ...

    def count_records(self, *kinds: type[AnyRecord]) -> int:
        """Return the number of records of some types, without reading them."""
        ...


def enumerate_records(
    records: Sequence[AnyRecord], *kinds: type[R], newest_first: bool = False
) -> Iterator[tuple[int, R]]:
    """Yield the records of some types, or all, with their numbers from 1; a journal on disk decodes no others."""
    if isinstance(records, ReadByType):
        journal_kinds = cast("tuple[type[AnyRecord], ...]", kinds)
        return cast("Iterator[tuple[int, R]]", records.enumerate_records(*journal_kinds, newest_first=newest_first))
    numbers = range(len(records))
    every = ((number + 1, records[number]) for number in (reversed(numbers) if newest_first else numbers))
    selected = ((number, record) for number, record in every if not kinds or isinstance(record, kinds))
    return cast("Iterator[tuple[int, R]]", selected)


def read_numbers(records: Sequence[AnyRecord], numbers: Iterable[int]) -> Sequence[AnyRecord]:
    """Return the records with some numbers, which ascend."""
    return records.read_numbers(numbers) if isinstance(records, ReadByType) else [records[at - 1] for at in numbers]


def select(records: Sequence[AnyRecord], *kinds: type[R], newest_first: bool = False) -> Iterator[R]:
    """Yield the records of some types."""
    return (record for _, record in enumerate_records(records, *kinds, newest_first=newest_first))


def first(records: Sequence[AnyRecord], kind: type[R]) -> R | None:
    """Return the first record of a type; None if there is none."""
    return next(select(records, kind), None)


def valid_records(records: Sequence[AnyRecord], *kinds: type[R], newest_first: bool = False) -> Iterator[R]:
    """Yield the records of some types, or all, without those that a later `Rewound` made void."""
    return (record for _, record in enumerate_valid(records, *kinds, newest_first=newest_first))


def enumerate_valid(
    records: Sequence[AnyRecord], *kinds: type[R], newest_first: bool = False
) -> Iterator[tuple[int, R]]:
    """Yield the same records with their numbers from 1."""
    opening, limits = first(records, RunOpened), _void_limits(records)
    rewinds = [-number for number, *_ in limits]
    for number, record in enumerate_records(records, *kinds, newest_first=newest_first):
        later = bisect_left(rewinds, -number)
        if not later or not _is_void(record, limits[later - 1], opening.plan.rounds if opening else None):
            yield number, record


def count_valid(records: Sequence[AnyRecord], kind: type[R]) -> int:
    """Return the number of valid records of a type."""
    if isinstance(records, ReadByType) and first(records, Rewound) is None:
        return records.count_records(cast("type[AnyRecord]", kind))
    return sum(1 for _ in valid_records(records, kind))


def _void_limits(records: Sequence[AnyRecord]) -> list[tuple[int, int, int]]:
    """Return, for each rewind, the latest first: its number, and from which round it and later ones make void.

    Returns:
        The last figure is that of the openings of rounds, which a reopened round keeps.
    """
    limits = list[tuple[int, int, int]]()
    for number, rewound in enumerate_records(records, Rewound, newest_first=True):
        first_round, first_opening = rewound.round, rewound.round + rewound.reopened
        if limits:
            first_round, first_opening = min(first_round, limits[-1][1]), min(first_opening, limits[-1][2])
        limits.append((number, first_round, first_opening))
    return limits


def drop_void(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Return the records without those that a later `Rewound` made void."""
    return list(valid_records(records))


def _is_void(record: object, limit: tuple[int, int, int], last: int | None) -> bool:
    _, first_round, first_opening = limit
    if isinstance(record, Evaluated):
        return record.round is not None and record.round >= first_round
    if not isinstance(record, RoundOpened | UpdateAccepted | CostSettled | RoundClosed):
        return False
    if last is not None and record.round > last + 1:  # of the evaluation after a round; see EvaluationPlan.number
        return record.round - (last + 1) >= first_round
    return record.round >= (first_opening if isinstance(record, RoundOpened) else first_round)


def closed_rounds(records: Sequence[AnyRecord]) -> list[RoundClosed]:
    """Return the ends of valid rounds, in order."""
    return list(valid_records(records, RoundClosed))

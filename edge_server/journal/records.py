"""Journal records of a run: what its server decided, saw and received, a struct a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan
from edge_server.plan.plan import Plan
from edge_server.plan.sites import keep_order
from shared.protocol.inputs import Inputs
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, Update


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the journal that no round wrote. Seconds are of the server's monotonic clock."""


class ServerBegan(Observed, frozen=True, kw_only=True):
    """A server process began with the run, or went on with it; the clocks of two processes have nothing in common.

    Second `t` of this process's clock is second `run_s + (t - at)` of the run; see `edge_server.journal.run_clock`.

    Attributes:
        at: On the process's clock.
        run_s: The same moment, in seconds of the run.
        utc_s: The same moment in calendar seconds, where there is a calendar.
    """

    at: float
    run_s: float = 0.0
    utc_s: float | None = None
    versions: dict[str, str] = {}


class Joined(Observed, frozen=True, kw_only=True):
    """A device is there: it connected, did so anew (`reconnected`), or is another process than before (`restarted`)."""

    device: str
    at: float
    cause: Literal["connected", "reconnected", "restarted"] = "connected"
    version: str = ""


class Left(Observed, frozen=True, kw_only=True):
    """A device is gone by its own or its broker's word, or was when this server process began (`unheard`)."""

    device: str
    at: float
    cause: Literal["gone", "unheard"] = "gone"


class Sensed(Observed, frozen=True, kw_only=True):
    """What matters of a report; see `edge_server.fleet.observe` for which reports are told.

    Attributes:
        at: When the server heard it.
        readings: Figures by name, whose end is the unit.
        ages: Seconds before `at` at which a figure was measured, where that was more than a second.
        provenance: Source and quality of those figures of which that is news.
        board: Id of the firmware profile, where that is news.
        facts: Those that are news.
    """

    device: str
    at: float
    readings: dict[str, float]
    ages: dict[str, float] = {}
    provenance: dict[str, Provenance] = {}
    board: str = ""
    facts: dict[str, str] = {}


class LeftOut(Observed, frozen=True, kw_only=True):
    """A device takes no part until its agent is started anew: its operator must edit something, by its own words.

    Attributes:
        instance: Of its agent's process.
        cause: What it said, or what it did not.
        silent: Whether it said nothing at all: then it takes part again as soon as it speaks.
    """

    device: str
    instance: str
    cause: str
    round: int
    at: float
    silent: bool = False


class Noted(Observed, frozen=True, kw_only=True):
    """Something that whoever reads the run's figures must know, such as a gap in a trace that was filled by a rule."""

    what: str


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the journal. Seconds are of the server's monotonic clock unless they say otherwise."""


class RunOpened(Record, frozen=True, kw_only=True):
    """A run began.

    Attributes:
        started: Calendar time for people; empty in replay.
        imported: Whether it was made of a trace: nobody goes on with it.
        draw: Who draws first weights: see `shared.models.build`; empty for torch's generator, as in old journals.
        statistics_batches: Over how many batches running statistics are measured; 0: they are not, as in old journals.
        sites: Those of the plan, in its order, which a table of sorted keys has lost; the plan that is read has it.
    """

    run: str
    plan: Plan
    started: str = ""
    imported: bool = False
    draw: str = ""
    statistics_batches: int = 0
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keep_order(self)


class Measured(Record, frozen=True, kw_only=True):
    """What training steps cost the devices, timed before the first round.

    Attributes:
        by_device: What one local iteration costs each.
        metrics: What the algorithm measured besides, such as the variance of its gradients.
        failed: Devices that could not, with the cause.
    """

    by_device: dict[str, StepCost]
    metrics: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}


class RoundOpened(Record, frozen=True, kw_only=True):
    """A round began: what every device of its cohort was told. A restart repeats exactly this.

    Attributes:
        at: When the cohort was drawn and the first task could go out; the wait for devices was over.
        online: How many devices were there.
        decision: What the plan's optimizer decided for it, and from what; None where there is none.
        classes: Names of the classes, where the devices agreed on them before this record: for later processes.
        inputs: Likewise, how they prepare their examples.
    """

    round: int
    assignments: dict[str, Assignment]
    at: float | None = None
    online: int | None = None
    decision: Decision | None = None
    classes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    inputs: Inputs | msgspec.UnsetType = msgspec.UNSET


class UpdateAccepted(Record, frozen=True, kw_only=True):
    """A device's update is stored; from here on it counts, once. `at` is when its last frame had come."""

    round: int
    device: str
    update: Update
    bytes_up: int
    at: float | None = None


class CostSettled(Record, frozen=True, kw_only=True):
    """What a task cost its device in all, upload included; known once that update is settled, so after the update."""

    round: int
    device: str
    cost: Cost


class RoundClosed(Record, frozen=True, kw_only=True):
    """A round ended.

    Attributes:
        outcome: `aggregated`; or `missed`, where too few updates came and the model stayed as it was.
        arrived: Devices whose update counts.
        failed: Devices that could not, with the cause.
        refused: Bytes we did not take, counted by reason.
        loss: Mean training loss, weighted by examples.
        accuracy: Of the aggregated model on the server's test data.
        class_accuracy: Likewise, by class in the order of the labels; None of a class without examples. Left out where
            the server tested nothing, and of more than a hundred classes.
        device_accuracy: Of the model the round began with, on the devices' held-out examples, weighted by examples; of
            personal models, after training, each weighted alike.
        seconds: From the wait for devices to the model aggregated and stored; `RoundOpened.at` is when that wait ended.
        bytes_up: Bytes of frames that came from each device.
        bytes_down: Bytes of frames that each device says it received.
        steps: Of a split round: how many were served.
        missed: Of a split round: how many of its steps each device had no part in; who missed none is left out.
        statistics_batches: Of a split round after which running statistics were measured anew: over how many batches.
            The tasks of that have numbers beyond the rounds, as an evaluation's; see EvaluationPlan.number.
        restored: Whether the record of it was lost: the state after it is there, and nothing else is known.
        terms: The method's own figures of its training, by name: the means of its loss terms, supervised steps. Left
            out where it has none.
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


class Evaluated(Record, frozen=True, kw_only=True):
    """The model, or every device's own, on the devices' held-out examples.

    Attributes:
        accuracy: Mean: of one model weighted by examples, of personal ones each weighted alike.
        by_device: What each of them measured.
        round: The last round before it; None in old journals, where it is of the finished model.
        personal: Whether each device tried parameters of its own.
    """

    accuracy: float | None
    by_device: dict[str, dict[str, float]]
    round: int | None = None
    personal: bool = False


class Rewound(Record, frozen=True, kw_only=True):
    """What was recorded of `round` and later rounds before this line is void: they are done again.

    A checkpoint was damaged; a server restarted within a split round, whose top it had trained in memory; a round was
    missed, and the plan repeats such rounds; or training diverged, and the run went back to its last good model.

    Attributes:
        round: The first that is done again.
        reopened: Whether the beginning of that round stays: the same devices do it again as they were told.
        missed: Whether it is done again for nothing but having been missed: no model is lost.
    """

    round: int
    cause: str
    reopened: bool = False
    missed: bool = False


class EdgeSettled(Record, frozen=True, kw_only=True):
    """How a site settled the edge to a neighbour in the gossip after a round, before it told anybody.

    Attributes:
        round: The last edge round of a global round.
        run: Its own name of its run; once an edge was on, no other run of it is heard.
        on: Whether its model is mixed with ours, and ours with its; if not, `cause` says why in one word: `deadline`;
            `unheard`, where the owner of the edge never said how it settled it; why its model was refused, such as
            `norm`. With `-there` behind it, the other end has refused ours.
    """

    round: int
    site: str
    run: str
    on: bool
    cause: str = ""
    at: float | None = None


class Gossiped(Record, frozen=True, kw_only=True):
    """A site gossiped after a round; what it has now is what `RoundClosed` tells of.

    Attributes:
        round: The last edge round of a global round.
        on, off: Neighbours with whom it mixed, and the others, with the cause.
        bytes_up, bytes_down: Bytes of frames that were sent to each neighbour, and that came of it.
        refused: What peers said that was of no use, counted by reason.
        seconds: From the model of this site to the models of all whose edges are on; it ended `at`.
        transfer_s: Of them, from a neighbour's offer to its whole model.
        before, after: The model before and after mixing as a sketch, by which sites tell how far their models are
            apart; see `edge_server.sites.sketch`. Empty in old journals.
        parameters: Likewise of what training moves, after mixing, where the model has other leaves too.
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
    """A run ended by its plan, or since its training `diverged`, or was `refused` by all devices or by this server.

    `cause` says why before its last round, if so.
    """

    outcome: Literal["finished", "stopped", "diverged", "refused"]
    cause: str = ""


Seen: TypeAlias = ServerBegan | Joined | Left | Sensed | LeftOut | Noted
BetweenSites: TypeAlias = TermBegan | Pledged | Granted | Coordinated | EdgeSettled | Gossiped
OfRounds: TypeAlias = RoundOpened | UpdateAccepted | CostSettled | RoundClosed | Evaluated | Rewound
AnyRecord: TypeAlias = RunOpened | Measured | OfRounds | Seen | BetweenSites | RunClosed


class Journal(Protocol):
    """One run's records, in order.

    Attributes:
        folder: Where all of the run lies, but for the accepted updates.
        updates: Where the accepted updates of the open round lie, a file a device.
        retry_s: Seconds after which to try again what the disk refuses; None to give up.
    """

    folder: Path
    updates: Path
    retry_s: float | None

    def append(self, record: AnyRecord) -> None:
        """Add a record; it is durable when this returns. Raises Unwritable, and then it is not there."""
        ...

    def extend(self, records: Sequence[AnyRecord]) -> None:
        """Add all of some records or, where it raises Unwritable, none."""
        ...

    def records(self, after: int = 0) -> list[AnyRecord]:
        """Return the records in order, leaving out the first `after`."""
        ...


def valid(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """Return the records without those that a later `Rewound` made void."""
    kept: list[AnyRecord] = []
    last = None
    for record in records:
        if isinstance(record, RunOpened):
            last = record.plan.rounds
        if isinstance(record, Rewound):
            kept = [one for one in kept if not _is_void(one, record, last)]
        kept.append(record)
    return kept


def _is_void(record: AnyRecord, rewound: Rewound, last: int | None) -> bool:
    if isinstance(record, Evaluated):
        return record.round is not None and record.round >= rewound.round
    if not isinstance(record, RoundOpened | UpdateAccepted | CostSettled | RoundClosed):
        return False
    is_kept = rewound.reopened and isinstance(record, RoundOpened) and record.round == rewound.round
    number = record.round
    if last is not None and number > last + 1:  # of the evaluation after an earlier round; see EvaluationPlan.number
        number -= last + 1
    return number >= rewound.round and not is_kept


def closed_rounds(records: Iterable[AnyRecord]) -> list[RoundClosed]:
    """Return the rounds that ended, in order."""
    return [record for record in valid(records) if isinstance(record, RoundClosed)]


def measured_rounds(records: Iterable[AnyRecord]) -> list[tuple[float, int]]:
    """Return the accuracy on the server's test data after each round that has one, with the round; no void ones."""
    return [(one.accuracy, one.round) for one in closed_rounds(records) if one.accuracy is not None]

"""The store seam, and the records of a run: together they are its journal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from edge_server.trial.plan import Plan
from shared.messages import Assignment, Update
from shared.tree import State


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the journal. Seconds are of the server's monotonic clock unless they say otherwise."""


class RunOpened(Record, frozen=True, kw_only=True):
    """A run began. `started` is calendar time for people; empty in replay."""

    run: str
    plan: Plan
    started: str = ""


class RoundOpened(Record, frozen=True, kw_only=True):
    """A round began: what every device of its cohort was told. A restart repeats exactly this."""

    round: int
    assignments: dict[str, Assignment]


class UpdateAccepted(Record, frozen=True, kw_only=True):
    """A device's update is stored; from here on it counts, once."""

    round: int
    device: str
    update: Update
    bytes_up: int


class RoundClosed(Record, frozen=True, kw_only=True):
    """A round ended.

    Attributes:
        outcome: `aggregated`; or `missed`, where too few updates came and the model stayed as it was.
        arrived: Devices whose update counts.
        failed: Devices that could not, with the cause.
        refused: Bytes we did not take, counted by reason.
        loss: Mean training loss, weighted by examples.
        accuracy: Of the aggregated model on the server's test data.
        test_loss: Likewise.
        device_accuracy: Of the model the round began with, on the devices' held-out examples, weighted by examples.
        seconds: From the first task sent to the model aggregated and stored.
        bytes_up: Bytes of frames that came from each device.
        bytes_down: Bytes of frames that each device says it received.
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


class Evaluated(Record, frozen=True, kw_only=True):
    """The finished model on the devices' held-out examples."""

    accuracy: float | None
    by_device: dict[str, dict[str, float]]


class Rewound(Record, frozen=True, kw_only=True):
    """A checkpoint was lost: what was recorded of `round` and later rounds before this line is void."""

    round: int
    cause: str


class RunClosed(Record, frozen=True, kw_only=True):
    """A run ended by its plan."""

    outcome: Literal["finished", "stopped"]
    cause: str = ""


AnyRecord: TypeAlias = RunOpened | RoundOpened | UpdateAccepted | RoundClosed | Evaluated | Rewound | RunClosed


class Store(Protocol):
    """One run's journal, its checkpoints and its accepted updates.

    Attributes:
        folder: Where all of it lies.
        retry_s: Seconds after which to try again what the disk refuses; None to give up.
    """

    folder: Path
    retry_s: float | None

    def append(self, record: AnyRecord) -> None:
        """Add a record; it is durable when this returns. Raises Unwritable, and then it is not there."""
        ...

    def records(self) -> list[AnyRecord]:
        """Return every record in order."""
        ...

    def save(self, number: int, state: State) -> None:
        """Keep the server state after a round, durably. Raises Unwritable, and then nothing has changed."""
        ...

    def load(self, number: int) -> State:
        """Return the state kept after a round. Raises FileNotFoundError or CorruptFile."""
        ...


def valid(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    """Return the records without those that a later `Rewound` made void."""
    kept: list[AnyRecord] = []
    for record in records:
        if isinstance(record, Rewound):
            kept = [one for one in kept if not _is_void(one, record.round)]
        kept.append(record)
    return kept


def _is_void(record: AnyRecord, from_round: int) -> bool:
    return isinstance(record, RoundOpened | UpdateAccepted | RoundClosed) and record.round >= from_round


def closed_rounds(records: Iterable[AnyRecord]) -> list[RoundClosed]:
    """Return the rounds that ended, in order."""
    return [record for record in valid(records) if isinstance(record, RoundClosed)]

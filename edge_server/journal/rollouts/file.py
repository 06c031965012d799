"""Journal of a rollout in a SQLite file that several processes append to.

    rollouts/DEPLOYMENT.sqlite       hash-chained rows, as in a run's journal
    rollouts/DEPLOYMENT.jsonl        of an earlier version; converted when a record is appended

The process that drives a rollout and commands that give orders both append, after reading what others appended.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from edge_server.journal.disk import translate_sql_errors
from edge_server.journal.recordable import encode_recordable
from edge_server.journal.sqlite import INSERT, LAST, TABLE, TABLE_SQL, marked_rows, read_database, require_table
from edge_server.journal.stream import query, verify_row
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.topics import is_name
from shared.runtime.durable import explain_disk_errors

log = logging.getLogger(__name__)

FOLDER, SUFFIX, LINES = "rollouts", ".sqlite", ".jsonl"
LOCK_S = 60.0
"""Longest wait for another process that appends."""
Order: TypeAlias = Literal["pause", "resume", "abort", "back", "stop"]
Outcome: TypeAlias = Literal["finished", "stopped", "aborted", "taken-back"]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]

MARK = 16
"""Hexadecimal digits of the mark of a line, which covers the previous mark and the record."""


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rollout.

    Attributes:
        release: `NAME/VERSION`.
        sha256: Of the release's manifest.
        run: Run that trained the model.
        canary: Boards of each profile in the canary wave; 0 for none.
        waves: Cumulative shares of boards that have been offered the release after each wave.
        soak_s: Seconds for which each board observes the release before it commits it.
        max_failures: Number of boards refusing it or rolling back that stops the rollout.
        on_failure: What follows then: `stop`, or `back` to roll back the boards that have it as well.
        devices: Shell pattern of board names.
        max_drop: Allowed loss of accuracy on a board's local examples.
        max_latency_ms: Highest p95 of an inference; 0 for one and a half times the previous version's.
        attempt: One more than earlier rollouts of the release: boards retry what they refused then.
        ahead: Whether boards of later waves fetch it with the first wave, so that its parts are sent once.
        least_bytes_per_s: Boards that fetch parts more slowly have failed.
    """

    deployment: str
    release: str
    sha256: str
    run: str = ""
    canary: Annotated[int, Meta(ge=0)] = 1
    waves: tuple[Share, ...] = (0.1, 0.5, 1.0)
    soak_s: Annotated[float, Meta(ge=0)] = 600.0
    max_failures: Annotated[int, Meta(ge=1)] = 1
    on_failure: Literal["stop", "back"] = "stop"
    devices: str = "*"
    max_drop: Annotated[float, Meta(ge=0)] = 0.02
    max_latency_ms: Annotated[float, Meta(ge=0)] = 0.0
    attempt: Annotated[int, Meta(ge=1)] = 1
    ahead: bool = True
    least_bytes_per_s: Annotated[float, Meta(gt=0)] = 16e3

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.release.partition("/")[0]

    @property
    def version(self) -> int:
        """Version of the release."""
        return int(self.release.partition("/")[2])


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of rollout records; `at` is calendar time for people."""

    at: str


class RolloutStarted(RolloutRecord, frozen=True, kw_only=True):
    """The first record."""

    plan: RolloutPlan


class WaveOpened(RolloutRecord, frozen=True, kw_only=True):
    """Boards are offered the release from now on.

    Attributes:
        devices: Profile of each board.
        canary: Whether they are the first of their profiles.
    """

    devices: dict[str, str]
    canary: bool = False


class BoardReported(RolloutRecord, frozen=True, kw_only=True, tag="BoardTold"):  # the name in existing journals
    """A board reported a new state of the model."""

    device: str
    status: ModelStatus


class BoardGivenUp(RolloutRecord, frozen=True, kw_only=True):
    """An online board exceeded its time limit and counts as failed, unless it reports success later."""

    device: str
    cause: str


class PartsSent(RolloutRecord, frozen=True, kw_only=True):
    """Parts were sent to boards.

    Attributes:
        size: Bytes that these boards lacked.
        sent: Bytes passed to the broker.
    """

    devices: tuple[str, ...]
    size: int
    sent: int


class RolloutOrdered(RolloutRecord, frozen=True, kw_only=True):
    """An operator, or a failed wave, changed the course of the rollout.

    Attributes:
        cause: Empty if an operator ordered it.
    """

    order: Order
    cause: str = ""


class RolloutEnded(RolloutRecord, frozen=True, kw_only=True):
    """Nothing is left to do for the boards that are online.

    Attributes:
        behind: Boards that were offered it and are offline.
    """

    outcome: Outcome
    behind: tuple[str, ...] = ()


AnyRolloutRecord: TypeAlias = (
    RolloutStarted | WaveOpened | BoardReported | BoardGivenUp | PartsSent | RolloutOrdered | RolloutEnded
)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRolloutRecord] = msgspec.json.Decoder(AnyRolloutRecord)


def encode_rollout_record(record: AnyRolloutRecord) -> bytes:
    """Return a record as JSON.

    Raises:
        Unrecordable: It could not be read back.
    """
    return encode_recordable(record, _encoder, _decoder)


def read_lines(path: Path) -> list[AnyRolloutRecord]:
    """Return the records of a file of an earlier version: lines of a mark, a blank and the record.

    Args:
        path: A trailing incomplete line is ignored.

    Raises:
        CorruptFile: A line was changed or is missing.
    """
    records: list[AnyRolloutRecord] = []
    before = b""
    for line in path.read_bytes().split(b"\n")[:-1]:
        before = xxhash.xxh3_64_hexdigest(before + line[MARK + 1 :]).encode()
        try:
            if line[: MARK + 1] != before + b" ":
                raise CorruptFile(f"{path}: line {len(records) + 1} or the one before it was changed")
            records.append(_decoder.decode(line[MARK + 1 :]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"{path}: line {len(records) + 1}: {error}") from error
    return records


class RolloutJournal:
    """Journal of one rollout, appended to by several processes."""

    def __init__(self, data_dir: Path, deployment: str) -> None:
        self.path = data_dir / FOLDER / f"{deployment}{SUFFIX}"
        self._lines = data_dir / FOLDER / f"{deployment}{LINES}"
        self._read_to = 0

    def news(self) -> list[AnyRolloutRecord]:
        """Return the records appended since the last call, by this process or another.

        Raises:
            CorruptFile: A record was changed or is missing.
            FileNotFoundError: There is no such rollout.
        """
        if self.path.exists():
            # Of a process that was killed while it appended, a rollback journal remains, which a reader applies.
            is_writable = all(os.access(path, os.W_OK, effective_ids=True) for path in (self.path, self.path.parent))
            mode = "rw" if is_writable else "ro"
            records = read_database(self.path, self._read_rows, f"{self.path.absolute().as_uri()}?mode={mode}")
        else:
            records = read_lines(self._lines)[self._read_to :]
        self._read_to += len(records)
        return records

    def _read_rows(self, connection: sqlite3.Connection) -> list[AnyRolloutRecord]:
        """Return the records after the last one that was read."""
        if not (table := connection.execute(TABLE_SQL).fetchone()):  # it is being created or converted
            return read_lines(self._lines)[self._read_to :] if self._lines.exists() else []
        require_table(self.path, table)
        rows = connection.execute(query((), has_index=False), (self._read_to, sys.maxsize)).fetchall()
        try:
            for row in rows:
                verify_row(row)
            return [_decoder.decode(row[1]) for row in rows]
        except (CorruptFile, msgspec.DecodeError) as error:
            raise CorruptFile(f"{self.path}: {error}") from error

    def append(self, *records: AnyRolloutRecord) -> list[AnyRolloutRecord]:
        """Add records durably, all or none; return them after those that others appended since the last call.

        Raises:
            CorruptFile: A record was changed or is missing.
            Unwritable: The disk is full.
        """
        with explain_disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)
        with translate_sql_errors(self.path), closing(sqlite3.connect(self.path, LOCK_S)) as connection:
            connection.execute("PRAGMA synchronous = EXTRA")  # syncs the folder, too, when a transaction ends
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute(TABLE_SQL).fetchone() is None:
                connection.execute(TABLE)
                earlier = read_lines(self._lines) if self._lines.exists() else []
                connection.executemany(INSERT, marked_rows(earlier, 0, encode_rollout_record))
            others = self._read_rows(connection)
            [before] = connection.execute(LAST).fetchone() or [0]
            connection.executemany(INSERT, marked_rows(records, before, encode_rollout_record))
            connection.commit()
        self._lines.unlink(missing_ok=True)
        self._read_to += len(others) + len(records)
        return [*others, *records]


def rollout_names(data_dir: Path) -> list[str]:
    """Return the names of all rollouts, sorted, which is by beginning."""
    folder = data_dir / FOLDER
    names = {path.stem for suffix in (SUFFIX, LINES) for path in folder.glob(f"*{suffix}")}
    return sorted(filter(is_name, names))


def read_rollout(data_dir: Path, deployment: str) -> list[AnyRolloutRecord]:
    """Return the records of a rollout.

    Raises:
        ConfigError: There is none of that name.
        CorruptFile: A line was changed or is missing.
    """
    try:
        return RolloutJournal(data_dir, deployment).news()
    except FileNotFoundError:
        names = ", ".join(rollout_names(data_dir)[-8:]) or "none"
        raise ConfigError(
            f"no rollout {deployment[:80]!r} in {data_dir / FOLDER}; existing rollouts: {names}"
        ) from None


def readable_rollouts(data_dir: Path) -> Iterator[list[AnyRolloutRecord]]:
    """Yield the records of each rollout, oldest first; damaged journals are logged and skipped."""
    for name in rollout_names(data_dir):
        try:
            yield read_rollout(data_dir, name)
        except CorruptFile as error:
            log.warning("%s", error)


def read_model_statuses(data_dir: Path) -> Mapping[str, Mapping[str, ModelStatus]]:
    """Return the last status that each board reported of each model, by device and model, over all rollouts."""
    latest: dict[str, dict[str, tuple[str, ModelStatus]]] = {}
    for record in chain.from_iterable(readable_rollouts(data_dir)):
        if isinstance(record, BoardReported):
            by_model = latest.setdefault(record.device, {})
            if record.at >= by_model.get(record.status.name, ("",))[0]:
                by_model[record.status.name] = record.at, record.status
    return {device: {name: status for name, (_, status) in by_model.items()} for device, by_model in latest.items()}

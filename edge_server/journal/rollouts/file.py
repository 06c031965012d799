"""Rollout journal file: records in JSON lines with chained marks.

    rollouts/DEPLOYMENT.jsonl        a line is a mark, covering record and previous mark, and the record

The process that drives a rollout and commands that give orders both append, under the file's lock, after reading what
others appended. An incomplete last line, as after a power cut, is ignored and overwritten.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from edge_server.journal.recordable import encode_recordable
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.topics import is_name
from shared.runtime.durable import explain_disk_errors, sync

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "rollouts", ".jsonl"
Order: TypeAlias = Literal["pause", "resume", "abort", "back", "stop"]
Outcome: TypeAlias = Literal["finished", "stopped", "aborted", "taken-back"]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]

MARK = 16
"""Hexadecimal digits of a line's mark, which precedes the record and a blank."""


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


class BoardTold(RolloutRecord, frozen=True, kw_only=True):
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
    RolloutStarted | WaveOpened | BoardTold | BoardGivenUp | PartsSent | RolloutOrdered | RolloutEnded
)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRolloutRecord] = msgspec.json.Decoder(AnyRolloutRecord)


def rollout_line(record: AnyRolloutRecord, before: str) -> tuple[bytes, str]:
    """Return the line of a record that follows a line with mark `before`, and its own mark.

    Raises:
        Unrecordable: It could not be read back.
    """
    body = encode_recordable(record, _encoder, _decoder)
    mark = xxhash.xxh3_64_hexdigest(before.encode() + body)
    return mark.encode() + b" " + body + b"\n", mark


def read_lines(data: bytes, before: str, source: str) -> tuple[list[AnyRolloutRecord], str, int]:
    """Return the records of complete lines, the mark of the last, and their size in bytes.

    Args:
        data: Lines; a trailing incomplete one is ignored.
        before: Mark of the line before them; empty for none.
        source: Path for error messages.

    Raises:
        CorruptFile: A line was changed or is missing.
    """
    records: list[AnyRolloutRecord] = []
    complete = data[: data.rfind(b"\n") + 1]
    for line in complete.split(b"\n")[:-1]:
        body = line[MARK + 1 :]
        mark = xxhash.xxh3_64_hexdigest(before.encode() + body)
        try:
            if line[: MARK + 1] != mark.encode() + b" ":
                raise CorruptFile(f"{source}: line {len(records) + 1} or the one before it was changed")
            records.append(_decoder.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"{source}: line {len(records) + 1}: {error}") from error
        before = mark
    return records, before, len(complete)


class RolloutJournal:
    """Journal of one rollout, appended to by several processes."""

    def __init__(self, data_dir: Path, deployment: str) -> None:
        self.path = data_dir / FOLDER / f"{deployment}{SUFFIX}"
        self._read_to, self._mark = 0, ""

    def news(self) -> list[AnyRolloutRecord]:
        """Return the records appended since the last call, by this process or another.

        Raises:
            CorruptFile: A line was changed or is missing.
        """
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            return self._take(file.read())

    def _take(self, data: bytes) -> list[AnyRolloutRecord]:
        records, self._mark, size = read_lines(data, self._mark, str(self.path))
        self._read_to += size
        return records

    def append(self, *records: AnyRolloutRecord) -> list[AnyRolloutRecord]:
        """Add records durably; return them after those that others appended since the last call.

        Raises:
            CorruptFile: A line was changed or is missing.
            Unwritable: The disk is full.
        """
        with explain_disk_errors(self.path), self._lock_file() as file:
            data = os.pread(file, os.fstat(file).st_size - self._read_to, self._read_to)
            appended = self._take(data)
            os.ftruncate(file, self._read_to)  # a torn last line
            lines, mark = b"", self._mark
            for record in records:
                line, mark = rollout_line(record, mark)
                lines += line
            self._write(file, lines)
            self._mark, self._read_to = mark, self._read_to + len(lines)
        return [*appended, *records]

    def _write(self, file: int, lines: bytes) -> None:
        """Write lines after the known ones, all or none."""
        done = 0
        try:
            while done < len(lines):
                done += os.pwrite(file, lines[done:], self._read_to + done)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, self._read_to)
            raise

    @contextmanager
    def _lock_file(self) -> Iterator[int]:
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if is_new:
                sync(self.path.parent)
            yield file
        finally:
            os.close(file)


def rollout_names(data_dir: Path) -> list[str]:
    """Return the names of all rollouts, sorted, which is by beginning."""
    folder = data_dir / FOLDER
    names = [path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}")] if folder.is_dir() else []
    return sorted(name for name in names if is_name(name))


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


def read_model_statuses(data_dir: Path) -> Mapping[str, Mapping[str, ModelStatus]]:
    """Return the last status that each board reported of each model, by device and model, over all rollouts.

    Damaged journals are logged and skipped.
    """
    latest: dict[str, dict[str, tuple[str, ModelStatus]]] = {}
    for name in rollout_names(data_dir):
        try:
            records = read_rollout(data_dir, name)
        except CorruptFile as error:
            log.warning("%s", error)
            continue
        for record in records:
            if isinstance(record, BoardTold):
                by_model = latest.setdefault(record.device, {})
                if record.at >= by_model.get(record.status.name, ("",))[0]:
                    by_model[record.status.name] = record.at, record.status
    return {device: {name: status for name, (_, status) in by_model.items()} for device, by_model in latest.items()}

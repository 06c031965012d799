"""Journals of rollouts: what was ordered, which boards were taken in which wave, and what became of it, a line each.

    rollouts/DEPLOYMENT.jsonl        a line is a record in JSON with a mark that covers it and the mark before

The process that drives a rollout writes here, and so do commands that give it orders: each appends under the file's
lock, and reads what others have appended. A last line that a power cut tore off is as if it had not been written.
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
"""Hexadecimal digits of a line's mark, which stands before the record with a blank behind."""


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout is to do.

    Attributes:
        release: `NAME/VERSION`.
        sha256: Of the release's manifest.
        run: That the model is of.
        canary: Boards of each profile that are first; 0 for none.
        waves: Shares of the boards that have been offered it after each wave.
        soak_s: Seconds for which each board watches it before it is committed.
        max_failures: So many boards that refuse it or go back stop the rollout.
        on_failure: What is done then: `stop`, or `back` for the boards that have it, too.
        devices: Pattern of the boards' names, as in a shell.
        max_drop: Accuracy that may be lost on a board's own examples.
        max_latency_ms: Longest p95 of an inference; 0 for one and a half times the version before.
        attempt: One more than earlier rollouts of the release: what a board refused then, it tries again.
        ahead: Whether boards of later waves fetch it with the first ones, so that its parts go once for all.
        least_bytes_per_s: A board that fetches parts more slowly, or not at all, has failed.
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
        """Of the model."""
        return self.release.partition("/")[0]

    @property
    def version(self) -> int:
        """Of the release."""
        return int(self.release.partition("/")[2])


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of what is recorded; `at` is calendar time for people."""

    at: str


class RolloutStarted(RolloutRecord, frozen=True, kw_only=True):
    """The first record."""

    plan: RolloutPlan


class WaveOpened(RolloutRecord, frozen=True, kw_only=True):
    """Boards are offered the release from now on.

    Attributes:
        devices: Which, with the profile of each.
        canary: Whether they are the first of their profiles.
    """

    devices: dict[str, str]
    canary: bool = False


class BoardTold(RolloutRecord, frozen=True, kw_only=True):
    """A board has said how it stands with the model, and that is news."""

    device: str
    status: ModelStatus


class BoardGivenUp(RolloutRecord, frozen=True, kw_only=True):
    """A board that is there took longer than it may, and has failed; unless it says later that it made it after all."""

    device: str
    cause: str


class PartsSent(RolloutRecord, frozen=True, kw_only=True):
    """Parts went to boards.

    Attributes:
        devices: That they were for.
        size: Bytes that these boards lacked.
        sent: Bytes that were handed to the broker.
    """

    devices: tuple[str, ...]
    size: int
    sent: int


class RolloutOrdered(RolloutRecord, frozen=True, kw_only=True):
    """Somebody, or a wave that failed, changed its course.

    Attributes:
        cause: Why, where nobody ordered it.
    """

    order: Order
    cause: str = ""


class RolloutEnded(RolloutRecord, frozen=True, kw_only=True):
    """There is nothing left to do for the boards that are there.

    Attributes:
        outcome: What it came to.
        behind: Boards that were offered it and are not there.
    """

    outcome: Outcome
    behind: tuple[str, ...] = ()


AnyRolloutRecord: TypeAlias = (
    RolloutStarted | WaveOpened | BoardTold | BoardGivenUp | PartsSent | RolloutOrdered | RolloutEnded
)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRolloutRecord] = msgspec.json.Decoder(AnyRolloutRecord)


def rollout_line(record: AnyRolloutRecord, before: str) -> tuple[bytes, str]:
    """Return the line of a record that follows one with the mark `before`, and its own mark.

    Raises:
        Unrecordable: It could not be read back.
    """
    body = encode_recordable(record, _encoder, _decoder)
    mark = xxhash.xxh3_64_hexdigest(before.encode() + body)
    return mark.encode() + b" " + body + b"\n", mark


def read_lines(data: bytes, before: str, place: str) -> tuple[list[AnyRolloutRecord], str, int]:
    """Return the records of whole lines, the mark of the last, and the bytes that they take.

    Args:
        data: Lines; what follows the last end of one is torn, or still being written.
        before: The mark of the line before them; empty for none.
        place: Where they lie, for the error.

    Raises:
        CorruptFile: A line is not as it was written.
    """
    found: list[AnyRolloutRecord] = []
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.split(b"\n")[:-1]:
        body = line[MARK + 1 :]
        mark = xxhash.xxh3_64_hexdigest(before.encode() + body)
        try:
            if line[: MARK + 1] != mark.encode() + b" ":
                raise CorruptFile(f"{place}: line {len(found) + 1}, or the one before it, is not as it was written")
            found.append(_decoder.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"{place}: line {len(found) + 1}: {error}") from error
        before = mark
    return found, before, len(whole)


class RolloutJournal:
    """The journal of one rollout, which several processes append to.

    Args:
        deployment: Name of the rollout.
    """

    def __init__(self, data_dir: Path, deployment: str) -> None:
        self.path = data_dir / FOLDER / f"{deployment}{SUFFIX}"
        self._read_to, self._mark = 0, ""

    def news(self) -> list[AnyRolloutRecord]:
        """Return what was appended since the last call, by this process or another.

        Raises:
            CorruptFile: A line is not as it was written.
        """
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            return self._take(file.read())

    def _take(self, data: bytes) -> list[AnyRolloutRecord]:
        found, self._mark, size = read_lines(data, self._mark, str(self.path))
        self._read_to += size
        return found

    def append(self, *records: AnyRolloutRecord) -> list[AnyRolloutRecord]:
        """Add records durably; return them, behind what others have appended since the last call.

        Raises:
            CorruptFile: A line is not as it was written.
            Unwritable: The disk takes nothing more.
        """
        with explain_disk_errors(self.path), self._locked() as file:
            data = os.pread(file, os.fstat(file).st_size - self._read_to, self._read_to)
            found = self._take(data)
            os.ftruncate(file, self._read_to)  # a torn last line
            lines, mark = b"", self._mark
            for record in records:
                line, mark = rollout_line(record, mark)
                lines += line
            self._write(file, lines)
            self._mark, self._read_to = mark, self._read_to + len(lines)
        return [*found, *records]

    def _write(self, file: int, lines: bytes) -> None:
        """Put lines behind what is known, all of them or none."""
        done = 0
        try:
            while done < len(lines):
                done += os.pwrite(file, lines[done:], self._read_to + done)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, self._read_to)
            raise

    @contextmanager
    def _locked(self) -> Iterator[int]:
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
    """Return the names of all rollouts, the first begun first."""
    folder = data_dir / FOLDER
    names = [path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}")] if folder.is_dir() else []
    return sorted(name for name in names if is_name(name))


def read_rollout(data_dir: Path, deployment: str) -> list[AnyRolloutRecord]:
    """Return the records of a rollout.

    Raises:
        ConfigError: There is none of that name.
        CorruptFile: A line is not as it was written.
    """
    try:
        return RolloutJournal(data_dir, deployment).news()
    except FileNotFoundError:
        known = ", ".join(rollout_names(data_dir)[-8:]) or "none"
        raise ConfigError(f"no rollout {deployment[:80]!r} in {data_dir / FOLDER}; there are: {known}") from None


def boards_of_models(data_dir: Path) -> Mapping[str, Mapping[str, ModelStatus]]:
    """Return what each board said last of each model, by device and model, as far as rollouts heard of it.

    A journal that is damaged is reported and passed over.
    """
    found: dict[str, dict[str, tuple[str, ModelStatus]]] = {}
    for name in rollout_names(data_dir):
        try:
            records = read_rollout(data_dir, name)
        except CorruptFile as error:
            log.warning("%s", error)
            continue
        for record in records:
            if isinstance(record, BoardTold):
                known = found.setdefault(record.device, {})
                if record.at >= known.get(record.status.name, ("",))[0]:
                    known[record.status.name] = record.at, record.status
    return {device: {name: status for name, (_, status) in known.items()} for device, known in found.items()}

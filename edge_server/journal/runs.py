"""Runs of a site: found by name, listed, summarised; the versions that a run's record names."""

from __future__ import annotations

import logging
import platform
import tempfile
import uuid
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from edge_server.journal.records import AnyRecord, Evaluated, RunClosed, RunOpened, closed_rounds, valid
from edge_server.journal.sqlite import JOURNAL, read, salvageable_records
from edge_server.plan.plan import Plan
from shared.errors import ConfigError, CorruptFile
from shared.runtime.clock import utc_stamp
from shared.runtime.durable import explain_disk_errors

log = logging.getLogger(__name__)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a line."""

    run: str
    plan: str
    algorithm: str
    started: str
    rounds: int
    of: int
    accuracy: float | None
    outcome: str


@dataclass(frozen=True)
class Run:
    """A run's folder and its journal."""

    folder: Path
    records: list[AnyRecord]

    @property
    def opened(self) -> RunOpened | None:
        """Return the record of its beginning."""
        return next((record for record in self.records if isinstance(record, RunOpened)), None)

    @property
    def closed(self) -> RunClosed | None:
        """Return the record of its end, None while there is none."""
        return next((record for record in self.records if isinstance(record, RunClosed)), None)


def new_name(plan: Plan) -> str:
    """Return a name that no other run has."""
    return f"{plan.name[:32]}-{utc_stamp()}-{uuid.uuid4().hex[:4]}"


def make_folder(data_dir: Path) -> Path:
    """Return a folder of runs that is there.

    Raises:
        ConfigError: It cannot be made, or nothing in it.
        Unwritable: The disk takes nothing more.
    """
    try:
        with explain_disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=data_dir).close()
    except OSError as error:
        raise ConfigError(f"{data_dir}: {error.strerror}; name a folder of runs that you may write in") from error
    return data_dir


def exists(data_dir: Path, run: str) -> bool:
    """Tell whether a run of that name was ever begun here."""
    return _holds_run(data_dir / run)


def _holds_run(folder: Path) -> bool:
    try:
        return (folder / JOURNAL).exists()
    except OSError:  # a name longer than file systems take, a folder that we may not look into
        return False


def find(data_dir: Path, run: str) -> Run:
    """Return a run by its name, or by the path of its folder.

    Raises:
        ConfigError: There is none, or its journal cannot be read.
    """
    folder = next(filter(_holds_run, (data_dir / run, Path(run))), None)
    if folder is None:
        raise ConfigError(f"no run {run!r} in {data_dir}; `edge-server runs` lists those there are")
    try:
        return Run(folder, read(folder))
    except CorruptFile as error:
        raise ConfigError(f"{error}; restore the file from a copy, or go on with what of the run is whole") from error


def all_runs(data_dir: Path) -> list[Run]:
    """Return every readable run, oldest first; what cannot be read is reported and left alone."""
    runs = []
    for path in data_dir.glob(f"*/{JOURNAL}"):
        try:
            runs.append(find(data_dir, path.parent.name))
        except ConfigError as error:
            log.warning("%s", error)
    return sorted(runs, key=lambda run: run.opened.started if run.opened else "")


def unfinished(data_dir: Path, plan: Plan) -> str | None:
    """Return the name of the latest live run of this very plan that has not ended; a replay has no calendar time."""
    runs = [Run(path.parent, salvageable_records(path)) for path in data_dir.glob(f"*/{JOURNAL}")]
    for run in sorted(runs, key=lambda run: run.opened.started if run.opened else "", reverse=True):
        if run.opened and run.opened.started and run.opened.plan == plan and not (run.closed or run.opened.imported):
            return run.opened.run
    return None


def summarise_run(run: Run) -> RunSummary:
    """Return a run in a line."""
    closed = closed_rounds(run.records)
    tried = [record for record in valid(run.records) if isinstance(record, Evaluated) and record.personal]
    accuracies = [record.accuracy for record in tried or closed if record.accuracy is not None]
    opened = run.opened
    return RunSummary(
        run=opened.run if opened else run.folder.name,
        plan=opened.plan.name if opened else "",
        algorithm=opened.plan.algorithm.name if opened else "",
        started=opened.started if opened else "",
        rounds=len(closed),
        of=opened.plan.rounds if opened else 0,
        accuracy=accuracies[-1] if accuracies else None,
        outcome=run.closed.outcome if run.closed else "unfinished",
    )


DISTRIBUTIONS = ("fieldfleet", "numpy", "torch")


def versions() -> dict[str, str]:
    """Return the version of Python and of every distribution that decides what numbers come out, if it is there."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # imported from a folder that was never installed
    return found

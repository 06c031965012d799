"""Crash-safe queue of plans of a site, one file for each job.

`edge-server submit` adds jobs while the server works. Every change is one atomic replacement or removal of a file under
a lock that the system releases if the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from edge_server.journal.runs import folders_of_runs, is_local
from edge_server.plan.data_folder import check_data_folder, claim_data_folder
from edge_server.plan.plan import Plan
from edge_server.plan.removed_keys import convert_plan
from shared.errors import ConfigError, SiteBusy
from shared.runtime.clock import utc_stamp
from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.runtime.folder_lock import FolderLock, is_held

log = logging.getLogger(__name__)

QUEUES = "queue"
"""Subfolder of a folder of runs with the queue of each site."""
JOB_FILES, DIGITS = "job-*.json", 6
CHANGE_LOCK = "change-lock"
MOST_ENDED = 50
"""Ended jobs that are kept for the list."""
MOST_PRIORITY = 1_000_000

JobState = Literal["waiting", "running", "ended"]


class QueuedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that waits for its run, has one, or had one.

    Attributes:
        number: Its name; counts from 1 in the order of submission.
        priority: Jobs with a higher one come first.
        submitted: Calendar time, for people.
        plan: Copy of the submitted plan, with resolved paths.
        project: Working folder of the plan's project; empty without one, or if it is installed.
        state: `running` also if the server ended meanwhile: the next one resumes the run.
        run: Name of the run, from its beginning.
        outcome: Of the run, see `edge_server.journal.records.RunClosed`; `failed` if it could not be run to its end.
        cause: Why the job waits for devices, or its run ended early or failed; empty if it did not.
    """

    number: int
    priority: int = 0
    submitted: str = ""
    plan: Plan
    state: JobState = "waiting"
    run: str = ""
    outcome: str = ""
    cause: str = ""
    project: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: by priority, then by submission."""
        return -self.priority, self.number


class PlanQueue:
    """Jobs of one site in a folder."""

    def __init__(self, data_dir: Path, site: str) -> None:
        self._data_dir, self.site, self.folder = data_dir, site, data_dir / QUEUES / site
        self._read: dict[Path, tuple[tuple[int, int], QueuedJob | None]] = {}

    def list_jobs(self) -> list[QueuedJob]:
        """Return all readable jobs: running ones, then waiting ones in their order, then ended ones."""
        jobs = [job for path in sorted(self.folder.glob(JOB_FILES)) if (job := self._read_again(path))]
        states = ("running", "waiting", "ended")
        return sorted(jobs, key=lambda job: (states.index(job.state), job.number if job.state == "ended" else job.rank))

    def _read_again(self, path: Path) -> QueuedJob | None:
        """Return the job in a file, from memory unless the file was replaced: the server looks every second."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        version = status.st_ino, status.st_mtime_ns
        before = self._read.get(path)
        if before is None or before[0] != version:
            self._read[path] = version, _read_job(path)
        return self._read[path][1]

    def is_served(self) -> bool:
        """Check whether a server is running for the site."""
        return is_held(self.folder, unknown=True)

    def submit(self, plan: Plan, priority: int = 0, project: str = "") -> QueuedJob:
        """Add a job; `project` is the working folder of its project.

        Raises:
            ConfigError: The priority is out of range, or a newer version wrote in the folder of runs.
            Unwritable: The disk is full.
        """
        require_priority(priority)
        with self._changing():
            numbers = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(JOB_FILES)]
            number = max(numbers, default=0) + 1
            job = QueuedJob(number=number, priority=priority, submitted=utc_stamp(), plan=plan, project=project)
            self._write(job)
        return job

    def begin(self, number: int, run: str) -> QueuedJob | None:
        """Mark a job as running; return None if it was removed or has ended meanwhile."""
        changes = {"state": "running", "run": run, "cause": ""}
        begun = self._change(number, lambda job: job if job.state == "ended" else replace(job, **changes))
        return begun if begun and begun.state == "running" else None

    def note_cause(self, number: int, cause: str) -> None:
        """Record why a job waits; empty for its turn."""
        self._change(number, lambda job: replace(job, cause=cause) if job.state == "waiting" else job)

    def end(self, number: int, outcome: str, cause: str = "") -> None:
        """Mark a job as ended, unless it was removed; forget the oldest ended ones."""
        self._change(number, lambda job: replace(job, state="ended", outcome=outcome, cause=cause))
        ended = [job.number for job in self.list_jobs() if job.state == "ended"]
        if surplus := ended[:-MOST_ENDED]:
            self.remove(surplus)

    def set_priority(self, number: int, priority: int | None) -> QueuedJob:
        """Move a waiting job.

        Args:
            priority: None for the first place.

        Raises:
            ConfigError: There is no such job, it has begun, or the priority is out of range.
        """

        def move(job: QueuedJob) -> QueuedJob:
            if job.state != "waiting":
                raise ConfigError(f"job {number} is {job.state}; only waiting jobs can be moved")
            others = [other.priority for other in self.list_jobs() if other.state == "waiting" and other != job]
            return replace(job, priority=max(others, default=-1) + 1 if priority is None else priority)

        require_priority(priority or 0)
        job = self._change(number, move)
        if job is None:
            raise _no_such_job(self.site, number, self.list_jobs())
        return job

    def remove(self, numbers: Iterable[int]) -> list[QueuedJob]:
        """Remove jobs and return them; a server interrupts the run of a removed job.

        Raises:
            ConfigError: One of them does not exist; none is removed.
        """
        with self._changing():
            jobs = []
            for number in dict.fromkeys(numbers):
                job = _read_job(path) if (path := _job_path(self.folder, number)).exists() else None
                if job is None:
                    raise _no_such_job(self.site, number, self.list_jobs())
                jobs.append(job)
            for job in jobs:
                _job_path(self.folder, job.number).unlink()
            sync(self.folder)
        return jobs

    @contextmanager
    def serving(self) -> Iterator[FolderLock]:
        """Be the server of the site while the block lasts.

        Raises:
            SiteBusy: Another server is at work; the message names its runs.
        """
        self._make_folder()
        lock = FolderLock(self.folder)
        try:
            lock.take()
        except ConfigError as error:
            if not self.is_served():
                raise
            raise SiteBusy(_describe_server(self._data_dir, self.site)) from error
        try:
            yield lock
        finally:
            lock.release()

    def _make_folder(self) -> None:
        check_data_folder(self._data_dir)
        with explain_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _change(self, number: int, change: Callable[[QueuedJob], QueuedJob]) -> QueuedJob | None:
        """Replace a job; return the new one, None if there is no such job."""
        with self._changing():
            path = _job_path(self.folder, number)
            job = _read_job(path) if path.exists() else None
            if job is None:
                return None
            self._write(changed := change(job))
            return changed

    def _write(self, job: QueuedJob) -> None:
        replace_file(
            _job_path(self.folder, job.number), msgspec.json.format(msgspec.json.encode(job)) + b"\n", mode=0o600
        )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Exclude other processes that change the queue."""
        self._make_folder()
        with explain_disk_errors(self.folder):
            descriptor = os.open(self.folder / CHANGE_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for milliseconds
            claim_data_folder(self._data_dir)
            yield
        finally:
            os.close(descriptor)


def _job_path(folder: Path, number: int) -> Path:
    return folder / f"job-{number:0{DIGITS}}.json"


def _describe_server(data_dir: Path, site: str) -> str:
    """Return the refusal of a second server, with the runs of the first."""
    folders = folders_of_runs(data_dir)
    runs = [folder.name for folder in folders if is_held(folder) and not is_local(folder)]
    doing = f" on run {', '.join(runs)}" if runs else ""
    return (
        f"another server is at work at site {site!r}{doing}; queue the plan with `edge-server submit PLAN`, "
        "or stop that server"
    )


def _no_such_job(site: str, number: int, jobs: Sequence[QueuedJob]) -> ConfigError:
    numbers = ", ".join(str(job.number) for job in jobs) or "none"
    return ConfigError(f"the queue of site {site!r} has no job {number}; its jobs: {numbers}")


def require_priority(priority: int) -> None:
    """Refuse a priority out of range.

    Raises:
        ConfigError: It is.
    """
    if abs(priority) > MOST_PRIORITY:
        raise ConfigError(f"priority {priority}: give a number from {-MOST_PRIORITY} to {MOST_PRIORITY}")


def _read_job(path: Path) -> QueuedJob | None:
    """Return the job in a file; None if it was removed meanwhile, or is not readable, which is logged."""
    try:
        table = msgspec.json.decode(path.read_bytes())
        plan = convert_plan(table["plan"], path, lambda _: True)
        return msgspec.convert({**table, "plan": plan}, QueuedJob)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ConfigError, KeyError, TypeError, ValueError) as error:
        log.warning("%s is not readable and is skipped: %s; remove it, and submit the plan again", path, error)
        return None


def runs_of_jobs(jobs: Sequence[QueuedJob]) -> frozenset[str]:
    """Return the names of the runs that jobs have or had."""
    return frozenset(job.run for job in jobs if job.run)

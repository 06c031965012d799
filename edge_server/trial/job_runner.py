"""Run the plans of a site's queue, at once where they share no device."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from edge_server.fleet.membership import Members, Membership
from edge_server.journal.disk import RETRY_S, retry_write
from edge_server.journal.plan_queue import PlanQueue, QueuedJob
from edge_server.journal.records import AnyRecord, RunClosed
from edge_server.journal.runs import make_run_name
from edge_server.plan.plan import Plan
from edge_server.plan.project import open_project
from edge_server.plan.server_config import ServerConfig
from edge_server.trial.live import LiveSite, run_at_site
from edge_server.trial.peers import members_of
from edge_server.trial.wait_for_devices import require_enough
from shared.errors import ConfigError, FieldFleetError
from shared.projects.working_folder import FILE
from shared.runtime.executor import in_thread

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks at the queue for new and removed jobs."""
OVERTAKEN = "; jobs behind it may begin"
"""Addition to the cause of a job that no longer holds its devices."""
FAILED = "failed"
"""Outcome of a job whose run could not be brought to its end."""

Report: TypeAlias = Callable[[str, Sequence[AnyRecord]], bool]
"""Called with name and records of each run; returns whether the run has completed its plan."""


@dataclass(frozen=True)
class ConfiguredRun:
    """Run of the plan that the server's file names."""

    plan: Plan
    name: str


@dataclass
class JobRunner:
    """Starts the runs of a site: that of the server's own plan, and those of its queue.

    Attributes:
        waits: Whether to wait for further jobs once the queue is empty.
        report: Receives the records of each run that has ended.
        is_complete: Whether every run so far has completed its plan.
    """

    site: LiveSite
    queue: PlanQueue
    report: Report
    waits: bool = False
    is_complete: bool = True
    _running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _devices: dict[int, Members] = field(default_factory=dict)
    _waiting_since: dict[int, float] = field(default_factory=dict)

    async def run(self, configured: ConfiguredRun | None) -> None:
        """Run until the own plan has ended and the queue is empty, or for ever if `waits`.

        Raises:
            FieldFleetError: The own plan could not be run; the jobs of the queue were.
        """
        await self._await_updates(configured)
        configured_members = [exclusive_members(self.site.config, configured.plan)] if configured else []
        configured_task = asyncio.create_task(self._run_configured(configured), name="own plan") if configured else None
        problem: BaseException | None = None
        try:
            while True:
                if configured_task and configured_task.done():
                    problem = configured_task.exception()
                    configured_task, configured_members = None, []
                    self._raise_unless_served(problem)
                began = set(self._running)  # before the look: what ends meanwhile must not begin again
                jobs = await in_thread(self.queue.list_jobs)
                self._interrupt_removed(jobs)
                await self._begin_due([job for job in jobs if job.number not in began], configured_members)
                tasks = [*self._running.values(), *([configured_task] if configured_task else [])]
                if not tasks and not self.waits and all(job.state == "ended" for job in jobs):
                    break
                await _wait_for_any(tasks)
        finally:
            tasks = [*self._running.values(), *([configured_task] if configured_task else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if problem:
            raise problem

    async def _await_updates(self, configured: ConfiguredRun | None) -> None:
        """Keep the hub from settling updates of runs that are about to be resumed: devices offer these again."""
        jobs = await in_thread(self.queue.list_jobs)
        self.site.server.rounds.runs.update(job.run for job in jobs if job.state == "running")
        if configured:
            self.site.server.rounds.runs.add(configured.name)

    def _raise_unless_served(self, problem: BaseException | None) -> None:
        """Raise the error of the own plan at once unless there are jobs to run, or it is not an expected one."""
        if problem is None:
            return
        if not isinstance(problem, FieldFleetError) or not (self.waits or self._running):
            raise problem
        log.error("the plan of the server's file could not be run: %s", problem)
        self.is_complete = False

    async def _run_configured(self, configured: ConfiguredRun) -> None:
        records = await run_at_site(self.site, configured.plan, configured.name)
        self.is_complete &= self.report(configured.name, records)

    def _interrupt_removed(self, jobs: Iterable[QueuedJob]) -> None:
        """Interrupt the runs of jobs that were removed from the queue."""
        present = {job.number for job in jobs}
        for number, task in self._running.items():
            if number not in present and not task.cancelling():
                log.info("job %d was removed: its run is interrupted", number)
                task.cancel()

    async def _begin_due(self, jobs: Iterable[QueuedJob], configured_members: Iterable[Members]) -> None:
        """Begin the jobs that may begin, and resume those of an earlier server."""
        candidates = [job for job in jobs if job.state != "ended"]
        members = [exclusive_members(self.site.config, job.plan) for job in candidates]
        missing = [self._describe_missing(job) for job in candidates]
        passable = [bool(cause) and self._has_waited(job) for job, cause in zip(candidates, missing, strict=True)]
        due = choose_due(members, [*configured_members, *self._devices.values()], passable)
        expected = list[Members]()
        for job, own_members, may_begin, cause in zip(candidates, members, due, missing, strict=True):
            if may_begin and not cause:
                await self._begin(job, own_members)
                continue
            expected.append(own_members)
            if may_begin:
                self._waiting_since.setdefault(job.number, asyncio.get_running_loop().time())
            if not cause:
                self._waiting_since.pop(job.number, None)
            await self._note_cause(job, cause + OVERTAKEN * (bool(cause) and self._has_waited(job)))
        self.site.expect(expected)

    def _describe_missing(self, job: QueuedJob) -> str:
        """Describe how many devices a new job lacks; empty if it may begin, or would fail however many there are."""
        plan, least = job.plan, job.plan.cohort.min_devices
        try:
            membership = Membership(members_of(self.site.config, plan))
            require_enough(plan, membership)
        except ConfigError:
            return ""
        online = membership.list_online(self.site.server.fleet)
        return "" if job.run or plan.sites or len(online) >= least else f"{len(online)} of {least} devices are online"

    def _has_waited(self, job: QueuedJob) -> bool:
        """Return true if a job has waited for its devices for `cohort.wait_s` in vain."""
        since = self._waiting_since.get(job.number)
        return since is not None and asyncio.get_running_loop().time() - since >= job.plan.cohort.wait_s

    async def _note_cause(self, job: QueuedJob, cause: str) -> None:
        if job.state == "waiting" and job.cause != cause:
            if cause:
                log.info("job %d waits: %s", job.number, cause)
            await retry_write(in_thread, RETRY_S, self.queue.note_cause, job.number, cause)

    async def _begin(self, job: QueuedJob, members: Members) -> None:
        name = job.run or make_run_name(job.plan)
        begun = await retry_write(in_thread, RETRY_S, self.queue.begin, job.number, name)
        if begun is None:
            return
        log.info("job %d: plan %r %s run %s", job.number, job.plan.name, "resumes" if job.run else "begins", name)
        self._waiting_since.pop(job.number, None)
        self._devices[job.number] = members
        self._running[job.number] = task = asyncio.create_task(self._run_job(begun), name=f"job {job.number}")
        task.add_done_callback(lambda _: (self._running.pop(job.number), self._devices.pop(job.number)))

    async def _run_job(self, job: QueuedJob) -> None:
        """Run a job to its end; its failure is recorded in the queue and stops no other job."""
        try:
            open_project(job.plan, Path(job.project) / FILE)
            records = await run_at_site(self.site, job.plan, job.run)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the next job must begin whatever happened to this one
            cause = str(error) if isinstance(error, FieldFleetError) else f"{type(error).__name__}: {error}"
            traceback = None if isinstance(error, FieldFleetError | OSError) else error
            log.error("job %d, run %s failed: %s", job.number, job.run, cause, exc_info=traceback)  # noqa: TRY400
            self.is_complete = False
            await self._end(job, FAILED, cause)
            return
        end = next(record for record in records if isinstance(record, RunClosed))
        self.is_complete &= self.report(job.run, records)
        await self._end(job, end.outcome, end.cause)

    async def _end(self, job: QueuedJob, outcome: str, cause: str) -> None:
        await retry_write(in_thread, RETRY_S, self.queue.end, job.number, outcome, cause)


async def _wait_for_any(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for the end of a task, but not longer than until the next look at the queue."""
    if tasks:
        await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(LOOK_S)


def exclusive_members(config: ServerConfig, plan: Plan) -> Members:
    """Return the devices that a plan's run takes; None for all, as with several sites, whose servers know one run."""
    if plan.sites:
        return None
    try:
        return members_of(config, plan)
    except ConfigError:  # reported when its run begins
        return None


def expected_devices(
    config: ServerConfig, configured: ConfiguredRun | None, jobs: Iterable[QueuedJob]
) -> list[Members]:
    """Return the devices of each run that may begin."""
    plans = [*([configured.plan] if configured else []), *(job.plan for job in jobs if job.state != "ended")]
    return [exclusive_members(config, plan) for plan in plans]


def choose_due(queued: Sequence[Members], busy: Iterable[Members], passable: Sequence[bool] = ()) -> list[bool]:
    """Return for each job whether it may begin: it shares no device with a running job or one before it.

    Args:
        queued: Devices of each job, in the order of the queue.
        busy: Devices of the running jobs.
        passable: Jobs that others may overtake, since their devices have been offline for long; empty for none.
    """
    before, due = list(busy), []
    for members, may_be_passed in zip(queued, passable or [False] * len(queued), strict=True):
        due.append(not any(share_devices(members, others) for others in before))
        if not may_be_passed:
            before.append(members)
    return due


def share_devices(first: Members, second: Members) -> bool:
    """Return true if two runs may need the same device; None stands for all devices."""
    return first is None or second is None or not first.isdisjoint(second)

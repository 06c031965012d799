"""Life cycle of the agent: receive a task, fetch, train, store.

A task follows a transition table. Updates are delivered concurrently and are not part of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from device_agent.agent.job_settings import JobSettings
from device_agent.exchange.download import BASES, GRAPHS, Download
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.reports import Reporter
from device_agent.exchange.split_session import SplitSessions
from device_agent.exchange.upload import Delivery
from device_agent.trainer.interface import Job, Trainer
from shared.errors import SessionLost, TaskFailed, TrainerDied, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.messages import Ack, Task, Update
from shared.protocol.topics import is_name, topic
from shared.runtime import backports
from shared.runtime.clock import Clock
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import background
from shared.runtime.phases import log_phase
from shared.transfer import frames
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__package__)  # chaos reads lines of that name

MAX_ATTEMPTS = 3
"""Trainings of a task whose trainer dies."""
MAX_IDLE_WAIT_S, IDLE_POLL_S = 10.0, 0.2

Phase: TypeAlias = Literal["idle", "fetching", "training"]
Event: TypeAlias = Literal["task", "fetched", "committed", "failed", "superseded"]

TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    "idle": {"task": "fetching"},
    "fetching": {"fetched": "training", "committed": "idle", "failed": "idle", "superseded": "idle"},
    "training": {"committed": "idle", "failed": "idle", "superseded": "idle"},
}


def follow(phase: Phase, event: Event) -> Phase:
    """Return the phase after an event.

    Raises:
        ValueError: The table has no such event in this phase: a programming error.
    """
    following = TRANSITIONS[phase].get(event)
    if following is None:
        raise ValueError(f"event {event!r} while {phase}")
    log_phase(log, following)
    return following


@dataclass
class Agent:
    """Agent of one device; its collaborators are passed in.

    Attributes:
        busy: Context that signals a running task to the updater.
    """

    device: str
    site: str
    transport: Transport
    clock: Clock
    trainer: Trainer
    outbox: Outbox
    download: Download
    delivery: Delivery
    splitting: SplitSessions
    settings: JobSettings
    reporter: Reporter
    busy: Callable[[], AbstractContextManager[None]] = nullcontext
    phase: Phase = "idle"
    _task_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _newest: Task | None = None
    _is_pending: bool = False

    async def run(self) -> None:
        """Serve tasks until cancelled."""
        async with self.transport.subscribe(topic(self.site, self.device, "task")) as tasks:
            await self.download.worker(self.outbox.check)
            self.delivery.on_void = self._redo_newest
            async with background(self._receive_tasks(tasks), self.delivery.run(), self.reporter.run()):
                await self._work()

    async def _receive_tasks(self, tasks: Inbox) -> None:
        """Retain the latest task: the broker preserves order, and a server may repeat a round."""
        async for _, data in tasks:
            try:
                task = _decode_task(data, self.device)
            except WireError as error:
                log.warning("dropped: %s", error)
                continue
            if self._newest and not self._newest_differs(task):
                self.download.request_again()
            self._newest = task
            self.delivery.allow(task.assignment)
            # Read now: the acknowledgement of its update may follow at once.
            self._is_pending = self.outbox.has(task.run, task.round, task.params.digest)
            self._task_changed.set()

    def _redo_newest(self, ack: Ack) -> None:
        """Train the newest task again if its update was voided."""
        task = self._newest
        if task and (task.run, task.round, task.params.digest) == (ack.run, ack.round, ack.start):
            self._is_pending = False
            self._task_changed.set()

    async def _work(self) -> None:
        """Process the newest task; drop it when a newer one arrives."""
        while True:
            await self._task_changed.wait()
            self._task_changed.clear()
            task = self._newest
            assert task is not None
            serving = asyncio.create_task(self._serve(task), name="serve")
            try:
                while not serving.done():
                    await self._wait_for_task_or(serving)
                    if self._task_changed.is_set() and self._newest_differs(task):
                        serving.cancel()
                        await asyncio.wait({serving})
                    elif not serving.done():
                        self._task_changed.clear()
                if not serving.cancelled():
                    serving.result()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    async def _wait_for_task_or(self, serving: asyncio.Task[None]) -> None:
        news = asyncio.create_task(self._task_changed.wait(), name="news")
        try:
            await asyncio.wait({news, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    def _newest_differs(self, task: Task) -> bool:
        newest = self._newest
        return newest is not None and (newest.run, newest.round, newest.params) != (task.run, task.round, task.params)

    async def _serve(self, task: Task) -> None:
        """Process one task to its end; the server is informed of any outcome."""
        event: Event = "superseded"
        self._follow("task")
        try:
            if task.measure_s:
                await self._wait_for_idle_watts()
            with self.busy(), self._mark_busy(full_rate=False):
                # An earlier agent process may have left a trainer working on this very task.
                await self.trainer.ready(task)
                if not self._is_pending and not self.outbox.has(task.run, task.round, task.params.digest):
                    await self._train(task)
            event = "committed"
        except (TaskFailed, WireError, OSError) as error:
            event = await self._report_failure(task, error)
        finally:
            self._follow(event)
        log_phase(log, "delivering", run=task.run, round=task.round)
        self.delivery.wake.set()

    async def _wait_for_idle_watts(self) -> None:
        """Wait until the board's idle power is measured, if possible: a step is charged the power beyond it."""
        power = self.reporter.power
        with suppress(TimeoutError):
            async with backports.timeout(MAX_IDLE_WAIT_S):
                while power and power.idle_w() is None:  # noqa: ASYNC110 - a thread measures them
                    await asyncio.sleep(IDLE_POLL_S)

    async def _report_failure(self, task: Task, error: Exception) -> Event:
        """Report a failure and return the task's event; without a disk the report is sent once, unsaved."""
        if self.outbox.has(task.run, task.round, task.params.digest):
            log.warning("round %d: its update is stored, but %s", task.round, error)
            return "committed"
        log.warning("round %d failed: %s", task.round, error)
        failure = Update(
            run=task.run,
            round=task.round,
            device=self.device,
            params=None,
            start=task.params.digest,
            failure=str(error)[:500],
        )
        try:
            self.outbox.add(failure)
        except OSError as refusal:
            log.warning("the failure report cannot be stored: %s", refusal)
            with suppress(Unreachable):
                await self.transport.publish(topic(self.site, self.device, "update"), wire.encode(failure))
        return "failed"

    async def _train(self, task: Task) -> None:
        for transfer in filter(None, (task.params, task.assignment.graph, task.base)):
            frames.check_transfer(
                transfer, limit=self.download.policy.limit, remedy="raise link.max_payload_mb of this agent"
            )
        self.outbox.reserve(task.params.size if task.train else 0)
        power, started = self.reporter.power, self.clock()
        idle_w = power.idle_w() if power else None
        with explain_disk_errors(self.download.folder), self._mark_busy(full_rate=True):
            graph, also = await self.download.fetch_stored(task.assignment.graph, GRAPHS)
            base, base_bytes = await self.download.fetch_stored(task.base, BASES, shared=task.shared)
            params, received = await self.download.fetch(task)
        fetched = self.clock()
        self._follow("fetched")
        cost = Cost(download_s=fetched - started, bytes_down=received + also + base_bytes, idle_w=idle_w)
        cost = self.reporter.add_energy(cost, "download_joules", started, fetched)
        job = self.settings.make_job(msgspec.structs.replace(task, payload=b""), params, graph, cost, base)
        self.outbox.commit(await self._train_with_retries(job))
        log.info("trained run=%s round=%d seconds=%.3f", task.run, task.round, self.clock() - fetched)

    async def _train_with_retries(self, job: Job) -> Path:
        """Run a job, again if its trainer dies; return its draft."""
        task = job.task
        for attempt in range(1, MAX_ATTEMPTS + 1):
            draft = self.outbox.draft(task.run, task.round)  # empties the draft of a trainer that died
            try:
                await self._run_job(msgspec.structs.replace(job, draft=str(draft)))
            except TrainerDied as error:
                if self.outbox.has(task.run, task.round, task.params.digest):
                    break  # it died after it committed the update
                if attempt == MAX_ATTEMPTS:
                    raise
                log.warning("round %d: %s; attempt %d of %d follows", task.round, error, attempt + 1, MAX_ATTEMPTS)
            else:
                break
        return draft

    async def _run_job(self, job: Job) -> None:
        """Run a job; restart a split session that the server has lost."""
        while job.task.assignment.steps:
            async with self.splitting.session(job.task) as exchange:
                try:
                    return await self.trainer(job, exchange)
                except SessionLost as error:
                    log.warning("round %d: %s", job.task.round, error)
            self.outbox.draft(job.task.run, job.task.round)
        return await self.trainer(job)

    def _follow(self, event: Event) -> None:
        self.phase = follow(self.phase, event)

    def _mark_busy(self, *, full_rate: bool) -> AbstractContextManager[None]:
        """Mark the board as busy in the power log while the block runs."""
        return self.reporter.power.busy(full_rate=full_rate) if self.reporter.power else nullcontext()


def _decode_task(data: bytes, device: str) -> Task:
    task = wire.decode_as(Task, data)
    if task.device != device or not is_name(task.run):
        raise WireError(f"task of run {task.run!r} for {task.device!r}", reason="unknown-device")
    return task

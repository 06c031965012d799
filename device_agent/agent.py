"""The device's whole life: report, wait for a task, fetch, train, hand the update to the outbox, again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from device_agent.delivery import Delivery
from device_agent.download import Download
from device_agent.lifecycle import Event, Phase, follow
from device_agent.outbox import Outbox
from shared import wire
from shared.background import background
from shared.clock import Clock
from shared.data.spec import Data
from shared.errors import TaskFailed, Unreachable, WireError
from shared.messages import Cost, Report, Task, Update
from shared.topics import is_name, topic
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer needs to do a task; paths, so that no tensor passes through the agent.

    Attributes:
        task: The task.
        params: File that holds the payload to start from.
        state: File that holds the device's state of this run, if there is one.
        draft: Folder of the outbox to write the update into.
        data: This device's examples.
        frame_bytes: Size of the frames the update will travel in.
        cost: What the task cost before training.
    """

    task: Task
    params: str
    state: str
    draft: str
    data: Data
    frame_bytes: int
    cost: Cost


class Trainer(Protocol):
    """Do a job: write its update into the draft."""

    def __call__(self, job: Job) -> Awaitable[None]:
        """Train.

        Raises:
            TaskFailed: The task could not be done; the message is the cause.
        """
        ...

    async def ready(self) -> None:
        """Return when no earlier process of this device still trains; begin to start one meanwhile."""
        ...


@dataclass
class Agent:
    """One device. Everything it touches is handed in."""

    device: str
    site: str
    transport: Transport
    clock: Clock
    trainer: Trainer
    outbox: Outbox
    download: Download
    delivery: Delivery
    data: Data
    states: Path
    frame_bytes: int
    report_s: float
    sense: Callable[[], Report]
    phase: Phase = "idle"
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _newest: Task | None = None

    async def run(self) -> None:
        """Live until cancelled."""
        async with (
            self.transport.subscribe(topic(self.site, self.device, "task")) as tasks,
            background(self._listen(tasks), self.delivery.run(), self._report()),
        ):
            await self._work()

    async def _listen(self, tasks: Inbox) -> None:
        """Keep the task that came last: the broker keeps their order, and a server may have to repeat a round."""
        async for _, data in tasks:
            try:
                task = _own_task(data, self.device)
            except WireError as error:
                log.warning("dropped: %s", error)
                continue
            self._newest = task
            self._news.set()

    async def _work(self) -> None:
        """Do the newest task; drop it when a newer one comes."""
        while True:
            await self._news.wait()
            self._news.clear()
            task = self._newest
            assert task is not None
            serving = asyncio.create_task(self._serve(task), name="serve")
            try:
                while not serving.done():
                    await self._news_or(serving)
                    if self._news.is_set() and self._newest_differs(task):
                        serving.cancel()
                        await asyncio.wait({serving})
                    elif not serving.done():
                        self._news.clear()
                if not serving.cancelled():
                    serving.result()
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

    async def _news_or(self, serving: asyncio.Task[None]) -> None:
        news = asyncio.create_task(self._news.wait(), name="news")
        try:
            await asyncio.wait({news, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    def _newest_differs(self, task: Task) -> bool:
        newest = self._newest
        return newest is not None and (newest.run, newest.round, newest.params) != (task.run, task.round, task.params)

    async def _serve(self, task: Task) -> None:
        """Do one task to its end; whatever the end is, the server hears of it."""
        event: Event = "superseded"
        self._follow("task")
        try:
            await self.trainer.ready()
            if not self.outbox.has(task.run, task.round):
                await self._train(task)
            event = "committed"
        except (TaskFailed, WireError, OSError) as error:
            log.warning("round %d failed: %s", task.round, error)
            failure = Update(run=task.run, round=task.round, device=self.device, params=None, failure=str(error)[:500])
            self.outbox.add(failure)
            event = "failed"
        finally:
            self._follow(event)
        self.delivery.wake.set()

    async def _train(self, task: Task) -> None:
        started = self.clock()
        params, received = await self.download.fetch(task)
        fetched = self.clock()
        self._follow("fetched")
        draft = self.outbox.draft(task.run, task.round)
        job = Job(
            task=task,
            params=str(params),
            state=str(self.states / task.run),
            draft=str(draft),
            data=self.data,
            frame_bytes=self.frame_bytes,
            cost=Cost(download_s=fetched - started, bytes_down=received),
        )
        await self.trainer(job)
        self.outbox.commit(draft)
        log.info("trained run=%s round=%d seconds=%.3f", task.run, task.round, self.clock() - fetched)

    def _follow(self, event: Event) -> None:
        self.phase = follow(self.phase, event)

    async def _report(self) -> None:
        """Say what the board measures, now and from time to time."""
        while True:
            pause_s = self.report_s
            try:
                report = wire.encode(self.sense())
                await self.transport.publish(topic(self.site, self.device, "report"), report, retain=True)
            except Unreachable as error:
                log.debug("no report: %s", error)
                pause_s = min(1.0, self.report_s)
            await asyncio.sleep(pause_s)


def _own_task(data: bytes, device: str) -> Task:
    task = wire.decode_as(Task, data)
    if task.device != device or not is_name(task.run):
        raise WireError(f"task of run {task.run!r} for {task.device!r}", reason="unknown-device")
    return task

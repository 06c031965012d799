"""State machine of a release candidate: gates, loading, trial, commit or rollback.

Every step may be repeated, since the process may be killed in it or the disk may refuse a write. A record is durable
before it is announced, and before any action that only the record explains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from device_agent.inference.served_model import ServedModel, Serving
from device_agent.inference.store import BoardStore
from device_agent.inference.trial import LOOK_S, Trial
from shared.errors import ConfigError, CorruptFile
from shared.protocol.update import PENDING, Event, Phase, UpdateRecord, advance, count_start
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import Worker, in_thread, run_uninterrupted

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Pause before a step is repeated after a disk error."""
MOST_STARTS = 3
"""Agent starts after which the candidate is blamed for the crashes."""


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Result of the gates for a candidate; also a message of the gate process.

    Attributes:
        reason: Failed gate and cause, as `GATE: CAUSE`; empty if all gates passed.
        lasting: Whether a second try would fail too.
        p95_s: 95th percentile of the seconds for one example; 0 if not measured.
        old_p95_s: The same of the committed version, measured in alternation.
        accuracy: Fraction correct on the device's held-out examples; None if there are none or they cannot be read.
        old_accuracy: The committed version's accuracy on the same examples.
        metric: Metric by which another task than a classification is compared; empty for the accuracy.
        value, old_value: This metric of the two versions.
        examples: Number of held-out examples.
        memory_bytes: Growth of the process while it loaded and ran the candidate.
    """

    reason: str = ""
    lasting: bool = True
    p95_s: float = 0.0
    old_p95_s: float = 0.0
    accuracy: float | None = None
    old_accuracy: float | None = None
    metric: str = ""
    value: float | None = None
    old_value: float | None = None
    examples: int = 0
    memory_bytes: int = 0


Gates: TypeAlias = Callable[[UpdateRecord], Awaitable[GateVerdict]]
"""Runs the gates on a record's candidate, in a separate process."""
Announce: TypeAlias = Callable[[UpdateRecord], None]
"""Called with each new record once it is durable."""


@dataclass(frozen=True)
class SwapContext:
    """Services that the swaps of all models share.

    Attributes:
        gates: Runs the gates on a candidate.
        announce: Receives each change of a record.
        now: Returns seconds since the epoch.
        look_s: Seconds between two checks of a trial.
        has_folder: Returns, for a name and version, whether an operator's folder holds another version as a fallback.
    """

    store: BoardStore
    serving: Serving
    gates: Gates
    announce: Announce
    now: Callable[[], float] = utc_seconds
    worker: Worker = in_thread
    look_s: float = LOOK_S
    has_folder: Callable[[str, int], bool] = lambda _name, _version: False


@dataclass
class Candidate:
    """Update record of a model, and the steps that advance it."""

    name: str
    context: SwapContext
    record: UpdateRecord = field(init=False)
    _model: ServedModel = field(init=False)
    _trial: Trial = field(init=False)
    _failure: tuple[Event, str] | None = None

    def __post_init__(self) -> None:
        self._model = ServedModel(self.name, self.context.serving)
        self._trial = Trial(self._model, self.context.look_s)
        try:
            self.record = self.context.store.record(self.name)
        except (CorruptFile, ConfigError) as error:
            log.error("model %s: %s; starting over with the next offer", self.name, error)  # noqa: TRY400
            self.record = UpdateRecord(name=self.name)

    async def save(self, record: UpdateRecord, manifest: bytes | None = None) -> None:
        """Make a record durable, then announce it.

        Args:
            manifest: Manifest of a new candidate.

        Raises:
            Unwritable: The disk refuses the write; nothing has changed.
        """
        await self.context.worker(self.context.store.write, record, manifest)
        changed, self.record = record.phase != self.record.phase, record
        if changed:
            log.info("model %s: version %d is %s %s", self.name, record.candidate, record.phase, record.reason)
            self.context.announce(record)

    async def advance(self, event: Event, reason: str = "", *, lasting: bool = True) -> None:
        """Apply an event to the record, see `shared.protocol.update.advance`.

        Args:
            reason: Cause of a refusal or rollback.
            lasting: Whether a second try would fail too.

        Raises:
            Unwritable: The disk refuses the write; nothing has changed.
        """
        await self.save(advance(self.record, event, self.context.now(), reason, lasting=lasting))

    async def resume(self) -> None:
        """Continue after an agent start; give up a candidate that has seen too many starts."""
        await self.context.worker(self.context.store.tidy)
        if self.record.phase == "trial" or self.record.phase in PENDING - {"offered"}:
            await _retry_on_disk_error(self.name, self._count_start)

    async def _count_start(self) -> None:
        await self.save(count_start(self.record))
        if self.record.starts <= MOST_STARTS:
            return
        reason = f"crashes: the agent was started {self.record.starts} times during its trial"
        if self.record.phase == "trial":
            await run_uninterrupted(self.roll_back("worse", reason))
        else:
            await run_uninterrupted(self._refuse(reason))

    async def work(self) -> None:
        """Run steps until the record needs an external event."""
        steps: dict[Phase, Callable[[], Awaitable[None]]] = {
            "fetched": self._try_out,
            "verified": self._load_candidate,
            "staged": lambda: run_uninterrupted(self._switch_to_candidate()),
            "trial": self._watch,
        }
        while step := steps.get(self.record.phase):
            await _retry_on_disk_error(self.name, step)

    async def _try_out(self) -> None:
        verdict = await self.context.gates(self.record)
        if verdict.reason:
            await run_uninterrupted(self._refuse(verdict.reason, lasting=verdict.lasting))
        else:
            await run_uninterrupted(self.advance("verified"))

    async def _refuse(self, reason: str, *, lasting: bool = True) -> None:
        await self.advance("refused", reason, lasting=lasting)
        await self.context.worker(self.context.store.tidy)

    async def _load_candidate(self) -> None:
        if reason := await self._model.load(self.record.candidate):
            await run_uninterrupted(self._refuse(f"load: {reason}"))
        else:
            await run_uninterrupted(self.advance("staged"))

    async def _switch_to_candidate(self) -> None:
        """Record the trial, then switch: a process restarted in between serves the candidate too."""
        await self._trial.begin(self.record)
        await self.advance("switched")
        if reason := await self._model.activate(self.record.candidate):
            self._failure = "worse", f"switch: {reason}"

    async def _watch(self) -> None:
        if not self._failure and (reason := await self._trial.watch(self.record)):
            self._failure = "worse", reason
        if self._failure:
            await run_uninterrupted(self.roll_back(*self._failure))
        else:
            await run_uninterrupted(self._commit())

    async def _commit(self) -> None:
        old = self.record.committed
        await self.advance("passed")
        self._trial.reset()
        if old != self.record.committed:
            await self._model.unload(old)  # 0 if there was none: unloads the folder's version
        await self.context.worker(self.context.store.tidy)

    async def roll_back(self, event: Event, reason: str) -> None:
        """End the trial: activate the old version even if the record cannot be written, then report that error.

        Args:
            event: `worse` (the trial failed) or `back` (taken back on request).

        Raises:
            Unwritable: The disk refused the record; call again.
        """
        self._failure, record = (event, reason), self.record
        refusal: OSError | None = None
        try:
            await self.advance(event, reason)
        except OSError as error:
            refusal = error
        if record.committed and (problem := await self._model.activate(record.committed)):
            log.error("model %s: version %d cannot be activated again: %s", self.name, record.committed, problem)
        if refusal:
            raise refusal
        self._failure = None
        self._trial.reset()
        await self._model.unload(record.candidate)
        await self.context.worker(self.context.store.tidy)

    async def return_to_previous(self) -> None:
        """Drop the committed version; the previous version or the operator's folder answers instead.

        Raises:
            ServingRefused: The previous version cannot be loaded; nothing has changed.
            Unwritable: The disk refuses the write; nothing has changed.
        """
        committed, previous = self.record.committed, self.record.previous
        if previous:
            await self.context.serving.load(self.name, previous)
        await self.advance("back", "taken back")
        if previous and (problem := await self._model.activate(previous)):
            log.error("model %s: version %d cannot be activated: %s", self.name, previous, problem)
        await self._model.unload(committed)

    async def withdraw(self, reason: str) -> None:
        """Give up a candidate that was never active.

        Raises:
            Unwritable: The disk refuses the write; nothing has changed.
        """
        await self.advance("superseded", reason)
        await self._model.unload(self.record.candidate)


async def _retry_on_disk_error(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Repeat a step until the disk accepts its writes."""
    while True:
        try:
            return await step()
        except OSError as error:
            log.warning("model %s: %s; tried again in %.0f s", name, error, RETRY_S)
            await asyncio.sleep(RETRY_S)

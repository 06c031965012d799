"""What is done with the candidate of a name: the gates, its staging, its trial, and what comes of it.

Every step may be done again: the process that begins it may die of it, or a disk take nothing. A record is durable
before it is announced, and before anything happens that only it explains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from device_agent.inference.messages import Figures
from device_agent.inference.soak import judge
from device_agent.inference.store import BoardStore
from shared.errors import ConfigError, CorruptFile, ServingDied, ServingRefused
from shared.protocol.update import PENDING, Event, UpdateRecord, advance, count_start
from shared.runtime import backports
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import Worker, in_thread, run_uninterrupted

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks at how a new version does."""
RETRY_S = 30.0
"""After which a disk that took nothing is asked again."""
ASKED = 3
"""How often a process that dies meanwhile is asked for the same."""
MOST_STARTS = 3
"""Starts of an agent after which it is the candidate that is to blame for them."""


class Serving(Protocol):
    """What answers with models: the inference process, as the agent reaches it.

    A process that starts serves again what the one before it did. What is asked of none waits for one.
    """

    @property
    def starts(self) -> int:
        """How often a process was started by this agent."""

    async def load(self, name: str, version: int) -> None:
        """Load a version beside the one that answers; one that is loaded already may be loaded again.

        Raises:
            ServingRefused: It cannot be loaded; `ServingDied` where the process ended over it.
        """

    async def switch(self, name: str, version: int) -> None:
        """Have a loaded version answer from now on; requests under way are answered by the old one.

        Raises:
            ServingRefused: It is not loaded.
        """

    async def unload(self, name: str, version: int) -> None:
        """Part with a version, 0 for all that do not answer, after what it is computing; if none is there, so be it."""

    async def figures(self, name: str, version: int) -> Figures:
        """Return how a version does since it was loaded.

        Raises:
            ServingRefused: It is not loaded.
        """


class GateVerdict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the gates say of a candidate; also a message of their process.

    Attributes:
        reason: Gate and cause of the refusal; empty where it passed them all.
        lasting: Whether it would be refused again.
        p95_s: 95th percentile of its answers to one example; 0 where that was not measured.
        old_p95_s: The same of the committed version, in turns with it.
        accuracy: On the device's held-out examples; None where there are none, or nothing here reads them.
        old_accuracy: Of the committed version on the same ones.
        examples: How many these were.
        memory_bytes: By how much the process grew when it loaded the candidate and ran it.
    """

    reason: str = ""
    lasting: bool = True
    p95_s: float = 0.0
    old_p95_s: float = 0.0
    accuracy: float | None = None
    old_accuracy: float | None = None
    examples: int = 0
    memory_bytes: int = 0


Gates: TypeAlias = Callable[[UpdateRecord], Awaitable[GateVerdict]]
"""Tries a record's candidate out, in a process of its own."""
Announce: TypeAlias = Callable[[UpdateRecord], None]
"""Hears of each record after it is durable."""


@dataclass(frozen=True)
class Surroundings:
    """What the swap of every name works with.

    Attributes:
        gates: Try a candidate out.
        announce: Hears of every change.
        now: Calendar seconds.
        worker: Runs what would block.
        look_s: Seconds between two looks at a trial.
        has_folder: Tells of a name and a version whether an operator's folder has another version, which answers where
            nothing else does.
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
    """The candidate of a name, and its record.

    Attributes:
        around: What it works with.
        record: What the board is at.
    """

    name: str
    around: Surroundings
    record: UpdateRecord = field(init=False)
    _before: Figures | None = None
    _starts: int = 0
    _failing: tuple[Event, str] | None = None

    def __post_init__(self) -> None:
        """Read the record."""
        try:
            self.record = self.around.store.record(self.name)
        except (CorruptFile, ConfigError) as error:
            log.error("model %s: %s; it begins anew with the next offer", self.name, error)  # noqa: TRY400
            self.record = UpdateRecord(name=self.name)

    async def note(self, record: UpdateRecord, manifest: bytes | None = None) -> None:
        """Make a record durable, then announce it.

        Args:
            record: What the board is at from now on.
            manifest: Of its candidate, where that is new.

        Raises:
            Unwritable: The disk takes nothing more; nothing has changed.
        """
        await self.around.worker(self.around.store.write, record, manifest)
        changed, self.record = record.phase != self.record.phase, record
        if changed:
            log.info("model %s: version %d is %s %s", self.name, record.candidate, record.phase, record.reason)
            self.around.announce(record)

    async def advance(self, event: Event, reason: str = "", *, lasting: bool = True) -> None:
        """Take the record through the table, as `shared.protocol.update.advance`.

        Args:
            reason: Of a refusal, or of going back.
            lasting: Whether what failed would fail again.

        Raises:
            Unwritable: The disk takes nothing more; nothing has changed.
        """
        await self.note(advance(self.record, event, self.around.now(), reason, lasting=lasting))

    async def resume(self) -> None:
        """Begin after a start of the agent; a candidate that needed many of them is given up."""
        await self.around.worker(self.around.store.tidy)
        if self.record.phase == "trial" or self.record.phase in PENDING - {"offered"}:
            await self._patiently(self._count_start)

    async def _count_start(self) -> None:
        await self.note(count_start(self.record))
        if self.record.starts <= MOST_STARTS:
            return
        reason = f"crashes: the agent was started {self.record.starts} times while it was tried out"
        if self.record.phase == "trial":
            await run_uninterrupted(self.go_back("worse", reason))
        else:
            await run_uninterrupted(self._refuse(reason))

    async def work(self) -> None:
        """Take one step after the other, until there is nothing to do before something is asked."""
        steps = {"fetched": self._try_out, "verified": self._stage, "staged": self._begin, "trial": self._watch}
        while step := steps.get(self.record.phase):
            await self._patiently(step)

    async def _patiently(self, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step, again and again where a disk takes nothing."""
        while True:
            try:
                return await step()
            except OSError as error:
                log.warning("model %s: %s; tried again in %.0f s", self.name, error, RETRY_S)
                await asyncio.sleep(RETRY_S)

    async def _try_out(self) -> None:
        verdict = await self.around.gates(self.record)
        if verdict.reason:
            await run_uninterrupted(self._refuse(verdict.reason, lasting=verdict.lasting))
        else:
            await run_uninterrupted(self.advance("verified"))

    async def _refuse(self, reason: str, *, lasting: bool = True) -> None:
        await self.advance("refused", reason, lasting=lasting)
        await self.around.worker(self.around.store.tidy)

    async def _stage(self) -> None:
        if reason := await self._ask(self.around.serving.load, self.record.candidate):
            await run_uninterrupted(self._refuse(f"load: {reason}"))
        else:
            await run_uninterrupted(self.advance("staged"))

    async def _begin(self) -> None:
        await run_uninterrupted(self._begin_trial())

    async def _begin_trial(self) -> None:
        """Switch; a process that starts in the middle serves the candidate too, since the record says so."""
        self._before, self._starts = await self._figures(self.record.committed), self.around.serving.starts
        await self.advance("switched")
        if reason := await self.answer_with(self.record.candidate):
            self._failing = "worse", f"switch: {reason}"

    async def _figures(self, version: int) -> Figures:
        """Return how a version does; zeros of one that is not there."""
        if version:
            with suppress(ServingRefused):
                return await self.around.serving.figures(self.name, version)
        return Figures(self.name, version)

    async def answer_with(self, version: int) -> str:
        """Have a version answer; return why it does not, empty where it does."""
        serving = self.around.serving
        if not await self._ask(serving.switch, version):
            return ""
        return await self._ask(serving.load, version) or await self._ask(serving.switch, version)

    async def _ask(self, what: Callable[[str, int], Awaitable[None]], version: int) -> str:
        """Ask the process for something, again where it ends meanwhile; return why it refuses."""
        reason = ""
        for _ in range(ASKED):
            try:
                await what(self.name, version)
            except ServingDied as error:
                reason = str(error)
            except ServingRefused as error:
                return str(error)
            else:
                return ""
        return reason

    async def unload(self, version: int) -> None:
        """Part with a loaded version, unless there is no process that has it."""
        with suppress(ServingRefused):
            await self.around.serving.unload(self.name, version)

    async def _watch(self) -> None:
        self._failing = self._failing or await self._soak()
        if self._failing:
            await run_uninterrupted(self.go_back(*self._failing))
        else:
            await run_uninterrupted(self._commit())

    async def _soak(self) -> tuple[Event, str] | None:
        """Watch the trial; return why it must end, None where the candidate may stay."""
        if self._before is None:  # another process of ours began it
            self._before = await self._figures(self.record.committed)
            reason = await self.answer_with(self.record.candidate)
            self._starts = self.around.serving.starts  # now that there is one
            if reason:
                return "worse", f"switch: {reason}"
        terms = self.record.terms
        try:
            async with backports.timeout(terms.deadline_s):
                reason = await self._look_on(self._before)
        except TimeoutError:
            reason = f"deadline: its trial did not end within {terms.deadline_s:.0f} s"
        except ServingRefused as error:
            reason = f"crashes: {error}"
        return ("worse", reason) if reason else None

    async def _look_on(self, before: Figures) -> str:
        """Look at the candidate until its soak is over; return what it does worse."""
        record, serving, loop = self.record, self.around.serving, asyncio.get_running_loop()
        ends = loop.time() + record.terms.soak_s
        while True:
            over = ends - loop.time() <= self.around.look_s
            await asyncio.sleep(max(0.0, ends - loop.time()) if over else self.around.look_s)
            now = await serving.figures(self.name, record.candidate)
            reason = judge(before, now, serving.starts - self._starts, record.terms)
            if reason or over:
                return reason

    async def _commit(self) -> None:
        old = self.record.committed
        await self.advance("passed")
        self._before = None
        if old != self.record.committed:
            await self.unload(old)  # 0 where there was none: what a folder brought is unloaded then
        await self.around.worker(self.around.store.tidy)

    async def go_back(self, event: Event, reason: str) -> None:
        """End the trial: the old version answers again, whatever the disk says; then it is noted.

        Args:
            event: `worse` or `back`.

        Raises:
            Unwritable: The disk takes nothing more: to be called again.
        """
        self._failing, record = (event, reason), self.record
        refusal: OSError | None = None
        try:
            await self.advance(event, reason)
        except OSError as error:
            refusal = error
        if record.committed and (problem := await self.answer_with(record.committed)):
            log.error("model %s: version %d does not answer again: %s", self.name, record.committed, problem)
        if refusal:
            raise refusal
        self._before = self._failing = None
        await self.unload(record.candidate)
        await self.around.worker(self.around.store.tidy)

    async def return_to_previous(self) -> None:
        """Part with the committed version, which is no more wanted: the one before it answers, or that of a folder.

        Raises:
            ServingRefused: That one cannot be loaded; nothing has changed.
            Unwritable: The disk takes nothing more; nothing has changed.
        """
        gone, previous = self.record.committed, self.record.previous
        if previous:
            await self.around.serving.load(self.name, previous)
        await self.advance("back", "taken back")
        if previous and (problem := await self.answer_with(previous)):
            log.error("model %s: version %d does not answer: %s", self.name, previous, problem)
        await self.unload(gone)

    async def withdraw(self, reason: str) -> None:
        """Give a candidate up that never answered.

        Raises:
            Unwritable: The disk takes nothing more; nothing has changed.
        """
        await self.advance("superseded", reason)
        await self.unload(self.record.candidate)

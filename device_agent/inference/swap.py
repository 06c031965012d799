"""The swaps of a board: offers come in, each name has one owner, which drives its candidate and answers what is asked.

A newer offer ends whatever is under way but a trial, for whose end it waits. An agent that starts goes on where the
records say that the one before it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from device_agent.inference.candidate import Candidate, Surroundings
from shared.errors import CorruptFile, FieldFleetError, ServingRefused, Unwritable
from shared.protocol.inference.release import read_manifest, sha256_of
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, take_offer
from shared.runtime import backports
from shared.runtime.executor import run_uninterrupted

log = logging.getLogger(__name__)


class Swaps:
    """The swaps of all names of a board.

    Args:
        around: What it works with.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around, self._owners = around, dict[str, _Owner]()
        self._group: backports.TaskGroup | None = None

    async def run(self) -> None:
        """Go on with what was under way, then do what is asked, until cancelled."""
        async with backports.TaskGroup() as group:
            for name in self._around.store.names():
                self._owner(name)
            self._group = group
            for name, owner in self._owners.items():
                group.create_task(owner.run(), name=f"swap {name}")
            await asyncio.Event().wait()

    def _owner(self, name: str) -> _Owner:
        if name not in self._owners:
            self._owners[name] = _Owner(Candidate(name, self._around))
            if self._group:
                self._group.create_task(self._owners[name].run(), name=f"swap {name}")
        return self._owners[name]

    async def hear(self, manifest: bytes, offer: NewVersion) -> UpdateRecord:
        """Note an offer; return the record, whose phase `offered` asks for the parts that the store lacks.

        In a trial it waits for the end of that; of several that wait, the last one counts.

        Args:
            manifest: Of the release, as it came.
            offer: What else is said of it.

        Raises:
            ConfigError: The manifest is of a newer format.
            CorruptFile: It is none, or not the one that is offered.
            Unwritable: The disk takes not even a note of it.
        """
        told = read_manifest(manifest, f"release offered by {offer.deployment}")
        if sha256_of(manifest) != offer.release or told.version != offer.version:
            raise CorruptFile(f"release {told.reference}: its manifest is not the one that is offered")
        return await self._owner(told.name).hear(manifest, offer)

    async def fetched(self, name: str, deployment: str) -> UpdateRecord:
        """Go on with an offer, all parts of which are in the store by now; return the record.

        Args:
            deployment: Of the offer; if another one came meanwhile, nothing is done.
        """
        return await self._owner(name).fetched(deployment)

    async def back(self, name: str, version: int) -> UpdateRecord:
        """Part with a version, be it committed, in its trial or on its way; return the record.

        Args:
            version: Which; where it is not in use, or there was none before it, nothing is done.

        Raises:
            ServingRefused: The version before it cannot be loaded; this one goes on.
            Unwritable: The disk takes nothing more; this one goes on.
        """
        return await self._owner(name).back(version)


@dataclass
class _Request:
    """Something that is asked of a name's owner, and its answer."""

    act: Callable[[], Awaitable[None]]
    is_offer: bool
    answer: asyncio.Future[UpdateRecord]

    def refuse(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def grant(self, record: UpdateRecord) -> None:
        if not self.answer.done():
            self.answer.set_result(record)


class _Owner:
    """The one who changes a name's record: lets the candidate work, and stops that to answer."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._news = candidate, asyncio.Event()
        self._requests: list[_Request] = []

    @property
    def _record(self) -> UpdateRecord:
        return self._candidate.record

    async def hear(self, manifest: bytes, offer: NewVersion) -> UpdateRecord:
        for one in [one for one in self._requests if one.is_offer]:
            self._requests.remove(one)
            one.grant(self._record)
        return await self._ask(lambda: self._take_offer(manifest, offer), is_offer=True)

    async def fetched(self, deployment: str) -> UpdateRecord:
        return await self._ask(lambda: self._note_fetched(deployment))

    async def back(self, version: int) -> UpdateRecord:
        return await self._ask(lambda: self._part_with(version))

    async def _ask(self, act: Callable[[], Awaitable[None]], *, is_offer: bool = False) -> UpdateRecord:
        request = _Request(act, is_offer, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._news.set()
        return await request.answer

    def _is_free_for(self, request: _Request) -> bool:
        return not (request.is_offer and self._record.phase == "trial")

    async def run(self) -> None:
        """Drive the record until cancelled."""
        if self._record.phase != "none":
            self._candidate.around.announce(self._record)
        await self._candidate.resume()
        working = asyncio.create_task(self._candidate.work())
        try:
            while True:
                await self._until_asked(working)
                await _stopped(working)
                await self._answer()
                working = asyncio.create_task(self._candidate.work())
        finally:
            await _stopped(working)

    async def _until_asked(self, working: asyncio.Task[None]) -> None:
        """Let work go on until something is asked that may be answered now."""
        while not any(self._is_free_for(one) for one in self._requests):
            self._news.clear()
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({news} if working.done() else {news, working}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if working.done():
                working.result()

    async def _answer(self) -> None:
        """Answer the first that may be answered; a trial may have begun while work was being stopped."""
        request = next((one for one in self._requests if self._is_free_for(one)), None)
        if request is None:
            return
        self._requests.remove(request)
        try:
            await run_uninterrupted(request.act())
        except (FieldFleetError, OSError) as error:
            request.refuse(error)
        request.grant(self._record)

    async def _take_offer(self, manifest: bytes, offer: NewVersion) -> None:
        record, store = self._record, self._candidate.around.store
        same = (record.deployment, record.release) == (offer.deployment, offer.release)
        if same and offer.attempt <= record.attempt and record.phase != "none":
            self._candidate.around.announce(record)
            return
        if record.phase in PENDING:
            await self._candidate.withdraw(f"{offer.deployment} was offered")
        offered = take_offer(self._record, offer, self._candidate.around.now())
        if reason := self._known_problem(offer):
            await self._candidate.note(offered)
            await self._candidate.advance("refused", reason, lasting=False)
            return
        await self._candidate.note(offered, manifest)
        if offer.version == self._record.committed:
            await self._candidate.advance("known")
            return
        await self._candidate.around.worker(store.tidy)
        try:
            store.require_room(store.manifest(self._record.name, offer.version))
        except Unwritable as error:
            await self._candidate.advance("refused", f"disk: {error}", lasting=False)

    def _known_problem(self, offer: NewVersion) -> str:
        """Return why an offer need not be tried: it failed here before, or its number is another release's."""
        record, store = self._record, self._candidate.around.store
        if offer.version in record.retained_versions and store.release(record.name, offer.version) != offer.release:
            return f"version: {offer.version} of {record.name} is here with another content; give it a new number"
        return record.failure(offer.release, offer.attempt)

    async def _note_fetched(self, deployment: str) -> None:
        record, store = self._record, self._candidate.around.store
        if (record.phase, record.deployment) != ("offered", deployment):
            return
        if missing := store.missing(store.manifest(record.name, record.candidate)):
            log.warning("model %s: %s is not here yet", record.name, ", ".join(sorted(missing)))
            return
        await self._candidate.advance("fetched")

    def _has_another(self) -> bool:
        """Tell whether something would answer without the committed version."""
        record = self._record
        return record.previous > 0 or self._candidate.around.has_folder(record.name, record.committed)

    async def _part_with(self, version: int) -> None:
        record = self._record
        if version == record.candidate and record.phase == "trial":
            await self._candidate.go_back("back", "taken back")
        elif version == record.candidate and record.phase in PENDING:
            await self._candidate.withdraw("taken back")
        elif version == record.committed and self._has_another():
            if record.phase == "trial":
                raise ServingRefused(f"version {record.candidate} is in its trial: take that one back first")
            if record.phase in PENDING:
                await self._candidate.withdraw(f"version {version} is taken back")
            await self._candidate.return_to_previous()


async def _stopped(working: asyncio.Task[None]) -> None:
    """Stop work where it may be stopped."""
    working.cancel()
    await asyncio.wait({working})
    if not working.cancelled():
        working.result()

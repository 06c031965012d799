"""Coordinate release swaps, with one task per model.

A newer offer aborts any work except a trial, whose end it waits for. A restarted agent continues where the records
left off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from device_agent.inference.candidate import Candidate, SwapContext
from shared.errors import CorruptFile, FieldFleetError, ServingRefused, Unwritable
from shared.protocol.inference.release import read_manifest, sha256_of
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, take_offer
from shared.runtime import backports
from shared.runtime.executor import run_uninterrupted

log = logging.getLogger(__name__)


class Swaps:
    """Release swaps of all models of a board."""

    def __init__(self, context: SwapContext) -> None:
        self._context, self._owners = context, dict[str, _Owner]()
        self._group: backports.TaskGroup | None = None

    async def run(self) -> None:
        """Resume pending work, then serve requests until cancelled."""
        async with backports.TaskGroup() as group:
            for name in self._context.store.names():
                self._owner(name)
            self._group = group
            for name, owner in self._owners.items():
                group.create_task(owner.run(), name=f"swap {name}")
            await asyncio.Event().wait()

    def _owner(self, name: str) -> _Owner:
        if name not in self._owners:
            self._owners[name] = _Owner(Candidate(name, self._context))
            if self._group:
                self._group.create_task(self._owners[name].run(), name=f"swap {name}")
        return self._owners[name]

    async def accept_offer(self, manifest: bytes, offer: NewVersion) -> UpdateRecord:
        """Record an offer and return the record; phase `offered` asks for the parts that the store lacks.

        During a trial it waits for the end of the trial; of several waiting offers the last one wins.

        Args:
            manifest: Manifest of the release, as received.

        Raises:
            ConfigError: The manifest has a newer format.
            CorruptFile: The manifest is invalid or not that of the offer.
            Unwritable: The disk refuses the record.
        """
        release = read_manifest(manifest, f"release offered by {offer.deployment}")
        if sha256_of(manifest) != offer.release or release.version != offer.version:
            raise CorruptFile(f"release {release.reference}: its manifest differs from the offer's")
        owner = self._owner(release.name)
        return await owner.ask(partial(owner.take_offer, manifest, offer), is_offer=True)

    async def mark_fetched(self, name: str, deployment: str) -> UpdateRecord:
        """Continue an offer whose parts are all stored; return the record.

        Args:
            deployment: Deployment of the offer; ignored if a newer offer replaced it.
        """
        owner = self._owner(name)
        return await owner.ask(partial(owner.note_fetched, deployment))

    async def take_back(self, name: str, version: int) -> UpdateRecord:
        """Take a version back, whether it is committed, in trial or pending; return the record.

        Args:
            version: Ignored if it is not in use or has no predecessor.

        Raises:
            ServingRefused: The previous version cannot be loaded; this one stays active.
            Unwritable: The disk refuses the record; this one stays active.
        """
        owner = self._owner(name)
        return await owner.ask(partial(owner.remove, version))


class _Request(NamedTuple):
    """A request to the owner of a model; its sender may be gone when it is answered."""

    act: Callable[[], Awaitable[None]]
    is_offer: bool
    answer: asyncio.Future[UpdateRecord]


class _Owner:
    """Sole writer of a model's record: runs the candidate's steps and interrupts them to serve requests."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._news = candidate, asyncio.Event()
        self._requests: list[_Request] = []

    @property
    def _record(self) -> UpdateRecord:
        return self._candidate.record

    async def ask(self, act: Callable[[], Awaitable[None]], *, is_offer: bool = False) -> UpdateRecord:
        """Interrupt the steps and act; return the record. An offer replaces one that waits."""
        for request in [request for request in self._requests if request.is_offer and is_offer]:
            self._requests.remove(request)
            if not request.answer.done():
                request.answer.set_result(self._record)
        answer: asyncio.Future[UpdateRecord] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(act, is_offer, answer))
        self._news.set()
        return await answer

    def _is_free_for(self, request: _Request) -> bool:
        return not (request.is_offer and self._record.phase == "trial")

    async def run(self) -> None:
        """Advance the record until cancelled."""
        if self._record.phase != "none":
            self._candidate.context.announce(self._record)
        await self._candidate.resume()
        working = asyncio.create_task(self._candidate.work())
        try:
            while True:
                await self._wait_for_request(working)
                await _stop(working)
                await self._answer()
                working = asyncio.create_task(self._candidate.work())
        finally:
            await _stop(working)

    async def _wait_for_request(self, working: asyncio.Task[None]) -> None:
        """Let the steps run until a request can be served."""
        working.add_done_callback(lambda _: self._news.set())
        while not any(self._is_free_for(request) for request in self._requests):
            await self._news.wait()
            self._news.clear()
            if working.done():
                working.result()

    async def _answer(self) -> None:
        """Serve the first possible request; there may be none, if a trial began while the steps were being stopped."""
        request = next((request for request in self._requests if self._is_free_for(request)), None)
        if request is None:
            return
        self._requests.remove(request)
        try:
            await run_uninterrupted(request.act())
        except (FieldFleetError, OSError) as error:
            if not request.answer.done():
                request.answer.set_exception(error)
        else:
            if not request.answer.done():
                request.answer.set_result(self._record)

    async def take_offer(self, manifest: bytes, offer: NewVersion) -> None:
        """Record an offer unless it is known; refuse one that would fail."""
        record, store = self._record, self._candidate.context.store
        same = (record.deployment, record.release) == (offer.deployment, offer.release)
        if same and offer.attempt <= record.attempt and record.phase != "none":
            self._candidate.context.announce(record)
            return
        if record.phase in PENDING:
            await self._candidate.withdraw(f"{offer.deployment} was offered")
        offered = take_offer(self._record, offer, self._candidate.context.now())
        if reason := self._known_problem(offer):
            await self._candidate.save(offered)
            await self._candidate.advance("refused", reason, lasting=False)
            return
        await self._candidate.save(offered, manifest)
        if offer.version == self._record.committed:
            await self._candidate.advance("known")
            return
        await self._candidate.context.worker(store.tidy)
        try:
            store.require_room(store.manifest(self._record.name, offer.version))
        except Unwritable as error:
            await self._candidate.advance("refused", f"disk: {error}", lasting=False)

    def _known_problem(self, offer: NewVersion) -> str:
        """Return why an offer need not be tried: it failed before, or its number is another release's; else ""."""
        record, store = self._record, self._candidate.context.store
        if offer.version in record.retained_versions and store.release(record.name, offer.version) != offer.release:
            return f"version: {offer.version} of {record.name} is stored with other content; give it a new number"
        return record.failure(offer.release, offer.attempt)

    async def note_fetched(self, deployment: str) -> None:
        """Continue with a complete offer."""
        record, store = self._record, self._candidate.context.store
        if (record.phase, record.deployment) != ("offered", deployment):
            return
        if missing := store.parts.missing(store.manifest(record.name, record.candidate)):
            log.warning("model %s: parts still missing: %s", record.name, ", ".join(sorted(missing)))
            return
        await self._candidate.advance("fetched")

    async def remove(self, version: int) -> None:
        """Take a version back."""
        record, has_folder = self._record, self._candidate.context.has_folder
        if version == record.candidate and record.phase == "trial":
            await self._candidate.roll_back("back", "taken back")
        elif version == record.candidate and record.phase in PENDING:
            await self._candidate.withdraw("taken back")
        elif version == record.committed and (record.previous or has_folder(record.name, record.committed)):
            if record.phase == "trial":
                raise ServingRefused(f"version {record.candidate} is in its trial: take it back first")
            if record.phase in PENDING:
                await self._candidate.withdraw(f"version {version} is taken back")
            await self._candidate.return_to_previous()


async def _stop(working: asyncio.Task[None]) -> None:
    """Stop the steps at a point where they can be interrupted."""
    working.cancel()
    await asyncio.wait({working})
    if not working.cancelled():
        working.result()

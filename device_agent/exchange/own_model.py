"""Have the board serve the model of its own, where a method makes one, in place of the release's parameters.

The newest lies beside the device's states. A release whose network it is of is opened again with it; another one goes
on as it is. One that is less accurate than the release on the device's held-out examples, by more than it may be, does
not answer: what was found of the newest lies beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from device_agent.exchange.state_files import OWN
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import OwnModel, ReleaseFiles, read_own
from shared.errors import CorruptFile, ServingDied, ServingRefused
from shared.protocol.inference.release import read_manifest
from shared.runtime.durable import replace_file
from shared.runtime.executor import Worker, in_thread

log = logging.getLogger(__name__)

VERDICT = ".own_model.verdict"
"""Beside the newest model; its name is none of a run's."""


class OwnVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was found of a model of the device's own.

    Attributes:
        reason: Why it is not to answer; empty where it may.
    """

    contents: str
    reason: str = ""


class OwnModelServing:
    """Serves the newest model of the device's own.

    Args:
        judge: Returns why it is not to answer for a release, empty where it may; None where it always may.

    Attributes:
        changed: To be set when there is a newer one.
    """

    def __init__(
        self,
        states: Path,
        process: InferenceProcess,
        judge: Callable[[ReleaseFiles], Awaitable[str]] | None = None,
        worker: Worker = in_thread,
    ) -> None:
        self.changed = asyncio.Event()
        self.path = states / OWN
        self._process, self._judge, self._verdict = process, judge, _read_verdict(states / VERDICT)
        self._worker = worker
        self._served: OwnModel | None = None
        self._said = ""
        process.own = self

    def path_for(self, files: ReleaseFiles) -> str:
        """Return the file of parameters that answer in place of a release's; empty where its own do."""
        own = self._served = self._newest()
        is_refused = own is not None and own.contents == self._verdict.contents and bool(self._verdict.reason)
        return str(self.path) if own and not is_refused and _is_of(own, files) else ""

    async def run(self) -> None:
        """Serve it, and every newer one, until cancelled."""
        while True:
            self.changed.clear()
            await self._process.ready.wait()
            own = self._newest()
            if own and (own != self._served or (self._judge and own.contents != self._verdict.contents)):
                await self._serve(own)
            await self.changed.wait()

    async def _serve(self, own: OwnModel) -> None:
        opened = False
        for files in self._process.answering():
            if not _is_of(own, files):
                continue
            opened = True
            await self._weigh(own, files)
            try:
                if await self._process.reload(files) and not self._verdict.reason:
                    log.info("%s/%d answers with the model of run %s", files.name, files.version, own.run)
            except ServingDied:
                pass  # it is started again, with the newest
            except ServingRefused as error:
                log.warning("%s/%d answers as before: %s", files.name, files.version, error)
        if not opened and self._said != own.run:
            self._said = own.run
            about = "run %s: no release here is of its network, %s: the model of this device's own is not served"
            log.warning(about, own.run, own.model.name)

    async def _weigh(self, own: OwnModel, files: ReleaseFiles) -> None:
        """Find out whether a model may answer for a release, once."""
        if self._judge is None or own.contents == self._verdict.contents:
            return
        reason = await self._judge(files)
        if reason:
            log.warning("%s/%d answers, not the model of run %s: %s", files.name, files.version, own.run, reason)
        self._verdict = OwnVerdict(contents=own.contents, reason=reason)
        try:
            await self._worker(replace_file, self.path.with_name(VERDICT), msgspec.json.encode(self._verdict))
        except OSError as error:
            log.warning("the next agent judges the model of run %s again: %s", own.run, error)

    def _newest(self) -> OwnModel | None:
        try:
            return read_own(self.path)
        except CorruptFile as error:
            log.warning("the device's own model is not served: %s", error)
            return None


def _is_of(own: OwnModel, files: ReleaseFiles) -> bool:
    return own.model == read_manifest(files.manifest, files.name).model


def _read_verdict(path: Path) -> OwnVerdict:
    """Return what an agent before this one found; of nothing where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OwnVerdict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return OwnVerdict(contents="")

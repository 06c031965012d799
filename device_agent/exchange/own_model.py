"""Serve the device's personal model in place of the release's parameters.

The newest personal model lies beside the device's states. A release of the same network is reloaded with it; other
releases are unaffected. A model that is less accurate than the release on the device's held-out examples, by more than
the allowed drop, is not served; the verdict on the newest model is stored beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from device_agent.exchange.state_files import OWN
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import OwnModel, ReleaseFiles, read_own_header
from shared.errors import CorruptFile, ServingDied, ServingRefused
from shared.protocol.inference.release import read_manifest
from shared.runtime.durable import replace_file
from shared.runtime.executor import Worker, in_thread

log = logging.getLogger(__name__)

VERDICT = ".own_model.verdict"
"""File beside the newest model; no run can have this name."""


class OwnVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of comparing a personal model with the release.

    Attributes:
        contents: Digest of the compared model.
        reason: Why the model must not be served; empty if it may.
    """

    contents: str
    reason: str = ""


class OwnModelServing:
    """Serves the newest personal model.

    Args:
        judge: Returns why the model must not replace a release, empty if it may; None accepts every model.

    Attributes:
        changed: Set it when a newer model was stored.
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
        self._warned_run = ""
        process.own = self

    def path_for(self, files: ReleaseFiles) -> str:
        """Return the parameter file to serve in place of a release's; empty for the release's own."""
        model = self._served = self._read_newest()
        is_refused = model is not None and model.contents == self._verdict.contents and bool(self._verdict.reason)
        return str(self.path) if model and not is_refused and _matches_release(model, files) else ""

    async def run(self) -> None:
        """Serve the current model and every newer one until cancelled."""
        while True:
            self.changed.clear()
            await self._process.ready.wait()
            model = self._read_newest()
            if model and (model != self._served or (self._judge and model.contents != self._verdict.contents)):
                await self._serve(model)
            await self.changed.wait()

    async def _serve(self, model: OwnModel) -> None:
        is_served = False
        for files in self._process.active_files():
            if not _matches_release(model, files):
                continue
            is_served = True
            await self._judge_once(model, files)
            try:
                if await self._process.reload(files) and not self._verdict.reason:
                    log.info("%s/%d answers with the model of run %s", files.name, files.version, model.run)
            except ServingDied:
                pass  # the restarted process loads the newest model
            except ServingRefused as error:
                log.warning("%s/%d keeps its current parameters: %s", files.name, files.version, error)
        if not is_served and self._warned_run != model.run:
            self._warned_run = model.run
            about = "run %s: no served release has the network %s; the personal model is not served"
            log.warning(about, model.run, model.model.name)

    async def _judge_once(self, model: OwnModel, files: ReleaseFiles) -> None:
        """Compare a model with a release unless its verdict is stored."""
        if self._judge is None or model.contents == self._verdict.contents:
            return
        reason = await self._judge(files)
        if reason:
            log.warning(
                "%s/%d answers in place of the personal model of run %s: %s",
                files.name,
                files.version,
                model.run,
                reason,
            )
        self._verdict = OwnVerdict(contents=model.contents, reason=reason)
        try:
            await self._worker(replace_file, self.path.with_name(VERDICT), msgspec.json.encode(self._verdict))
        except OSError as error:
            log.warning("verdict not stored, the model of run %s is judged again after a restart: %s", model.run, error)

    def _read_newest(self) -> OwnModel | None:
        try:
            return read_own_header(self.path)
        except CorruptFile as error:
            log.warning("the personal model is not served: %s", error)
            return None


def _matches_release(model: OwnModel, files: ReleaseFiles) -> bool:
    return model.matches(read_manifest(files.manifest, files.name))


def _read_verdict(path: Path) -> OwnVerdict:
    """Return the stored verdict; an empty one if it is missing or unreadable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=OwnVerdict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return OwnVerdict(contents="")

"""Have the board serve the model of its own, where a method makes one, in place of the release's parameters.

The newest lies beside the device's states. A release whose network it is of is opened again with it; another one goes
on as it is.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from device_agent.exchange.state_files import OWN
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import OwnModel, ReleaseFiles, read_own
from shared.errors import CorruptFile, ServingDied, ServingRefused
from shared.protocol.release import read_manifest

log = logging.getLogger(__name__)


class OwnModelServing:
    """Serves the newest model of the device's own.

    Args:
        states: Where it lies.
        process: Serves it.

    Attributes:
        changed: To be set when there is a newer one.
    """

    def __init__(self, states: Path, process: InferenceProcess) -> None:
        self.changed = asyncio.Event()
        self._path, self._process = states / OWN, process
        self._served: OwnModel | None = None
        self._said = ""
        process.own = self

    def path_for(self, files: ReleaseFiles) -> str:
        """Return the file of parameters that answer in place of a release's; empty where its own do."""
        own = self._served = self._newest()
        return str(self._path) if own and own.model == read_manifest(files.manifest, files.name).model else ""

    async def run(self) -> None:
        """Serve it, and every newer one, until cancelled."""
        while True:
            self.changed.clear()
            await self._process.ready.wait()
            own = self._newest()
            if own and own != self._served:
                await self._serve(own)
            await self.changed.wait()

    async def _serve(self, own: OwnModel) -> None:
        opened = False
        for files in self._process.answering():
            if not self.path_for(files):
                continue
            opened = True
            try:
                if await self._process.reload(files):
                    log.info("%s/%d answers with the model of run %s", files.name, files.version, own.run)
            except ServingDied:
                pass  # it is started again, with the newest
            except ServingRefused as error:
                log.warning("%s/%d answers as before: %s", files.name, files.version, error)
        if not opened and self._said != own.run:
            self._said = own.run
            about = "run %s: no release here is of its network, %s: the model of this device's own is not served"
            log.warning(about, own.run, own.model.name)

    def _newest(self) -> OwnModel | None:
        try:
            return read_own(self._path)
        except CorruptFile as error:
            log.warning("the device's own model is not served: %s", error)
            return None

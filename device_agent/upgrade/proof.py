"""Health signals for the updater: a task runs, or a trial version works.

The updater waits for the end of a task before it stops the agent, and for the proof before it commits a new version.
State files keep the old format until the trial is over.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent.upgrade.record import BUSY, FOLDER, PROOF, HealthProof, UpgradeRecord, read_upgrade
from device_agent.upgrade.state_formats import raise_formats
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.runtime.durable import replace_file

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Poll interval for the end of a trial."""
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


def open_folder(state_dir: Path) -> Path:
    """Return the agent's upgrade folder, creating it if needed."""
    folder = state_dir / FOLDER
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    return folder


@dataclass
class TrialReporter:
    """Writes the proof of a version on trial, and raises the state formats after it.

    Attributes:
        home: Folder of the versions; None if this process does not run from it.
        look_s: Poll interval of the upgrade record.
        report_accepted: Set once the broker has acknowledged this process's first report.
    """

    home: Path | None
    state_dir: Path
    version: str
    look_s: float = LOOK_S
    report_accepted: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Prove this version if it is on trial; after the trial, raise the state formats to its own."""
        try:
            record = self._trial()
            if record:
                await self.report_accepted.wait()
                self._prove(record.nonce)
                log.info("version %s is connected and its report was accepted; proof written", self.version)
            while self._trial():  # noqa: ASYNC110 - another process ends it
                await asyncio.sleep(self.look_s)
            raise_formats(self.state_dir, self.version)
        except (ConfigError, CorruptFile, Unwritable, OSError) as error:
            log.warning("upgrade: %s", error)

    def _trial(self) -> UpgradeRecord | None:
        """Return the record if this version is on trial, else None."""
        record = read_upgrade(self.home) if self.home else UpgradeRecord()
        return record if record.state == "trial" and record.to == self.version else None

    def _prove(self, nonce: str) -> None:
        proof = HealthProof(version=self.version, nonce=nonce)
        replace_file(open_folder(self.state_dir) / PROOF, msgspec.json.encode(proof), mode=PRIVATE)


@contextmanager
def mark_busy(state_dir: Path) -> Iterator[None]:
    """Hold the task lock in a block; it is released with the process, and not taken if the disk is full."""
    descriptor = -1
    try:
        descriptor = os.open(open_folder(state_dir) / BUSY, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        log.debug("task lock not taken: %s", error)
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

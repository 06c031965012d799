"""The agent's word to the updater: that a task runs, and that a new version is connected and heard.

The updater waits for the end of the task before it stops the agent, and for the proof before it keeps the new version.
State files keep the old form until then: only once the trial is over are forms raised to those of this version.
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

from device_agent.upgrade.record import BUSY, FOLDER, PROOF, Proof, UpgradeRecord, read_upgrade
from device_agent.upgrade.state_formats import raise_formats
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.runtime.durable import replace_file

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at whether a trial is over."""
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


def open_folder(state_dir: Path) -> Path:
    """Return the agent's folder of upgrades, made where there is none."""
    folder = state_dir / FOLDER
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    return folder


@dataclass
class TrialReporter:
    """What a running version owes the updater.

    Attributes:
        home: Folder of the versions; None where this process is none of them.
        look_s: Seconds between two looks at the record of a trial.
        heard: Set once the broker took this process's first report.
    """

    home: Path | None
    state_dir: Path
    version: str
    look_s: float = LOOK_S
    report_accepted: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Prove this version if it is on trial; once it is not, raise the forms of state files to its own."""
        try:
            record = self._trial()
            if record:
                await self.report_accepted.wait()
                self._prove(record.nonce)
                log.info("version %s is connected and was heard: the updater is told", self.version)
            while self._trial():  # noqa: ASYNC110 - another process ends it
                await asyncio.sleep(self.look_s)
            raise_formats(self.state_dir, self.version)
        except (ConfigError, CorruptFile, Unwritable, OSError) as error:
            log.warning("upgrade: %s", error)

    def _trial(self) -> UpgradeRecord | None:
        """Return the record while this version is on trial."""
        record = read_upgrade(self.home) if self.home else UpgradeRecord()
        return record if record.state == "trial" and record.to == self.version else None

    def _prove(self, nonce: str) -> None:
        proof = Proof(version=self.version, nonce=nonce)
        replace_file(open_folder(self.state_dir) / PROOF, msgspec.json.encode(proof), mode=PRIVATE)


@contextmanager
def mark_busy(state_dir: Path) -> Iterator[None]:
    """Say that a task runs while the block lasts, by a lock that falls with the process; a full disk says nothing."""
    descriptor = -1
    try:
        descriptor = os.open(open_folder(state_dir) / BUSY, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        log.debug("that a task runs is not told: %s", error)
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

"""Upgrade state of a board on disk, and the switch of versions."""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from device_agent.upgrade import transitions
from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.agent_service import AgentService
from device_agent.upgrade.record import (
    CURRENT,
    RECORD,
    UPDATER,
    UpgradeRecord,
    UpgradeTarget,
    read_upgrade,
    write_upgrade,
)
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.update import Event
from shared.runtime.durable import unused_name

log = logging.getLogger(__name__)


@dataclass
class UpgradeState:
    """Writes each step to the record before it is done; a step may be repeated after an interruption."""

    versions: Versions
    agent: AgentFolder
    service: AgentService
    record: UpgradeRecord = field(default_factory=UpgradeRecord)

    def read(self) -> None:
        """Read the record; a damaged one is set aside.

        Raises:
            ConfigError: The record has a newer format.
        """
        home = self.versions.home
        try:
            self.record = read_upgrade(home)
        except CorruptFile as error:
            log.warning("%s: set aside; the running version stays", error)
            (home / RECORD).rename(unused_name(home / RECORD))
            self.record = UpgradeRecord()

    def write(self, record: UpgradeRecord) -> None:
        """Write a changed record durably.

        Raises:
            Unwritable: The disk is full or read-only.
        """
        if record != self.record:
            write_upgrade(self.versions.home, record)
            self.record = record

    def apply(self, event: Event, reason: str = "", **change: object) -> None:
        """Write the record after an event; see `transitions.apply_event`."""
        self.write(transitions.apply_event(self.record, event, reason, **change))
        log.info("version %s: %s%s", self.record.to, self.record.state, f": {reason}" if reason else "")

    def begin_trial(self, boot: str, passed_over: UpgradeTarget | None) -> None:
        """Start the trial of the requested version.

        Args:
            boot: The kernel's id of this boot.
            passed_over: The agent's request that an installation by hand ignores.
        """
        self.versions.switch(UPDATER, self.record.from_)
        self.apply("switched", nonce=secrets.token_hex(16), boot=boot, boots=1, passed_over=passed_over)
        self.switch(self.record.to)

    def switch(self, version: str, *, back: bool = False) -> None:
        """Switch `current` to a version and restart the agent, whatever an interrupted switch has done before."""
        if not self.versions.is_installed(version):
            raise ConfigError(
                f"{self.versions.home / version} does not exist; install a package: `apt install ./FILE.deb`"
            )
        self.service.stop()
        try:
            self._move_state(version, back=back)
            self.versions.switch(CURRENT, version)
        finally:
            self.service.start()  # with either version

    def _move_state(self, version: str, *, back: bool) -> None:
        """Set aside state files that a version cannot read, or restore them; errors do not stop the switch."""
        record = self.record
        if not record.lost:
            return
        try:
            if back:
                self.agent.restore_files(record.lost, record.to)
            else:
                self.agent.set_aside(record.lost, version)
        except (FieldFleetError, OSError) as error:
            log.warning("state files not moved: %s", error)

    def roll_back(self, reason: str | None = None) -> None:
        """Switch to the version that the record says to roll back to.

        Args:
            reason: Begins a rollback; None to continue one.
        """
        if reason is not None:
            self.write(transitions.mark_rollback(self.record, reason))
        record, goal = self.record, transitions.target_version(self.record)
        if self.versions.current() in (record.to, goal):
            self.switch(goal, back=True)
            self.versions.switch(UPDATER, goal)
        self.apply("worse" if record.state == "trial" else "back", record.reason)

    def remove_unused(self) -> None:
        """Remove the versions that are no longer needed."""
        record, current = self.record, self.versions.current()
        if record.state == "committed" and current == record.to != self.versions.updater():
            self.versions.switch(UPDATER, record.to)  # interrupted after the record was written
        retained = transitions.select_retained_versions(record, current)
        self.write(replace(record, serials=transitions.filter_serials(record.serials, retained)))
        with suppress(OSError):  # leftovers only cost disk space
            self.versions.remove_unused(retained)

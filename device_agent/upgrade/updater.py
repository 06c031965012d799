"""Upgrade the agent as root: verify, install, switch, watch, then commit or roll back.

    offered     requested
    fetched     the package matches its signed manifest
    verified    it fits this board, and can read the state files
    staged      installed beside the running version, and starts
    trial       running; must connect and get a report accepted within `probation_s`
    committed, rolled-back, refused, superseded

Every step is recorded first, so that an updater that is killed or loses power is resumed, at boot before the agent
starts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from msgspec.structs import replace

from device_agent.upgrade import transitions
from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.agent_service import AgentService
from device_agent.upgrade.inputs import UpgradeEnvironment, UpgradeRequest
from device_agent.upgrade.preparation import SET_ASIDE, Preparation, read_pending_target
from device_agent.upgrade.record import UPDATER, HealthProof, UpgradeRecord, UpgradeTarget
from device_agent.upgrade.state_formats import find_losses
from device_agent.upgrade.transitions import TrialObservation
from device_agent.upgrade.upgrade_state import UpgradeState
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, FieldFleetError
from shared.protocol.update import PENDING, Event

log = logging.getLogger(__name__)


class Updater:
    """Upgrades the agent of a board; one process at a time."""

    def __init__(self, environment: UpgradeEnvironment, service: AgentService) -> None:
        self.versions, self.agent = Versions(environment.home), AgentFolder(environment.state_dir)
        self._environment, self._service = environment, service
        self._state = UpgradeState(self.versions, self.agent, service)
        self._preparation = Preparation(environment, self._state)

    @property
    def record(self) -> UpgradeRecord:
        """State of the upgrades."""
        return self._state.record

    def resume(self) -> UpgradeRecord:
        """Complete what an interrupted process left, except a trial, which must be watched again.

        Raises:
            ConfigError: The record has a newer format.
            Unwritable: The disk is full or read-only.
        """
        self._state.read()
        self.versions.remove_partial()
        if self.record.state in PENDING:
            with suppress(OSError):  # a full disk needs room before anything can be written
                self.versions.remove_unused({self.record.from_, self.record.previous})
            self._state.apply("superseded", "interrupted before the trial")
        elif transitions.is_rolling_back(self.record):
            self._state.roll_back()
        elif self.record.state == "trial":
            self._resume_trial()
        self._state.remove_unused()
        return self.record

    def _resume_trial(self) -> None:
        boot = self._read_boot_id()
        is_reboot = boot != self.record.boot
        self._state.write(transitions.count_restart(self.record, boot))
        current = self.versions.current()
        if current == self.record.from_ and self.record.from_ != self.record.to:
            self._state.switch(self.record.to)
        elif outcome := transitions.judge_trial(self.record, TrialObservation(current)):
            self._end_trial(*outcome)
        elif not is_reboot and not self._service.read_status().runs:
            self._service.start()

    def _read_boot_id(self) -> str:
        return self._environment.boot_id.read_text().strip()

    async def watch_trial(self) -> UpgradeRecord:
        """Watch a trial, if there is one, until it ends."""
        clock = self._environment.clock
        start = clock()
        while self.record.state == "trial":
            if outcome := transitions.judge_trial(self.record, self._observe(clock() - start)):
                self._end_trial(*outcome)
            else:
                await asyncio.sleep(self._environment.look_s)
        self._state.remove_unused()
        return self.record

    def _observe(self, seconds: float) -> TrialObservation:
        status = self._service.read_status()
        is_proven = self.agent.read_proof() == HealthProof(version=self.record.to, nonce=self.record.nonce)
        return TrialObservation(self.versions.current(), seconds, is_proven, status.restarts, status.has_failed)

    def _end_trial(self, event: Event, reason: str) -> None:
        if event == "passed":  # the new version raises its state formats only after this
            self._state.apply("passed", readable=self._read_formats())
            self.versions.switch(UPDATER, self.record.to)
        elif event == "back":  # another version was installed meanwhile
            self._state.apply("back", reason)
        else:
            self._state.roll_back(reason)

    def roll_back(self, reason: str) -> UpgradeRecord:
        """Roll back to the previous version, from a trial or a committed version.

        Raises:
            ConfigError: There is none, or it cannot read newer state files.
        """
        record = self.record
        goal = record.from_ if record.state == "trial" else record.previous
        is_ours = record.state in ("trial", "committed") and self.versions.current() == record.to
        if not is_ours or not self.versions.is_installed(goal):
            raise ConfigError("no previous version to go back to; install its package: `apt install ./FILE.deb`")
        self._require_readable(goal)
        self._state.roll_back(reason)
        self._state.remove_unused()
        return self.record

    def _require_readable(self, goal: str) -> None:
        """Refuse to roll back from a committed version to one that cannot read its state files."""
        if self.record.state != "committed":
            return
        if losses := find_losses(self._read_formats(), self.record.readable):
            loss_text = "; ".join(f"{name}: {what}" for name, what in losses.items())
            problem = f"version {goal} cannot read newer state files and would lose ({loss_text})"
            raise ConfigError(f"{problem}; {SET_ASIDE}")

    def _read_formats(self) -> dict[str, int]:
        """Return the newest state formats in the agent's folder; empty if unreadable."""
        try:
            return self.agent.read_formats().formats
        except FieldFleetError as error:
            log.warning("%s", error)
            return {}

    def _roll_back_on_request(self, target: UpgradeTarget) -> UpgradeRecord:
        """Roll back to the previous version as the gateway requests, or record why not."""
        try:
            self._require_readable(target.version)
        except ConfigError as error:
            self._state.write(transitions.begin_upgrade(self.record, target, self.versions.current()))
            return self._refuse(error)
        self._state.write(replace(self.record, deployment=target.deployment, attempt=target.attempt))
        return self.roll_back(f"{target.deployment or 'the gateway'} goes back to version {target.version}")

    def _refuse(self, error: Exception) -> UpgradeRecord:
        self._state.apply("refused", str(error))
        self._state.remove_unused()
        return self.record

    async def install(self, request: UpgradeRequest) -> UpgradeRecord:
        """Install a version and watch its trial; return the resulting record. There must be no earlier trial."""
        target, current = request.target, self.versions.current()
        if not request.by_hand and transitions.is_handled(self.record, target, current):
            return self.record
        is_back = target.version == self.record.previous and self.record.state == "committed"
        if is_back and not request.by_hand and self.versions.is_installed(target.version):
            return self._roll_back_on_request(target)
        passed_over = read_pending_target(self.agent) if request.by_hand else self.record.passed_over
        self._state.write(transitions.begin_upgrade(self.record, target, current))
        if target.version == current:
            self._state.apply("known", from_=self.record.previous, passed_over=passed_over)
            return self.record
        try:
            self._preparation.install(request)
        except (FieldFleetError, OSError) as error:
            return self._refuse(error)
        if outcome := await self._preparation.await_pause(request):
            self._state.apply(*outcome)
        else:
            self._state.begin_trial(self._read_boot_id(), passed_over)
        return await self.watch_trial()

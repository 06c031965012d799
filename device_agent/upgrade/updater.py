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
import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from device_agent.upgrade import transitions
from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.agent_service import AgentService
from device_agent.upgrade.inputs import UpgradeEnvironment, UpgradeRequest, find_start_error
from device_agent.upgrade.package_file import unpack_package
from device_agent.upgrade.record import (
    CURRENT,
    RECORD,
    UPDATER,
    HealthProof,
    UpgradeRecord,
    UpgradeTarget,
    read_upgrade,
    write_upgrade,
)
from device_agent.upgrade.state_formats import find_losses
from device_agent.upgrade.transitions import TrialObservation
from device_agent.upgrade.versions import Versions, is_older
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.packages import MOST_BUSY_S, Build, PackageManifest, decode_signed_manifest, find_build, verify
from shared.protocol.update import PENDING, Event
from shared.runtime.clock import Clock, monotonic
from shared.runtime.durable import unused_name
from shared.runtime.support.deb_file import MOST_PACKAGE

log = logging.getLogger(__name__)

PACKED_HOME = "opt/fieldfleet"
MOST_ROOTS = 64 << 10
LOOK_S = 0.5
FORCE = "at the board, `sudo device-agent upgrade install FILE.deb --force` does not wait"
SET_ASIDE = "`device-agent upgrade install FILE.deb --lose` sets it aside and continues"


@dataclass
class Updater:
    """Upgrades the agent of a board; one process at a time.

    Attributes:
        find_start_error: Returns why the version in a folder does not start; else empty.
        look_s: Poll interval in seconds.
    """

    environment: UpgradeEnvironment
    service: AgentService
    find_start_error: Callable[[Path], str] = find_start_error
    clock: Clock = monotonic
    look_s: float = LOOK_S
    record: UpgradeRecord = field(default_factory=UpgradeRecord)

    def __post_init__(self) -> None:
        """Open the folders of the versions and of the agent."""
        self.versions, self.agent = Versions(self.environment.home), AgentFolder(self.environment.state_dir)

    def resume(self) -> UpgradeRecord:
        """Complete what an interrupted process left, except a trial, which must be watched again.

        Raises:
            ConfigError: The record has a newer format.
            Unwritable: The disk is full or read-only.
        """
        self.record = self._read_record()
        self.versions.remove_partial()
        if self.record.state in PENDING:
            with suppress(OSError):  # a full disk needs room before anything can be written
                self.versions.remove_unused({self.record.from_, self.record.previous})
            self._record_event("superseded", "interrupted before the trial")
        elif transitions.is_rolling_back(self.record):
            self._roll_back()
        elif self.record.state == "trial":
            self._resume_trial()
        self._remove_unused()
        return self.record

    def _read_record(self) -> UpgradeRecord:
        try:
            return read_upgrade(self.environment.home)
        except CorruptFile as error:
            log.warning("%s: set aside; the running version stays", error)
            path = self.environment.home / RECORD
            path.rename(unused_name(path))
            return UpgradeRecord()

    def _write(self, record: UpgradeRecord) -> None:
        if record != self.record:
            write_upgrade(self.environment.home, record)
            self.record = record

    def _record_event(self, event: Event, reason: str = "", **change: object) -> None:
        self._write(transitions.apply_event(self.record, event, reason, **change))
        log.info("version %s: %s%s", self.record.to, self.record.state, f": {reason}" if reason else "")

    def _resume_trial(self) -> None:
        boot = self.environment.boot_id.read_text().strip()
        is_reboot = boot != self.record.boot
        self._write(transitions.count_restart(self.record, boot))
        current = self.versions.current()
        if current == self.record.from_ and self.record.from_ != self.record.to:
            self._switch(self.record.to)
        elif outcome := transitions.judge_trial(self.record, TrialObservation(current)):
            self._end_trial(*outcome)
        elif not is_reboot and not self.service.read_status().runs:
            self.service.start()

    async def watch_trial(self) -> UpgradeRecord:
        """Watch a trial, if there is one, until it ends."""
        start = self.clock()
        while self.record.state == "trial":
            if outcome := transitions.judge_trial(self.record, self._observe(self.clock() - start)):
                self._end_trial(*outcome)
            else:
                await asyncio.sleep(self.look_s)
        self._remove_unused()
        return self.record

    def _observe(self, seconds: float) -> TrialObservation:
        status = self.service.read_status()
        proof = self.agent.read_proof()
        is_proven = proof == HealthProof(version=self.record.to, nonce=self.record.nonce)
        return TrialObservation(self.versions.current(), seconds, is_proven, status.restarts, status.has_failed)

    def _end_trial(self, event: Event, reason: str) -> None:
        if event == "passed":  # the new version raises its state formats only after this
            self._record_event("passed", readable=self._read_formats())
            self.versions.switch(UPDATER, self.record.to)
        elif event == "back":  # another version was installed meanwhile
            self._record_event("back", reason)
        else:
            self._write(transitions.mark_rollback(self.record, reason))
            self._roll_back()

    def _roll_back(self) -> None:
        """Switch to the version that the record says to roll back to."""
        record, goal = self.record, transitions.target_version(self.record)
        if self.versions.current() in (record.to, goal):
            self._switch(goal, back=True)
            self.versions.switch(UPDATER, goal)
        self._record_event("worse" if record.state == "trial" else "back", record.reason)

    def _switch(self, version: str, *, back: bool = False) -> None:
        """Switch `current` to a version and restart the agent, whatever an interrupted switch has done before."""
        if not self.versions.is_installed(version):
            raise ConfigError(
                f"{self.environment.home / version} does not exist; install a package: `apt install ./FILE.deb`"
            )
        self.service.stop()
        try:
            self._move_state(version, back=back)
            self.versions.switch(CURRENT, version)
        finally:
            self.service.start()  # with either version

    def _move_state(self, version: str, *, back: bool) -> None:
        """Set aside state files that a version cannot read, or restore them; errors do not stop the switch."""
        if not self.record.lost:
            return
        try:
            if back:
                self.agent.restore_files(self.record.lost, self.record.to)
            else:
                self.agent.set_aside(self.record.lost, version)
        except (FieldFleetError, OSError) as error:
            log.warning("state files not moved: %s", error)

    def _remove_unused(self) -> None:
        if self.record.state == "committed" and self.versions.current() == self.record.to != self.versions.updater():
            self.versions.switch(UPDATER, self.record.to)  # interrupted after the record was written
        retained = transitions.select_retained_versions(self.record, self.versions.current())
        self._write(replace(self.record, serials=transitions.filter_serials(self.record.serials, retained)))
        with suppress(OSError):  # leftovers only cost disk space
            self.versions.remove_unused(retained)

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
        self._write(transitions.mark_rollback(record, reason))
        self._roll_back()
        self._remove_unused()
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
            self._write(transitions.begin_upgrade(self.record, target, self.versions.current()))
            self._record_event("refused", str(error))
            self._remove_unused()
            return self.record
        self._write(replace(self.record, deployment=target.deployment, attempt=target.attempt))
        return self.roll_back(f"{target.deployment or 'the gateway'} goes back to version {target.version}")

    async def install(self, request: UpgradeRequest) -> UpgradeRecord:
        """Install a version and watch its trial; return the resulting record. There must be no earlier trial."""
        target, current = request.target, self.versions.current()
        if not request.by_hand and transitions.is_handled(self.record, target, current):
            return self.record
        is_back = target.version == self.record.previous and self.record.state == "committed"
        if is_back and not request.by_hand and self.versions.is_installed(target.version):
            return self._roll_back_on_request(target)
        passed_over = self._read_target() if request.by_hand else self.record.passed_over
        self._write(transitions.begin_upgrade(self.record, target, current))
        if target.version == current:
            self._record_event("known", from_=self.record.previous, passed_over=passed_over)
            return self.record
        try:
            self._prepare(request)
        except (FieldFleetError, OSError) as error:
            self._record_event("refused", str(error))
            self._remove_unused()
            return self.record
        if outcome := await self._await_pause(request):
            self._record_event(*outcome)
        else:
            self._begin_trial(passed_over)
        return await self.watch_trial()

    def _prepare(self, request: UpgradeRequest) -> None:
        """Verify a version and install it beside the running one.

        Raises:
            FieldFleetError: The version is refused, with the reason.
            OSError: A file cannot be read or written.
        """
        target = request.target
        if not self.versions.is_installed(self.record.from_):
            problem = f"{self.environment.home / CURRENT} does not point to a version"
            raise ConfigError(f"{problem}; install the package: `apt install ./FILE.deb`")
        if not request.by_hand and (failed := transitions.find_failure(self.record, target)):
            raise ConfigError(f"this version failed on this board before: {failed}")
        manifest = verify(decode_signed_manifest(request.read_manifest()), self._read_roots())
        if manifest.version != target.version:
            raise ConfigError(f"the manifest is of version {manifest.version}, but {target.version} was requested")
        build = find_build(manifest, self.environment.arch, self.environment.python)
        package = self._read_package(request, build)
        self._record_event("fetched")
        losses = self._check_board(request, manifest)
        serials = self.record.serials | {manifest.version: manifest.serial}
        self._record_event("verified", serials=serials, lost=tuple(losses))
        self._unpack(manifest.version, build, package)
        self._record_event("staged")

    def _read_roots(self) -> bytes:
        try:
            with self.environment.roots.open("rb") as file:
                return file.read(MOST_ROOTS)
        except FileNotFoundError as error:
            problem = f"{self.environment.roots} does not exist, so no package can be verified"
            raise ConfigError(f"{problem}; join, then run `sudo device-agent upgrade trust`") from error

    def _read_package(self, request: UpgradeRequest, build: Build) -> bytes:
        if build.size > MOST_PACKAGE:
            raise ConfigError(f"{build.file} has {build.size} bytes, more than {MOST_PACKAGE}")
        package = request.read_package(build.size)
        if len(package) != build.size or hashlib.sha256(package).hexdigest() != build.sha256:
            raise CorruptFile(f"the package differs in SHA-256 or size from {build.file} in the signed manifest")
        return package

    def _check_board(self, request: UpgradeRequest, manifest: PackageManifest) -> dict[str, str]:
        """Refuse a downgrade and a loss of state files unless allowed; return the losses."""
        serials = self.record.serials  # unknown for versions that dpkg installed
        runs = serials.get(self.record.from_)
        is_before = runs is None and is_older(manifest.version, self.record.from_)
        losses = find_losses(self.agent.read_formats().formats, manifest.formats)
        loss_text = "; ".join(f"{name}: {what}" for name, what in losses.items())
        if (is_before or manifest.serial < (runs or max(serials.values(), default=0))) and not request.by_hand:
            problem = f"version {manifest.version} is older than {self.record.from_}, which runs"
            lost, lose = (f", and would lose ({loss_text})", " --lose") if losses else ("", "")
            raise ConfigError(f"{problem}{lost}; at the board: `sudo device-agent upgrade install FILE.deb{lose}`")
        if losses and not request.lose:
            problem = f"version {manifest.version} cannot read the state files and would lose ({loss_text})"
            raise ConfigError(f"{problem}; {SET_ASIDE}")
        if request.by_hand and not request.force and not self.service.read_status().runs:
            raise ConfigError("the agent's service does not run, so a trial would fail; start it first")
        return losses

    def _unpack(self, version: str, build: Build, package: bytes) -> None:
        versions, home = self.versions, self.environment.home
        digest = versions.read_digest(version)
        if not versions.is_installed(version) or digest not in ("", build.sha256):
            if version == self.record.previous:
                self._write(replace(self.record, previous=""))
            folder = f"{PACKED_HOME}/{version}"
            size = sum(len(entry.content) for entry in unpack_package(package, folder, self.environment.interpreters))
            versions.require_room(size)
            versions.install(version, build.sha256, unpack_package(package, folder, self.environment.interpreters))
        if fault := self.find_start_error(home / version):
            raise ConfigError(fault)

    async def _await_pause(self, request: UpgradeRequest) -> tuple[Event, str] | None:
        """Wait until the agent runs without a task; return the event and reason if the trial must not begin."""
        until = self.clock() + MOST_BUSY_S
        while not request.force and (fault := self._find_blocker()):
            if not request.by_hand and self._read_target() not in (request.target, None):
                return "superseded", "another version was requested meanwhile"
            if self.clock() >= until:
                return "refused", f"{fault} for {MOST_BUSY_S:g} s; {FORCE}"
            await asyncio.sleep(self.look_s)
        return None

    def _find_blocker(self) -> str:
        if self.agent.is_busy():
            return "a task has been running"
        return "" if self.service.read_status().runs else "the agent's service has been stopped"

    def _read_target(self) -> UpgradeTarget | None:
        """Read the agent's request; None if missing or unreadable."""
        try:
            return self.agent.read_target()
        except FieldFleetError:
            return None

    def _begin_trial(self, passed_over: UpgradeTarget | None) -> None:
        boot = self.environment.boot_id.read_text().strip()
        self.versions.switch(UPDATER, self.record.from_)
        self._record_event("switched", nonce=secrets.token_hex(16), boot=boot, boots=1, passed_over=passed_over)
        self._switch(self.record.to)

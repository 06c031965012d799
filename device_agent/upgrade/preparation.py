"""Verify and install a requested agent version; wait for a pause to start it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from msgspec.structs import replace

from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.inputs import UpgradeEnvironment, UpgradeRequest
from device_agent.upgrade.package_file import unpack_package
from device_agent.upgrade.record import CURRENT, UpgradeTarget
from device_agent.upgrade.state_formats import find_losses
from device_agent.upgrade.upgrade_state import UpgradeState
from device_agent.upgrade.versions import is_older
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.packages import MOST_BUSY_S, Build, PackageManifest, decode_signed_manifest, find_build, verify
from shared.protocol.update import Event, find_failure
from shared.runtime.support.deb_file import MOST_PACKAGE

PACKED_HOME = "opt/fieldfleet"
MOST_ROOTS = 64 << 10
FORCE = "at the board, `sudo device-agent upgrade install FILE.deb --force` does not wait"
SET_ASIDE = "`device-agent upgrade install FILE.deb --lose` sets it aside and continues"


def read_pending_target(agent: AgentFolder) -> UpgradeTarget | None:
    """Read the agent's request; None if missing or unreadable."""
    try:
        return agent.read_target()
    except FieldFleetError:
        return None


@dataclass
class Preparation:
    """Prepares a requested version for its trial."""

    environment: UpgradeEnvironment
    state: UpgradeState

    def install(self, request: UpgradeRequest) -> None:
        """Verify a version and install it beside the running one.

        Raises:
            FieldFleetError: The version is refused, with the reason.
            OSError: A file cannot be read or written.
        """
        target, record = request.target, self.state.record
        if not self.state.versions.is_installed(record.from_):
            problem = f"{self.environment.home / CURRENT} does not point to a version"
            raise ConfigError(f"{problem}; install the package: `apt install ./FILE.deb`")
        if not request.by_hand and (failed := find_failure(record.failed, target.version, target.attempt)):
            raise ConfigError(f"this version failed on this board before: {failed}")
        manifest = verify(decode_signed_manifest(request.read_manifest()), self._read_roots())
        if manifest.version != target.version:
            raise ConfigError(f"the manifest is of version {manifest.version}, but {target.version} was requested")
        build = find_build(manifest, self.environment.arch, self.environment.python)
        package = _read_package(request, build)
        self.state.apply("fetched")
        losses = self._check_board(request, manifest)
        serials = record.serials | {manifest.version: manifest.serial}
        self.state.apply("verified", serials=serials, lost=tuple(losses))
        self._unpack(manifest.version, build, package)
        self.state.apply("staged")

    def _read_roots(self) -> bytes:
        try:
            with self.environment.roots.open("rb") as file:
                return file.read(MOST_ROOTS)
        except FileNotFoundError as error:
            problem = f"{self.environment.roots} does not exist, so no package can be verified"
            raise ConfigError(f"{problem}; join, then run `sudo device-agent upgrade trust`") from error

    def _check_board(self, request: UpgradeRequest, manifest: PackageManifest) -> dict[str, str]:
        """Refuse a downgrade and a loss of state files unless allowed; return the losses."""
        running, serials = self.state.record.from_, self.state.record.serials
        runs = serials.get(running)  # None for versions that dpkg installed
        is_before = runs is None and is_older(manifest.version, running)
        losses = find_losses(self.state.agent.read_formats().formats, manifest.formats)
        loss_text = "; ".join(f"{name}: {what}" for name, what in losses.items())
        if (is_before or manifest.serial < (runs or max(serials.values(), default=0))) and not request.by_hand:
            problem = f"version {manifest.version} is older than {running}, which runs"
            lost, lose = (f", and would lose ({loss_text})", " --lose") if losses else ("", "")
            raise ConfigError(f"{problem}{lost}; at the board: `sudo device-agent upgrade install FILE.deb{lose}`")
        if losses and not request.lose:
            problem = f"version {manifest.version} cannot read the state files and would lose ({loss_text})"
            raise ConfigError(f"{problem}; {SET_ASIDE}")
        if request.by_hand and not request.force and not self.state.service.read_status().runs:
            raise ConfigError("the agent's service does not run, so a trial would fail; start it first")
        return losses

    def _unpack(self, version: str, build: Build, package: bytes) -> None:
        versions, folder = self.state.versions, f"{PACKED_HOME}/{version}"
        digest = versions.read_digest(version)
        if not versions.is_installed(version) or digest not in ("", build.sha256):
            if version == self.state.record.previous:
                self.state.write(replace(self.state.record, previous=""))
            size = sum(len(entry.content) for entry in unpack_package(package, folder, self.environment.interpreters))
            versions.require_room(size)
            versions.install(version, build.sha256, unpack_package(package, folder, self.environment.interpreters))
        if fault := self.environment.find_start_error(self.environment.home / version):
            raise ConfigError(fault)

    async def await_pause(self, request: UpgradeRequest) -> tuple[Event, str] | None:
        """Wait until the agent runs without a task; return the event and reason if the trial must not begin."""
        until = self.environment.clock() + MOST_BUSY_S
        while not request.force and (fault := self._find_blocker()):
            if not request.by_hand and read_pending_target(self.state.agent) not in (request.target, None):
                return "superseded", "another version was requested meanwhile"
            if self.environment.clock() >= until:
                return "refused", f"{fault} for {MOST_BUSY_S:g} s; {FORCE}"
            await asyncio.sleep(self.environment.look_s)
        return None

    def _find_blocker(self) -> str:
        if self.state.agent.is_busy():
            return "a task has been running"
        return "" if self.state.service.read_status().runs else "the agent's service has been stopped"


def _read_package(request: UpgradeRequest, build: Build) -> bytes:
    if build.size > MOST_PACKAGE:
        raise ConfigError(f"{build.file} has {build.size} bytes, more than {MOST_PACKAGE}")
    package = request.read_package(build.size)
    if len(package) != build.size or hashlib.sha256(package).hexdigest() != build.sha256:
        raise CorruptFile(f"the package differs in SHA-256 or size from {build.file} in the signed manifest")
    return package

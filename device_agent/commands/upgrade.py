"""`device-agent upgrade`: install a signed agent version, with trial and rollback."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import msgspec

from device_agent.config import load_file
from device_agent.identity.credentials import CA, CURRENT, FOLDER, MEMBERSHIP, read_membership
from device_agent.upgrade.agent_folder import AgentFolder, as_owner
from device_agent.upgrade.agent_service import SYSTEMCTL, UNIT, SystemdService
from device_agent.upgrade.inputs import ROOTS, STATE_DIR, UpgradeEnvironment, UpgradeRequest
from device_agent.upgrade.record import (
    HOME,
    PROBATION_S,
    UpgradeRecord,
    UpgradeTarget,
    find_versions_folder,
    read_upgrade,
)
from device_agent.upgrade.transitions import next_attempt_number
from device_agent.upgrade.trusted_roots import compute_pin, find_root, read_trusted_pins
from device_agent.upgrade.updater import Updater
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.packages import MOST_SIGNED, decode_manifest, decode_signed_manifest
from shared.runtime import backports, processes
from shared.runtime.command_line import add_command
from shared.runtime.durable import replace_file
from shared.runtime.folder_lock import FolderLock
from shared.runtime.service import READY, find_supervisor
from shared.runtime.support.deb_file import MOST_PACKAGE

EXIT_BACK, EXIT_REFUSED, EXIT_BUSY = 1, 2, 3
CONFIG = Path("/etc/fieldfleet/agent.toml")
READABLE = 0o644
VERBS = {
    "install": "install a version from a package file; roll back if it fails its trial",
    "wanted": "install the versions that the site's rollouts request; the service runs this",
    "status": "show the running version and the outcome of the last upgrade",
    "back": "return to the previous version",
    "trust": "accept packages signed by the site that this board joined",
}

logger = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.epilog = "Exit codes: 0 success, 1 rolled back to the previous version, 2 refused, 3 busy with an upgrade."
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    parsers = {name: add_command(verbs, name, summary) for name, summary in VERBS.items()}
    for verb in parsers.values():
        verb.epilog = parser.epilog
        verb.add_argument("--home", type=Path, metavar="DIR", help=f"folder of the versions; default: {HOME}")
        verb.add_argument("--config", type=Path, metavar="FILE", help=f"the agent's TOML file; default: {CONFIG}")
        verb.add_argument(
            "--roots", type=Path, default=ROOTS, metavar="FILE", help="file of trusted roots; default: %(default)s"
        )
    for name in ("install", "wanted", "back"):
        help_ = "command that takes the arguments of `systemctl` and controls the agent's service; default: %(default)s"
        parsers[name].add_argument("--systemctl", default=SYSTEMCTL[0], metavar="COMMAND", help=help_)
    parsers["status"].add_argument(
        "--format", choices=("text", "json"), default="text", help="output format; default: %(default)s"
    )
    install = parsers["install"]
    install.add_argument("package", type=Path, metavar="FILE.deb", help="package file")
    help_ = "signed manifest; default: FILE.json beside the package"
    install.add_argument("--manifest", type=Path, metavar="FILE", help=help_)
    help_ = "seconds within which the new version must connect and report, else it is rolled back; default: %(default)g"
    install.add_argument("--probation", type=float, default=PROBATION_S, metavar="S", help=help_)
    install.add_argument("--force", action="store_true", help="install even during a task; the task then starts again")
    help_ = "install even if the new version cannot read the state of the current one; moves that state aside"
    install.add_argument("--lose", action="store_true", help=help_)


def run(options: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    processes.configure("info" if options.verb in ("install", "wanted", "back") else "warning", options.verbose)
    environment = _find_environment(options)
    if options.verb == "status":
        return _show(environment, options.format)
    if options.verb == "trust":
        return _trust(environment)
    if not os.access(environment.home, os.W_OK):
        raise ConfigError(f"{environment.home} does not exist or is not writable; run this as root: sudo")
    lock = FolderLock(environment.home)
    try:
        lock.take()
    except ConfigError:
        sys.stderr.write(
            f"device-agent: another upgrade is in progress in {environment.home}: `device-agent upgrade status`\n"
        )
        if options.verb == "back":
            sys.stderr.write(
                "device-agent: `sudo systemctl stop fieldfleet-upgrade` ends it, then repeat this command\n"
            )
        return EXIT_BUSY
    try:
        updater = Updater(environment, SystemdService(UNIT, options.systemctl.split()))
        verbs = {"install": _install, "wanted": _run_requests, "back": _back}
        return verbs[options.verb](updater, options)
    finally:
        lock.release()


def _find_environment(options: argparse.Namespace) -> UpgradeEnvironment:
    settings = {"home": options.home or find_versions_folder() or HOME, "roots": options.roots}
    try:
        return UpgradeEnvironment(state_dir=Path(load_file(options.config or CONFIG).state_dir), **settings)
    except ConfigError as error:
        if options.config:
            raise
        logger.info("%s; using the agent's default folder %s", error, STATE_DIR)
        return UpgradeEnvironment(state_dir=STATE_DIR, **settings)


def _install(updater: Updater, options: argparse.Namespace) -> int:
    """Install a version from a file."""
    signed = _read(options.manifest or options.package.with_suffix(".json"), MOST_SIGNED)
    try:
        version = decode_manifest(decode_signed_manifest(signed).manifest).version  # the updater verifies it later
    except FieldFleetError as error:
        raise ConfigError(f"{options.manifest or options.package.with_suffix('.json')}: {error}") from error
    updater.resume()
    backports.run(updater.watch_trial())
    target = UpgradeTarget(
        version=version, attempt=next_attempt_number(updater.record, version), probation_s=_seconds(options.probation)
    )
    request = UpgradeRequest(
        target,
        lambda: signed,
        lambda size: _read(options.package, min(size, MOST_PACKAGE)),
        by_hand=True,
        force=options.force,
        lose=options.lose,
    )
    record = backports.run(updater.install(request))
    _print(_describe(record, updater.versions.current()))
    return {"committed": 0, "rolled-back": EXIT_BACK}.get(record.state, EXIT_REFUSED)


def _seconds(seconds: float) -> float:
    try:
        return UpgradeTarget(version="0", probation_s=seconds).probation_s
    except ValueError as error:
        raise ConfigError(f"--probation {seconds}: {error}") from error


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _run_requests(updater: Updater, options: argparse.Namespace) -> int:
    """Resume an interrupted upgrade, then install requested versions until none is left."""
    supervisor, done = find_supervisor(), None
    updater.resume()
    supervisor.tell(READY)  # the version is decided, so the agent may start
    backports.run(updater.watch_trial())
    while (request := _read_request(updater.agent)) not in (None, done):
        assert request
        backports.run(updater.install(_open_request(updater.agent, request)))
        done = request
    del options
    return 0


def _read_request(agent: AgentFolder) -> UpgradeTarget | None:
    try:
        return agent.read_target()
    except (ConfigError, CorruptFile) as error:
        logger.warning("upgrade request ignored: %s", error)
        return None


def _open_request(agent: AgentFolder, request: UpgradeTarget) -> UpgradeRequest:
    name = request.version
    return UpgradeRequest(request, lambda: agent.read_manifest(name), lambda size: agent.read_package(name, size))


def _back(updater: Updater, options: argparse.Namespace) -> int:
    """Return to the previous version."""
    del options
    updater.resume()
    record = updater.roll_back("asked for at the board")
    _print(_describe(record, updater.versions.current()))
    return 0


def _show(environment: UpgradeEnvironment, form: str) -> int:
    record, current = read_upgrade(environment.home), Versions(environment.home).current()
    if form == "json":
        status = {"current": current, "trusts": read_trusted_pins(environment.roots), **msgspec.to_builtins(record)}
        _print(msgspec.json.encode(status).decode())
        return 0
    _print(_describe(record, current))
    pins = read_trusted_pins(environment.roots)
    _print(
        "\n".join(f"trusts packages of root {pin[:16]}…" for pin in pins)
        or "trusts no packages; run `device-agent upgrade trust`"
    )
    return 0


def _describe(record: UpgradeRecord, current: str) -> str:
    """Format a record for people."""
    line = f"version {current or 'none'} runs"
    if record.previous:
        line += f", previous version {record.previous}"
    if record.state == "none":
        return line
    line += f"\nversion {record.to}: {record.state}"
    if record.deployment:
        line += f", by {record.deployment}, attempt {record.attempt}"
    return f"{line}: {record.reason}" if record.reason else line


def _trust(environment: UpgradeEnvironment) -> int:
    """Store the root of the site that this board has joined as trusted."""
    folder = environment.state_dir / FOLDER / CURRENT
    with as_owner(environment.state_dir):
        membership = read_membership(folder)
        if membership is None:
            problem = f"{folder / MEMBERSHIP} does not exist: this board has not joined a site"
            raise ConfigError(f"{problem}; run `device-agent join` first")
        chain = _read(folder / CA, MOST_SIGNED)
    root = find_root(chain, membership.root)
    try:
        replace_file(environment.roots, root, mode=READABLE)
    except PermissionError as error:
        raise ConfigError(f"{environment.roots}: {error.strerror}; run this as root: sudo") from error
    _print(f"packages signed by site {membership.site} are accepted; fingerprint of its root:\n{compute_pin(root)}")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

"""`device-agent upgrade`: take a new version that the site signed, watch it, and go back where it fails."""

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
from device_agent.upgrade.place import ROOTS, STATE_DIR, UpgradePlace, UpgradeRequest
from device_agent.upgrade.record import HOME, PROBATION_S, UpgradeRecord, Wanted, find_home, read_upgrade
from device_agent.upgrade.trusted_roots import find_root, pin_of, trusted_pins
from device_agent.upgrade.updater import Updater
from device_agent.upgrade.verdict import next_attempt
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.packages import MOST_SIGNED, read_manifest, read_signed
from shared.runtime import backports, processes
from shared.runtime.durable import replace_file
from shared.runtime.folder_lock import FolderLock
from shared.runtime.service import READY, find_supervisor
from shared.runtime.support.deb_file import MOST_PACKAGE

EXIT_BACK, EXIT_REFUSED, EXIT_BUSY = 1, 2, 3
CONFIG = Path("/etc/fieldfleet/agent.toml")
READABLE = 0o644
VERBS = {
    "install": "take a version from a package file, and keep it if it proves itself",
    "wanted": "take what the site's rollout told the agent to; the service runs this",
    "status": "show which version runs, and what became of the last one that was offered",
    "back": "go back to the version before",
    "trust": "take packages that the site which this board joined has signed",
}

logger = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.epilog = (
        "Exit codes: 0 done, 1 the new version failed and the one before runs, 2 refused, 3 one is under way."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    parsers = {
        name: verbs.add_parser(name, help=summary, description=summary, epilog=parser.epilog) for name, summary in VERBS.items()
    }
    for verb in parsers.values():
        verb.add_argument("--home", type=Path, metavar="DIR", help=f"folder of the versions; {HOME}")
        verb.add_argument("--config", type=Path, metavar="FILE", help=f"the agent's file; {CONFIG}")
        verb.add_argument(
            "--roots", type=Path, default=ROOTS, metavar="FILE", help="roots that are trusted; %(default)s"
        )
    for name in ("install", "wanted", "back"):
        help_ = "what starts and stops the agent's service, by the words of %(default)s"
        parsers[name].add_argument("--systemctl", default=SYSTEMCTL[0], metavar="COMMAND", help=help_)
    parsers["status"].add_argument("--format", choices=("text", "json"), default="text", help="how to print; %(default)s")
    install = parsers["install"]
    install.add_argument("package", type=Path, metavar="FILE.deb", help="the package")
    help_ = "what the site signed of it; FILE.json beside the package"
    install.add_argument("--manifest", type=Path, metavar="FILE", help=help_)
    help_ = "seconds in which it must be connected and heard; %(default)g"
    install.add_argument("--probation", type=float, default=PROBATION_S, metavar="S", help=help_)
    install.add_argument("--force", action="store_true", help="even while a task runs, which begins anew then")
    help_ = "even if it cannot read what the version before wrote, which is set aside"
    install.add_argument("--lose", action="store_true", help=help_)


def run(options: argparse.Namespace) -> int:
    """Do what is asked; return the exit code."""
    processes.configure("info" if options.verb in ("install", "wanted", "back") else "warning", options.verbose)
    place = _place(options)
    if options.verb == "status":
        return _show(place, options.format)
    if options.verb == "trust":
        return _trust(place)
    if not os.access(place.home, os.W_OK):
        raise ConfigError(f"{place.home} is not this user's to write, or not there; run it as root: sudo")
    lock = FolderLock(place.home)
    try:
        lock.take()
    except ConfigError:
        sys.stderr.write(f"device-agent: an upgrade is under way in {place.home}: `device-agent upgrade status`\n")
        if options.verb == "back":
            sys.stderr.write("device-agent: `sudo systemctl stop fieldfleet-upgrade` ends it, then say so again\n")
        return EXIT_BUSY
    try:
        updater = Updater(place, SystemdService(UNIT, options.systemctl.split()))
        verbs = {"install": _install, "wanted": _take_wanted, "back": _back}
        return verbs[options.verb](updater, options)
    finally:
        lock.release()


def _place(options: argparse.Namespace) -> UpgradePlace:
    settings = {"home": options.home or find_home() or HOME, "roots": options.roots}
    try:
        return UpgradePlace(state_dir=Path(load_file(options.config or CONFIG).state_dir), **settings)
    except ConfigError as error:
        if options.config:
            raise
        logger.info("%s; the agent's folder is taken to be %s", error, STATE_DIR)
        return UpgradePlace(state_dir=STATE_DIR, **settings)


def _install(updater: Updater, options: argparse.Namespace) -> int:
    """Take a version from a file."""
    signed = _read(options.manifest or options.package.with_suffix(".json"), MOST_SIGNED)
    try:
        version = read_manifest(read_signed(signed).manifest).version  # believed once the updater has verified it
    except FieldFleetError as error:
        raise ConfigError(f"{options.manifest or options.package.with_suffix('.json')}: {error}") from error
    updater.settle()
    backports.run(updater.finish())
    target = Wanted(
        version=version, attempt=next_attempt(updater.record, version), probation_s=_seconds(options.probation)
    )
    request = UpgradeRequest(
        target,
        lambda: signed,
        lambda size: _read(options.package, min(size, MOST_PACKAGE)),
        by_hand=True,
        force=options.force,
        lose=options.lose,
    )
    record = backports.run(updater.take(request))
    _print(_describe(record, updater.versions.current()))
    return {"committed": 0, "rolled-back": EXIT_BACK}.get(record.state, EXIT_REFUSED)


def _seconds(seconds: float) -> float:
    try:
        return Wanted(version="0", probation_s=seconds).probation_s
    except ValueError as error:
        raise ConfigError(f"--probation {seconds}: {error}") from error


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _take_wanted(updater: Updater, options: argparse.Namespace) -> int:
    """Go on with what was cut off, then take what the agent was told to, and what it is told meanwhile."""
    supervisor, done = find_supervisor(), None
    updater.settle()
    supervisor.tell(READY)  # from here on the agent may start: what runs is decided
    backports.run(updater.finish())
    while (request := _wanted(updater.agent)) not in (None, done):
        assert request
        backports.run(updater.take(_request(updater.agent, request)))
        done = request
    del options
    return 0


def _wanted(agent: AgentFolder) -> Wanted | None:
    try:
        return agent.wanted()
    except (ConfigError, CorruptFile) as error:
        logger.warning("what is wanted is passed over: %s", error)
        return None


def _request(agent: AgentFolder, request: Wanted) -> UpgradeRequest:
    name = request.version
    return UpgradeRequest(request, lambda: agent.signed(name), lambda size: agent.package(name, size))


def _back(updater: Updater, options: argparse.Namespace) -> int:
    """Go back to the version before."""
    del options
    updater.settle()
    record = updater.go_back("asked for at the board")
    _print(_describe(record, updater.versions.current()))
    return 0


def _show(place: UpgradePlace, form: str) -> int:
    record, current = read_upgrade(place.home), Versions(place.home).current()
    if form == "json":
        status = {"current": current, "trusts": trusted_pins(place.roots), **msgspec.to_builtins(record)}
        _print(msgspec.json.encode(status).decode())
        return 0
    _print(_describe(record, current))
    pins = trusted_pins(place.roots)
    _print("\n".join(f"trusts packages of root {pin[:16]}…" for pin in pins) or "trusts no packages: `upgrade trust`")
    return 0


def _describe(record: UpgradeRecord, current: str) -> str:
    """Return a record in words for people."""
    line = f"version {current or 'none'} runs"
    if record.previous:
        line += f", {record.previous} ran before and is kept"
    if record.state == "none":
        return line
    line += f"\nversion {record.to}: {record.state}"
    if record.deployment:
        line += f", by {record.deployment}, attempt {record.attempt}"
    return f"{line}: {record.reason}" if record.reason else line


def _trust(place: UpgradePlace) -> int:
    """Write down the root of the site that this board has joined."""
    folder = place.state_dir / FOLDER / CURRENT
    with as_owner(place.state_dir):
        membership = read_membership(folder)
        if membership is None:
            problem = f"{folder / MEMBERSHIP} is not there: this board has joined no site"
            raise ConfigError(f"{problem}; `device-agent join` first")
        chain = _read(folder / CA, MOST_SIGNED)
    root = find_root(chain, membership.root)
    try:
        replace_file(place.roots, root, mode=READABLE)
    except PermissionError as error:
        raise ConfigError(f"{place.roots}: {error.strerror}; run it as root: sudo") from error
    _print(f"packages that site {membership.site} signed are taken: its root has the fingerprint\n{pin_of(root)}")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

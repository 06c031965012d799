"""`edge-server site` and `revoke`: make a site, see whether it is as it was made, shut a device of it out for good."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli.gateway.package_import import import_folder, read_in_background
from shared.errors import ConfigError
from shared.runtime import processes
from shared.runtime.clock import utc_seconds
from shared.runtime.support import units
from shared.runtime.text_table import TextColumn, TextTable, write_text

if TYPE_CHECKING:
    from edge_server.gateway.check import Finding
    from edge_server.gateway.reload import ReloadResult
    from edge_server.gateway.rotation.root import RootRotation
    from edge_server.gateway.site_folder import SiteFolder
    from edge_server.gateway.state import SiteState

log = logging.getLogger(__name__)

EXIT_BAD = 1
DEFAULT_FOLDER = Path("/etc/fieldfleet/site")
SERVICES = ("mosquitto", "fieldfleet-enrolment")
"""What systemd starts once there is a site in its usual place: Debian's broker, and who answers boards."""
STATE_LABELS = {"good": "ok", "advice": "note", "bad": "FAULT"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command and its verbs take."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    init = verbs.add_parser("init", help="write all files of a site; again to bring them up to date")
    init.add_argument("--name", default="", metavar="NAME", help="of the site; needed the first time")
    help_ = "name or IP address of this gateway, as boards reach it; repeat for more; default: this machine's name"
    init.add_argument("--address", action="append", default=[], metavar="HOST", help=help_)
    init.add_argument("--port", type=int, default=None, metavar="N", help="of the broker; default: 8883")
    help_ = "the only address at which the broker listens; default: all"
    init.add_argument("--bind", default=None, metavar="IP", help=help_)
    help_ = "who the broker runs as, where root makes the site; default: mosquitto"
    init.add_argument("--broker-user", default=None, metavar="USER", help=help_)
    help_ = "take in what it has for boards: fieldfleet-agent_*.deb, and wheels for `device-agent setup`"
    init.add_argument("--packages", type=Path, default=None, metavar="FOLDER", help=help_)
    check = verbs.add_parser("check", help="see whether a site is as it was made; stop a broker that is open")
    check.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    verbs.add_parser("reload", help="have the broker take its files anew, and stop it if it does not heed them")
    verbs.add_parser("rotate-server", help="give the broker, the services and the probe new keys")
    rotate = verbs.add_parser("rotate-ca", help="make the next site CA; both are good until --finish")
    rotate.add_argument("--finish", action="store_true", help="refuse what the CA before signed from now on")
    rotate.add_argument("--force", action="store_true", help="with --finish: also where boards have nothing else yet")
    root = verbs.add_parser("rotate-root", help="make the next root, to which boards move by themselves until --finish")
    root.add_argument("--finish", action="store_true", help="go by the next root alone from now on")
    root.add_argument("--force", action="store_true", help="with --finish: also where boards have not moved yet")
    for verb_parser in verbs.choices.values():
        add_folder(verb_parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Declare the option that names the folder of a site."""
    help_ = f"of the site; default: {DEFAULT_FOLDER}"
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=help_)


def site(options: argparse.Namespace) -> int:
    """Do what a verb of `site` says; return the exit code.

    Raises:
        ConfigError: There is no such site, or a file, a name or an address is not as it has to be.
    """
    deeds = {
        "init": _init,
        "check": _check,
        "reload": _reload,
        "rotate-server": _rotate_server,
        "rotate-ca": _rotate_ca,
        "rotate-root": _rotate_root,
    }
    return deeds[options.verb](options)


def utc_now() -> datetime:
    """Return the time by which certificates are judged."""
    return datetime.fromtimestamp(utc_seconds(), UTC)


def open_site(options: argparse.Namespace) -> SiteFolder:
    """Return the site's folder that the options name; failures of its broker are logged.

    Raises:
        ConfigError: The user that its broker is to run as is none.
    """
    from edge_server.gateway.site_folder import open_folder  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    return open_folder(options.folder, getattr(options, "broker_user", None))


def _init(options: argparse.Namespace) -> int:
    from edge_server.gateway.initialise import SiteSettings, initialise, link_services  # noqa: PLC0415

    if options.port is not None and not 1 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: give 1 to {(1 << 16) - 1}")
    folder = open_site(options)
    before = folder.path.is_dir()
    settings = SiteSettings(options.name, tuple(options.address), options.port or 0, options.bind)
    with read_in_background(options.packages) as packages:  # where there are none, nothing is made
        state = initialise(folder, settings, utc_now())
        link_services(folder)
    wrote = list(folder.changed)
    if options.packages:
        import_folder(folder, options.packages, packages())
    if not wrote:
        if options.packages:
            return 0
        write_text(sys.stdout, f"site {state.site} in {folder.path} is as it was: nothing was changed")
        return 0
    lines = [f"site {state.site} in {folder.path}: wrote {', '.join(wrote)}"]
    runs = not before and folder.path == DEFAULT_FOLDER and units.can_start_services()
    refusal = units.restart(*SERVICES) if runs else ""
    if refusal:
        sys.stderr.write(f"edge-server: {' and '.join(SERVICES)} are not both running: {refusal}\n")
    write_text(sys.stdout, *lines, *_next_steps(folder, state, is_new=not before, runs=runs and not refusal))
    return EXIT_BAD if refusal else 0


def _next_steps(folder: SiteFolder, state: SiteState, *, is_new: bool, runs: bool) -> list[str]:
    """Return what to do, now that files of a site were written.

    Args:
        is_new: Whether there was none before.
        runs: Whether systemd runs its broker and its enrolment service by now.
    """
    if not is_new:
        wants = "another port of the broker, or another gateway/own.pem, wants a restart of it"
        return [f"next: `edge-server site reload` has a running broker take them; {wants}"]
    from edge_server.gateway.authority import fingerprint  # noqa: PLC0415
    from edge_server.gateway.certificate_files import newest_root  # noqa: PLC0415

    root = fingerprint(newest_root(folder.ca(""))).hex()
    where = f" --folder {folder.path}" if folder.path != DEFAULT_FOLDER else ""
    debian = "Debian's, with a site in its usual place: `systemctl restart mosquitto`"
    start = f"start mosquitto with {folder.path / 'mosquitto.conf'} ({debian})"
    started = f"{' and '.join(SERVICES)} run: `edge-server enrol NAME` makes a token for a board" if runs else start
    return [
        f"boards reach it at {', '.join(state.addresses)}, port {state.port}; its root is {root}",
        "next:",
        f"1. move {folder.ca('root.key')} to a medium that is kept elsewhere: only rotating the CA needs it",
        f"2. {started}",
        f"3. `edge-server site check{where}`",
        f"4. write a plan and name it in {folder.path / 'server.toml'}",
    ]


def _check(options: argparse.Namespace) -> int:
    from edge_server.gateway.check import check_site  # noqa: PLC0415

    findings = asyncio.run(check_site(open_site(options), utc_now(), stops=True))
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings), indent=1).decode() + "\n")
    else:
        write_text(sys.stdout, findings_table(findings))
    return EXIT_BAD if any(finding.state == "bad" for finding in findings) else 0


def findings_table(findings: Sequence[Finding]) -> TextTable:
    """Return findings as people read them."""
    columns = [TextColumn(), TextColumn("what"), TextColumn("is so", least=30), TextColumn("mend", least=20)]
    return TextTable(
        columns, [[STATE_LABELS[finding.state], finding.about, finding.told, finding.mend] for finding in findings]
    )


def _reload(options: argparse.Namespace) -> int:
    from edge_server.gateway.reload import reload_broker  # noqa: PLC0415

    return report_reload(
        asyncio.run(reload_broker(open_site(options))), "the broker has taken its files and heeds them"
    )


def _rotate_server(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.rotate import rotate_server  # noqa: PLC0415

    done = asyncio.run(rotate_server(open_site(options), utc_now()))
    return report_reload(done.reloaded, "the broker shows its new certificate; who is connected stays so")


def _rotate_ca(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.rotate import finish_ca, rotate_ca  # noqa: PLC0415

    if options.force and not options.finish:
        raise ConfigError("--force: say --finish too")
    folder = open_site(options)
    if options.finish:
        done = asyncio.run(finish_ca(folder, force=options.force))
        return report_reload(done.reloaded, "what the CA before signed is refused; who is connected by it stays so")
    done = asyncio.run(rotate_ca(folder, utc_now()))
    code = report_reload(done.reloaded, "the next site CA signs; what the one before signed is good still")
    boards = f"once {', '.join(done.pending)} have renewed their certificates" if done.pending else "now"
    write_text(sys.stdout, f"next: `edge-server site rotate-ca --finish`, {boards}; take {folder.ca('root.key')} away")
    return code


def _rotate_root(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.root import finish_root, rotate_root  # noqa: PLC0415

    if options.force and not options.finish:
        raise ConfigError("--force: say --finish too")
    folder = open_site(options)
    if not options.finish:
        done = asyncio.run(rotate_root(folder, utc_now()))
        code = report_reload(done.reloaded, "both roots are in force; new tokens name the next one")
        write_text(sys.stdout, *_next_of_root(folder, done))
        return code
    done = asyncio.run(finish_root(folder, utc_now(), force=options.force))
    code = report_reload(done.reloaded, "the gateway goes by the next root alone; who is connected stays so")
    if done.pending and not code:
        late = "move when they are switched on, until a rotate-ca, which waits for them"
        write_text(sys.stdout, f"{', '.join(done.pending)} {late}; `edge-server revoke NAME` shuts one out")
    return code


def _next_of_root(folder: SiteFolder, done: RootRotation) -> list[str]:
    """Return what to do while two roots are in force."""
    from edge_server.gateway.authority import fingerprint  # noqa: PLC0415
    from edge_server.gateway.certificate_files import newest_root  # noqa: PLC0415

    remove = f"{folder.ca('root.key')} signs nothing any more: take it away, and destroy it when all is done"
    names, roots = ", ".join(done.pending), folder.ca("root.crt")
    moving = f"leave {names} on: they move within 8 hours; `edge-server site check` says who is left"
    peers = [f"give the servers of {', '.join(done.peers)} {roots}, which has both roots"] * bool(done.peers)
    steps = [
        f"move {folder.ca('root-next.key')} to a medium that is kept elsewhere, as root.key; {remove}",
        *([moving] if done.pending else []),
        *peers,
        "`edge-server site rotate-root --finish`",
        "`sudo device-agent upgrade trust` on boards that take upgrades, before the next rotate-ca",
    ]
    root = fingerprint(newest_root(folder.ca(""))).hex()
    return [f"the next root is {root}; next:", *(f"{number}. {step}" for number, step in enumerate(steps, 1))]


def report_reload(done: ReloadResult, message: str) -> int:
    """Say what became of a reload; return the exit code.

    Args:
        done: What became of it.
        message: What is so where all went well.
    """
    if done.faults:
        sys.stderr.write(f"edge-server: {'; '.join(done.faults)}\n")  # the log says what became of the broker
        return EXIT_BAD
    write_text(sys.stdout, message if done.running else "no broker is running: it holds from its start")
    return 0


def revoke_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `revoke` takes."""
    parser.add_argument("name", metavar="NAME", help="of the device; of another site's server `_peer-SITE`")
    add_folder(parser)


def revoke(options: argparse.Namespace) -> int:
    """Revoke a device; return the exit code: 1 where its broker had to be stopped for it.

    Raises:
        ConfigError: There is no such site, or no such device was enrolled there.
    """
    from edge_server.gateway.revocation import revoke as revoking  # noqa: PLC0415

    done = asyncio.run(revoking.revoke(open_site(options), options.name, utc_now()))
    return report_reload(done, f"{options.name} is revoked: its session is gone, and nothing in its name passes")

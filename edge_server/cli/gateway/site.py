"""`edge-server site` and `revoke`: create, check and rotate a site, revoke its devices."""

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
from edge_server.cli.terminal import write_text
from shared.errors import ConfigError
from shared.runtime import processes
from shared.runtime.clock import utc_seconds
from shared.runtime.command_line import add_command
from shared.runtime.support import units
from shared.runtime.text_table import TextColumn, TextTable

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
"""Units that systemd starts for a site in the default folder: Debian's broker and the enrolment service."""
STATE_LABELS = {"good": "ok", "advice": "note", "bad": "FAULT"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command and its verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    init = add_command(verbs, "init", "create a site's files, or update them")
    init.add_argument("--name", default="", metavar="NAME", help="name of the site; required the first time")
    help_ = "name or IP address of this gateway for boards; may be repeated; default: this machine's name"
    init.add_argument("--address", action="append", default=[], metavar="HOST", help=help_)
    init.add_argument("--port", type=int, default=None, metavar="N", help="port of the broker; default: 8883")
    help_ = "let the broker listen on this address only; default: all"
    init.add_argument("--bind", default=None, metavar="IP", help=help_)
    help_ = "system account of the broker, if root creates the site; default: mosquitto"
    init.add_argument("--broker-user", default=None, metavar="USER", help=help_)
    help_ = "folder of files to offer to boards: fieldfleet-agent_*.deb, and wheels for `device-agent setup`"
    init.add_argument("--packages", type=Path, default=None, metavar="FOLDER", help=help_)
    check = add_command(
        verbs,
        "check",
        "check a site's files and broker; stops the broker if it accepts clients or messages that it must reject",
    )
    check.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    add_command(
        verbs,
        "reload",
        "reload the broker's files, verify that the broker enforces them, and stop the broker if it does not",
    )
    add_command(
        verbs,
        "rotate-server",
        "replace the keys of the broker, the server's services and the check client",
    )
    rotate = add_command(verbs, "rotate-ca", "create the next site CA; the previous one stays valid until --finish")
    rotate.add_argument("--finish", action="store_true", help="reject certificates of the previous CA from now on")
    rotate.add_argument(
        "--force",
        action="store_true",
        help="with --finish: even if some boards have only a certificate of the previous CA",
    )
    root = add_command(
        verbs,
        "rotate-root",
        "create the next root CA; boards switch to it automatically; both are valid until --finish",
    )
    root.add_argument("--finish", action="store_true", help="use only the next root CA from now on")
    root.add_argument("--force", action="store_true", help="with --finish: even if some boards have not switched")
    for verb_parser in verbs.choices.values():
        add_folder(verb_parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the folder of a site."""
    help_ = f"folder of the site; default: {DEFAULT_FOLDER}"
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=help_)


def site(options: argparse.Namespace) -> int:
    """Run a verb of `site`; return the exit code.

    Raises:
        ConfigError: There is no such site, or a file, a name or an address is invalid.
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
    """Return the current time for checking certificates."""
    return datetime.fromtimestamp(utc_seconds(), UTC)


def open_site(options: argparse.Namespace) -> SiteFolder:
    """Return the site's folder from the options, with logging of broker failures.

    Raises:
        ConfigError: The broker's user does not exist.
    """
    from edge_server.gateway.site_folder import open_folder  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    return open_folder(options.folder, getattr(options, "broker_user", None))


def _init(options: argparse.Namespace) -> int:
    from edge_server.gateway.initialise import SiteSettings, initialise, link_services  # noqa: PLC0415

    if options.port is not None and not 1 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: use 1 to {(1 << 16) - 1}")
    folder = open_site(options)
    before = folder.path.is_dir()
    settings = SiteSettings(options.name, tuple(options.address), options.port or 0, options.bind)
    with read_in_background(options.packages) as packages:  # fails before anything is written
        state = initialise(folder, settings, utc_now())
        link_services(folder)
    wrote = list(folder.changed)
    if options.packages:
        import_folder(folder, options.packages, packages())
    if not wrote:
        if options.packages:
            return 0
        write_text(sys.stdout, f"site {state.site} in {folder.path} is up to date: nothing was changed")
        return 0
    lines = [f"site {state.site} in {folder.path}: wrote {', '.join(wrote)}"]
    runs = not before and folder.path == DEFAULT_FOLDER and units.can_start_services()
    refusal = units.restart(*SERVICES) if runs else ""
    if refusal:
        sys.stderr.write(f"edge-server: {' and '.join(SERVICES)} are not both running: {refusal}\n")
    write_text(sys.stdout, [*lines, *_next_steps(folder, state, is_new=not before, runs=runs and not refusal)])
    return EXIT_BAD if refusal else 0


def _next_steps(folder: SiteFolder, state: SiteState, *, is_new: bool, runs: bool) -> list[str]:
    """Return the operator's next steps after files of a site were written.

    Args:
        is_new: The site did not exist before.
        runs: Its broker and enrolment service have been started by systemd.
    """
    if not is_new:
        wants = "after a change of the broker's port or of gateway/own.pem, restart it"
        return [f"next: reload a running broker by `edge-server site reload`; {wants}"]
    from edge_server.gateway.authority import fingerprint  # noqa: PLC0415
    from edge_server.gateway.certificate_files import newest_root  # noqa: PLC0415

    root = fingerprint(newest_root(folder.ca(""))).hex()
    where = f" --folder {folder.path}" if folder.path != DEFAULT_FOLDER else ""
    debian = "for Debian's, with a site in the default folder: `systemctl restart mosquitto`"
    start = f"start mosquitto with {folder.path / 'mosquitto.conf'} ({debian})"
    started = f"{' and '.join(SERVICES)} are running: create a token by `edge-server enrol NAME`" if runs else start
    return [
        f"boards reach it at {', '.join(state.addresses)}, port {state.port}; its root is {root}",
        "next:",
        f"1. move {folder.ca('root.key')} to offline media: only rotating the CA needs it",
        f"2. {started}",
        f"3. run `edge-server site check{where}`",
        f"4. write a plan and set its path in {folder.path / 'server.toml'}",
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
    """Return findings as a table."""
    columns = [TextColumn(), TextColumn("check"), TextColumn("finding", least=30), TextColumn("fix", least=20)]
    return TextTable(
        columns, [[STATE_LABELS[finding.state], finding.about, finding.told, finding.mend] for finding in findings]
    )


def _reload(options: argparse.Namespace) -> int:
    from edge_server.gateway.reload import reload_broker  # noqa: PLC0415

    return report_reload(asyncio.run(reload_broker(open_site(options))), "the broker enforces its reloaded files")


def _rotate_server(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.rotate import rotate_server  # noqa: PLC0415

    done = asyncio.run(rotate_server(open_site(options), utc_now()))
    return report_reload(done.reloaded, "the broker serves its new certificate; open connections stay")


def _rotate_ca(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.rotate import finish_ca, rotate_ca  # noqa: PLC0415

    if options.force and not options.finish:
        raise ConfigError("--force: use it with --finish")
    folder = open_site(options)
    if options.finish:
        done = asyncio.run(finish_ca(folder, force=options.force))
        return report_reload(done.reloaded, "certificates of the previous CA are rejected; open connections stay")
    done = asyncio.run(rotate_ca(folder, utc_now()))
    code = report_reload(done.reloaded, "the next site CA signs; certificates of the previous one are still valid")
    when = f"once {', '.join(done.pending)} have renewed their certificates" if done.pending else "now"
    write_text(sys.stdout, f"next: remove {folder.ca('root.key')}; run `edge-server site rotate-ca --finish` {when}")
    return code


def _rotate_root(options: argparse.Namespace) -> int:
    from edge_server.gateway.rotation.root import finish_root, rotate_root  # noqa: PLC0415

    if options.force and not options.finish:
        raise ConfigError("--force: use it with --finish")
    folder = open_site(options)
    if not options.finish:
        done = asyncio.run(rotate_root(folder, utc_now()))
        code = report_reload(done.reloaded, "both roots are valid; new tokens contain the next one")
        write_text(sys.stdout, _next_of_root(folder, done))
        return code
    done = asyncio.run(finish_root(folder, utc_now(), force=options.force))
    code = report_reload(done.reloaded, "the gateway uses only the next root; open connections stay")
    if done.pending and not code:
        late = "switch to it once online, until a rotate-ca, which waits for them"
        write_text(sys.stdout, f"{', '.join(done.pending)} {late}; revoke one by `edge-server revoke NAME`")
    return code


def _next_of_root(folder: SiteFolder, done: RootRotation) -> list[str]:
    """Return the operator's next steps while two roots are in force."""
    from edge_server.gateway.authority import fingerprint  # noqa: PLC0415
    from edge_server.gateway.certificate_files import newest_root  # noqa: PLC0415

    remove = f"{folder.ca('root.key')} is no longer needed: remove it, and destroy it when all is done"
    names, roots = ", ".join(done.pending), folder.ca("root.crt")
    moving = f"leave {names} on: they switch within 8 hours; see `edge-server site check`"
    peers = [f"give the servers of {', '.join(done.peers)} {roots}, which has both roots"] * bool(done.peers)
    steps = [
        f"move {folder.ca('root-next.key')} to offline media, as root.key; {remove}",
        *([moving] if done.pending else []),
        *peers,
        "run `edge-server site rotate-root --finish`",
        "run `sudo device-agent upgrade trust` on boards that accept upgrades, before the next rotate-ca",
    ]
    root = fingerprint(newest_root(folder.ca(""))).hex()
    return [f"the next root is {root}; next:", *(f"{number}. {step}" for number, step in enumerate(steps, 1))]


def report_reload(done: ReloadResult, message: str) -> int:
    """Print the result of a reload; return the exit code.

    Args:
        message: Printed if there was no fault.
    """
    if done.faults:
        sys.stderr.write(f"edge-server: {'; '.join(done.faults)}\n")  # the log reports whether the broker was stopped
        return EXIT_BAD
    write_text(sys.stdout, message if done.running else "no broker is running: it applies at its next start")
    return 0


def revoke_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `revoke`."""
    parser.add_argument("name", metavar="NAME", help="name of a device, or _peer-SITE for the server of another site")
    add_folder(parser)


def revoke(options: argparse.Namespace) -> int:
    """Revoke a device; return the exit code: 1 if its broker had to be stopped.

    Raises:
        ConfigError: There is no such site, or no such device was enrolled there.
    """
    from edge_server.gateway.revocation import revoke as revoking  # noqa: PLC0415

    done = asyncio.run(revoking.revoke(open_site(options), options.name, utc_now()))
    return report_reload(done, f"{options.name} is revoked: its session has ended, and its messages are rejected")

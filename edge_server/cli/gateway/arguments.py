"""Arguments and entry functions of the gateway commands except `site` and `revoke`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from edge_server.cli.gateway.packages import packages_arguments
from edge_server.cli.gateway.site import add_folder
from edge_server.gateway.enrolment.tokens import MOST_TTL_S
from shared.errors import ConfigError
from shared.protocol.enrolment import USUAL_PORT
from shared.runtime import processes
from shared.runtime.command_line import add_command

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
USUAL_DAYS = 365.0
APPROVE, FORGET = "approve", "forget"


def add_commands(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands of a gateway."""
    enrol_arguments(add_command(verbs, "enrol", "create, list or revoke one-time tokens by which boards join"))
    help_ = "manage the agent versions and wheels that this gateway offers to boards"
    packages_arguments(add_command(verbs, "packages", help_))
    help_ = "serve joining boards and certificate renewals over HTTPS"
    service_arguments(add_command(verbs, "enrolment-service", help_))
    help_ = "find present and imminent faults of this gateway; suggest fixes"
    doctor_arguments(add_command(verbs, "doctor", help_))
    help_ = "write one diagnostic archive without secrets"
    bundle_arguments(add_command(verbs, "support-bundle", help_))


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server doctor`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="server's configuration file; default: the site's")
    add_folder(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    help_ = "first apply safe fixes: permissions of secret files, files that `site init` can write again"
    parser.add_argument("--fix", action="store_true", help=help_)


def bundle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server support-bundle`."""
    parser.description = (
        "Write one tar.gz with versions, settings, doctor's findings, summaries of runs, lists of files and the ends "
        "of logs; without keys, passwords, tokens, addresses and serial numbers. Review it before you send it."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="server's configuration file; default: the site's")
    add_folder(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: server-bundle-TIME.tar.gz, in this folder")
    help_ = "include the end of this log; may be repeated; default: the services' logs from the journal"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=help_)


def enrol_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server enrol`."""
    parser.add_argument("device", nargs="?", default="", metavar="NAME", help="the board's name, such as pi-03")
    add_folder(parser)
    parser.add_argument(
        "--ttl",
        type=duration_s,
        default=900.0,
        metavar="TIME",
        help="validity of the token, such as 15m or 2h; default: 15m",
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="create tokens for N boards")
    parser.add_argument(
        "--pattern",
        default="pi-{:02}",
        metavar="NAME",
        help="with --count: pattern of the boards' names; default: pi-{:02}",
    )
    parser.add_argument("--csv", action="store_true", help="print lines of device,token,id,expires")
    help_ = "print the shell line that installs, joins and starts the agent on a new board; run `packages add` first"
    parser.add_argument("--install", action="store_true", help=help_)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write the token's QR code to this file")
    help_ = "create a token for NAME although it was revoked; the board gets a new key"
    parser.add_argument("--readmit", action="store_true", help=help_)
    parser.add_argument(
        "--address",
        default="",
        metavar="HOST",
        help="address of the gateway in the token; default: the first of `site init --address`",
    )
    help_ = f"port of the enrolment service in the token; default: the port the service last used, else {USUAL_PORT}"
    parser.add_argument("--port", type=int, metavar="N", help=help_)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="list tokens and the boards that used them")
    instead.add_argument("--revoke", default="", metavar="ID", help="revoke the token with this ID of --list")


def service_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server enrolment-service`."""
    add_folder(parser)
    parser.add_argument("--host", default="", metavar="ADDRESS", help="address to listen on; default: all")
    parser.add_argument("--port", type=int, default=USUAL_PORT, metavar="N", help="TCP port; default: %(default)s")
    help_ = "validity of a certificate in days; at least three times the longest time that a board is off; default: 365"
    parser.add_argument("--days", type=float, default=USUAL_DAYS, metavar="N", help=help_)


def device_verb_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `edge-server devices approve NAME` and `devices forget NAME`."""
    help_ = (
        "`devices approve NAME`: let board NAME renew a certificate that expired more than 180 days ago; "
        "`devices forget NAME`: remove board NAME and its history from the list"
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=help_)
    add_folder(parser)


def device_verb(options: argparse.Namespace) -> str:
    """Return the verb of a `devices` command: `approve`, `forget`, or empty.

    Raises:
        ConfigError: It names two devices, or a verb without a device.
    """
    if (options.device in (APPROVE, FORGET)) != bool(options.name):
        what = f"{options.name!r}: use one DEVICE at a time" if options.name else "add the NAME of the board"
        raise ConfigError(
            f"{what}; `edge-server devices approve NAME` allows a board to renew its certificate, `edge-server devices "
            "forget NAME` removes one permanently"
        )
    return str(options.device) if options.name else ""


def duration_s(text: str) -> float:
    """Parse a duration such as 90s, 15m, 2h or 1d into seconds.

    Raises:
        argparse.ArgumentTypeError: It is malformed, or longer than a token may be valid.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", text)
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= MOST_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r}: use 90s, 15m, 2h or 1d, at most 30d")
    return seconds


def enrol(options: argparse.Namespace) -> int:
    """Create, list or revoke one-time enrolment tokens."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - slow imports

    processes.configure("warning", options.verbose)
    return command.enrol(options)


def approve(options: argparse.Namespace) -> int:
    """Allow a board to renew a certificate that expired long ago."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - slow imports

    processes.configure("warning", options.verbose)
    return command.approve_renewal(options)


def enrolment_service(options: argparse.Namespace) -> int:
    """Answer boards until a signal arrives."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - slow imports

    processes.configure("info", options.verbose)
    return command.serve_enrolment(options)


def doctor(options: argparse.Namespace) -> int:
    """Diagnose this gateway."""
    from edge_server.cli.gateway import doctor as command  # noqa: PLC0415 - slow imports

    return command.doctor(options)


def support_bundle(options: argparse.Namespace) -> int:
    """Write a support bundle."""
    from edge_server.cli.gateway import bundle as command  # noqa: PLC0415 - slow imports

    processes.configure("warning", options.verbose)
    return command.support_bundle(options)

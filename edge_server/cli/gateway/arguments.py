"""Command lines of a gateway beside `site` and `revoke`; what they do is imported when they are run."""

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

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
USUAL_DAYS = 365.0
APPROVE, FORGET = "approve", "forget"


def add_commands(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands of a gateway."""
    enrol_arguments(verbs.add_parser("enrol", help="make a one-time token by which a board joins; list, withdraw them"))
    help_ = "versions of the agent, and what boards set themselves up with, as this gateway offers them"
    packages_arguments(verbs.add_parser("packages", help=help_))
    help_ = "answer boards that join, and those that renew their certificates, over HTTPS"
    service_arguments(verbs.add_parser("enrolment-service", help=help_))
    help_ = "say what keeps this gateway from its work, or soon will, and how to mend it"
    doctor_arguments(verbs.add_parser("doctor", help=help_))
    help_ = "write one file for whoever helps, without what is secret"
    bundle_arguments(verbs.add_parser("support-bundle", help=help_))


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `edge-server doctor`."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's file; default: the site's own")
    add_folder(parser)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    help_ = "first mend what can be mended without harm: modes of secrets, files that `site init` makes anew"
    parser.add_argument("--fix", action="store_true", help=help_)


def bundle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `edge-server support-bundle`."""
    parser.description = (
        "Write one tar.gz with versions, settings, what doctor finds, what runs came to, lists of files and the ends "
        "of logs; without keys, passwords, tokens, addresses and serial numbers. Look into it before you send it."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's file; default: the site's own")
    add_folder(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: server-bundle-TIME.tar.gz here")
    help_ = "a log whose end goes in too; repeat for more; default: those of the services, of the journal"
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help=help_)


def enrol_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `edge-server enrol`."""
    parser.add_argument("device", nargs="?", default="", metavar="NAME", help="the board's name, such as pi-03")
    add_folder(parser)
    parser.add_argument(
        "--ttl", type=duration_s, default=900.0, metavar="TIME", help="how long it can be used: 15m, 2h; default: 15m"
    )
    parser.add_argument("--count", type=int, default=0, metavar="N", help="tokens for so many boards at once")
    parser.add_argument(
        "--pattern", default="pi-{:02}", metavar="NAME", help="with --count: their names, from 1 on; default: pi-{:02}"
    )
    parser.add_argument("--csv", action="store_true", help="as lines of device,token,id,expires")
    help_ = "print the line that installs the agent on a bare board, joins and starts it; `packages add` comes before"
    parser.add_argument("--install", action="store_true", help=help_)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the QR code of the token there too")
    help_ = "let NAME in again although it was revoked, by a new key; without this it is refused"
    parser.add_argument("--readmit", action="store_true", help=help_)
    parser.add_argument("--address", default="", metavar="HOST", help="of the gateway; default: the site's first")
    help_ = f"of the enrolment service; default: the one on which it was last started, else {USUAL_PORT}"
    parser.add_argument("--port", type=int, metavar="N", help=help_)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show the tokens that were made, and who used them")
    instead.add_argument("--revoke", default="", metavar="ID", help="withdraw a token")


def service_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `edge-server enrolment-service`."""
    add_folder(parser)
    parser.add_argument("--host", default="", metavar="ADDRESS", help="to listen on; default: all of this machine")
    parser.add_argument("--port", type=int, default=USUAL_PORT, metavar="N", help="default: %(default)s")
    help_ = "how long a board's certificate is valid, at least three times its longest time off; default: %(default)g"
    parser.add_argument("--days", type=float, default=USUAL_DAYS, metavar="N", help=help_)


def device_verb_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `edge-server devices approve NAME` and `devices forget NAME` take beside what `devices` does."""
    help_ = (
        "`devices approve NAME`: let a board renew a certificate that ended more than 180 days ago; `devices forget "
        "NAME`: remove a board that is gone for good from the list, with its history"
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=help_)
    add_folder(parser)


def device_verb(options: argparse.Namespace) -> str:
    """Return what a command line of `devices` does with one device: `approve`, `forget`, or nothing.

    Raises:
        ConfigError: It names two things and is none.
    """
    if (options.device in (APPROVE, FORGET)) != bool(options.name):
        what = f"{options.name!r}: one DEVICE at a time" if options.name else "name the board"
        raise ConfigError(
            f"{what}; `edge-server devices approve NAME` lets a board renew its certificate, `edge-server devices "
            "forget NAME` removes one that is gone for good"
        )
    return str(options.device) if options.name else ""


def duration_s(text: str) -> float:
    """Return the seconds of a text such as 90s, 15m, 2h or 1d.

    Raises:
        argparse.ArgumentTypeError: It is none, or more than a token may be good for.
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", text)
    seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= MOST_TTL_S:
        raise argparse.ArgumentTypeError(f"{text!r}: write 90s, 15m, 2h or 1d, at most 30d")
    return seconds


def enrol(options: argparse.Namespace) -> int:
    """Make one-time tokens by which boards join, list them, or withdraw one."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - what makes certificates takes its time

    processes.configure("warning", options.verbose)
    return command.enrol(options)


def approve(options: argparse.Namespace) -> int:
    """Let a board renew a certificate that ended long ago."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - as above

    processes.configure("warning", options.verbose)
    return command.approve(options)


def enrolment_service(options: argparse.Namespace) -> int:
    """Answer boards until a signal comes."""
    from edge_server.cli.gateway import enrol as command  # noqa: PLC0415 - as above

    processes.configure("info", options.verbose)
    return command.serve(options)


def doctor(options: argparse.Namespace) -> int:
    """Say what keeps this gateway from its work."""
    from edge_server.cli.gateway import doctor as command  # noqa: PLC0415 - as above

    return command.doctor(options)


def support_bundle(options: argparse.Namespace) -> int:
    """Write one file for whoever helps."""
    from edge_server.cli.gateway import bundle as command  # noqa: PLC0415 - as above

    processes.configure("warning", options.verbose)
    return command.support_bundle(options)

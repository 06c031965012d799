"""`edge-server rollout`: offer a release to the boards of a site, wave by wave; watch it, stop it, take it back."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli import folders
from shared.errors import ConfigError
from shared.runtime import processes
from shared.runtime.text_table import write_text

if TYPE_CHECKING:
    from edge_server.journal.rollouts.file import AnyRolloutRecord, Order
    from edge_server.journal.rollouts.state import RolloutState
    from edge_server.plan.server_config import ServerConfig
    from edge_server.release.rollout.agents import StoredAgent
    from edge_server.release.rollout.orders import KnownRollout
    from edge_server.release.store import StoredRelease

log = logging.getLogger(__name__)

EXIT_SHORT, EXIT_INTERRUPTED = 1, 130
SOAK_S, AGENT_SOAK_S = 600.0, 120.0
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
VERBS: dict[str, str] = {
    "start": "begin to roll a release out",
    "status": "show what came of a rollout so far",
    "pause": "open no other wave",
    "resume": "go on, after a pause, a failure that is to be passed over, or the end of the process",
    "abort": "end it; boards that have the release keep it",
    "back": "end it, and have its boards serve what they served before",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command and its verbs take."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, meaning in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=meaning)
        if verb == "start":
            _start_arguments(verb_parser)
        else:
            verb_parser.add_argument("rollout", nargs="?", default="", metavar="ROLLOUT", help="default: the last one")
        if verb in ("start", "resume", "abort", "back"):
            verb_parser.add_argument(
                "--stay", action="store_true", help="go on for boards that are away, until a signal comes"
            )
        if verb in ("start", "resume"):
            help_ = "stop, with code 1, when nobody has been there for so long who could take it; default: 60s"
            verb_parser.add_argument("--wait", type=_parse_seconds, default=60.0, metavar="T", help=help_)
        folders.add_options(verb_parser, form=True)


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("release", nargs="?", default="", metavar="RELEASE", help="NAME/VERSION, or NAME for its newest")
    help_ = "in place of a release: a version of the agent itself, of those that `edge-server packages list` shows"
    what.add_argument("--agent", default="", metavar="VERSION", help=help_)
    help_ = "boards of each profile that are first, 0 for none; default: %(default)s"
    parser.add_argument("--canary", type=_parse_count, default=1, metavar="N", help=help_)
    help_ = "shares of the boards that have been offered it after each wave; default: 10%%,50%%,100%%"
    parser.add_argument("--waves", type=_parse_shares, default=(0.1, 0.5, 1.0), metavar="X%,...", help=help_)
    help_ = "how long each board watches it before it commits it, such as 90s, 1h; default: 10m, of the agent 2m"
    parser.add_argument("--soak", type=_parse_seconds, default=None, metavar="T", help=help_)
    help_ = "stop when so many boards refused it or went back; default: %(default)s"
    parser.add_argument("--max-failures", type=_parse_count, default=1, metavar="N", help=help_)
    help_ = "what is done then: stop, or take it back from the boards that have it; default: %(default)s"
    parser.add_argument("--on-failure", choices=("stop", "back"), default="stop", help=help_)
    parser.add_argument("--devices", default="*", metavar="PATTERN", help="only boards so named, such as 'pi-*'")
    help_ = "accuracy that may be lost on a board's own examples; default: %(default)s"
    parser.add_argument("--max-drop", type=_parse_share, default=0.02, metavar="X", help=help_)
    help_ = "boards of later waves fetch nothing before their wave: its parts go once a wave, not once for all"
    parser.add_argument("--no-ahead", dest="ahead", action="store_false", help=help_)
    help_ = "a board that fetches it more slowly has failed, in kB/s; default: 16"
    parser.add_argument("--min-rate", type=_parse_rate, default=16.0, metavar="X", help=help_)
    help_ = "longest p95 of an inference; default: 1.5 times the version before"
    parser.add_argument("--max-latency-ms", type=_parse_milliseconds, default=0.0, metavar="MS", help=help_)


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give 0 or more")
    return int(text)


def _parse_number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r}: give {expected}")
    return value


def _parse_share(text: str) -> float:
    return _parse_number(text, lambda value: 0 <= value <= 1, "a share from 0 to 1")


def _parse_rate(text: str) -> float:
    return _parse_number(text, lambda value: 0 < value < math.inf, "kB/s, more than 0")


def _parse_milliseconds(text: str) -> float:
    return _parse_number(
        text, lambda value: 0 <= value < math.inf, "milliseconds, or 0 for 1.5 times the version before"
    )


def _parse_shares(text: str) -> tuple[float, ...]:
    """Return shares that only grow, of `10%,50%,100%`."""
    try:
        shares = tuple(float(part.strip().removesuffix("%")) / 100 for part in text.split(","))
    except ValueError:
        shares = ()
    is_growing = all(0 < share <= 1 for share in shares) and list(shares) == sorted(set(shares))
    if not shares or not is_growing:
        raise argparse.ArgumentTypeError(f"{text!r}: give shares that grow, such as 10%,50%,100%")
    return shares


def _parse_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2]]


def rollout(options: argparse.Namespace, received_by: Callable[[], set[int]]) -> int:
    """Do what the verb says.

    Args:
        options: Of the command line.
        received_by: Lets signals cancel the current task; returns the set of those that came.

    Raises:
        ConfigError: There is no such release or rollout, another one is under way, or there is no server's file.
        CorruptFile: A journal or a release is damaged.
        Unreachable: There is no broker.
    """
    from edge_server.release.rollout import orders  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    if options.verb == "status":
        rollout = orders.open_rollout(options.data_dir, options.rollout)
        _show(options, rollout.state)
        return EXIT_SHORT if rollout.state.outcome not in (None, "finished") else 0
    if options.verb == "start":
        return _drive(options, _start(options), received_by)
    rollout = orders.open_rollout(options.data_dir, options.rollout)
    order: Order = options.verb
    orders.give_order(rollout, order)
    if order == "pause" or orders.is_driven(options.data_dir):
        sys.stdout.write(f"{rollout.state.plan.deployment}: {order} is ordered\n")
        return 0
    return _drive(options, lambda: rollout, received_by)


def _start(options: argparse.Namespace) -> Callable[[], KnownRollout]:
    """Return what begins a rollout, once what can be said against it was looked at."""
    from edge_server.journal.rollouts.file import RolloutPlan  # noqa: PLC0415
    from edge_server.release.rollout.agents import find_agent, site_of  # noqa: PLC0415
    from edge_server.release.rollout.orders import begin_rollout, require_none_under_way  # noqa: PLC0415
    from edge_server.release.store import find_release  # noqa: PLC0415

    names = ("canary", "waves", "max_failures", "on_failure", "devices", "max_drop", "max_latency_ms", "ahead")
    settings = {name: getattr(options, name) for name in names}
    usual_s = AGENT_SOAK_S if options.agent else SOAK_S
    settings |= {
        "soak_s": usual_s if options.soak is None else options.soak,
        "ahead": options.ahead and not options.agent,
    }
    settings["least_bytes_per_s"] = options.min_rate * 1e3
    try:
        terms = msgspec.convert({"deployment": "", "release": "", "sha256": "", **settings}, RolloutPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"rollout start: {error}") from error
    if options.agent:
        stored: StoredRelease | StoredAgent = find_agent(site_of(_config(options).gateway), options.agent)
    else:
        stored = find_release(options.data_dir, options.release)
    require_none_under_way(options.data_dir)
    return lambda: begin_rollout(options.data_dir, stored, terms)


def _drive(
    options: argparse.Namespace, open_rollout: Callable[[], KnownRollout], received_by: Callable[[], set[int]]
) -> int:
    """Drive a rollout in this process until nothing is left to do."""
    from edge_server.release.rollout import drive  # noqa: PLC0415

    config = _config(options)

    async def go() -> tuple[RolloutState | None, set[int]]:
        received = received_by()
        try:
            return await drive.drive(
                config, open_rollout, stays=stays, wait_s=wait_s, tell=_print_record, wait=_say
            ), received
        except asyncio.CancelledError:
            return None, received

    stays = getattr(options, "stay", False)
    wait_s = math.inf if stays else getattr(options, "wait", math.inf)
    state, received = asyncio.run(go())
    if state is None:
        verb = "abort" if options.verb == "abort" else "resume"
        sys.stderr.write(f"edge-server: interrupted; `edge-server rollout {verb} --config {options.config}` goes on\n")
        return EXIT_INTERRUPTED if signal.SIGINT in received else 0
    _show(options, state)
    expected = {"abort": "aborted", "back": "taken-back"}.get(options.verb, "finished")
    return 0 if state.outcome == expected else EXIT_SHORT


def _config(options: argparse.Namespace) -> ServerConfig:
    from edge_server.plan.server_config import load  # noqa: PLC0415

    if not options.config:
        raise ConfigError(f"rollout {options.verb}: name the server's file, which says where the broker is: --config")
    config = load(options.config)
    return msgspec.structs.replace(config, data_dir=str(options.data_dir))


def _print_record(state: RolloutState, record: AnyRolloutRecord) -> None:
    from edge_server.release.rollout.tables import record_line  # noqa: PLC0415

    if line := record_line(state, record):
        _say(line)


def _say(why: str) -> None:
    sys.stderr.write(why + "\n")
    sys.stderr.flush()


def _show(options: argparse.Namespace, state: RolloutState) -> None:
    from edge_server.journal.rollouts.state import summarise  # noqa: PLC0415
    from edge_server.release.rollout import tables  # noqa: PLC0415

    if options.format == "json":
        data = msgspec.json.encode(summarise(state))
        sys.stdout.write(msgspec.json.format(data, indent=1).decode() + "\n")
        return
    write_text(sys.stdout, *tables.heading_lines(state), tables.boards_table(state))

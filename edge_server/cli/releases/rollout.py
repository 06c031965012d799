"""`edge-server rollout`: roll out a release in waves; watch, stop or revert it."""

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
from edge_server.cli.terminal import write_text
from shared.errors import ConfigError
from shared.runtime import processes
from shared.runtime.command_line import add_command

if TYPE_CHECKING:
    from edge_server.journal.rollouts.file import AnyRolloutRecord, Order
    from edge_server.journal.rollouts.state import RolloutState
    from edge_server.plan.server_config import ServerConfig
    from edge_server.release.rollout.agents import StoredAgent
    from edge_server.release.rollout.orders import LoadedRollout
    from edge_server.release.store import StoredRelease

log = logging.getLogger(__name__)

EXIT_INCOMPLETE, EXIT_INTERRUPTED = 1, 130
SOAK_S, AGENT_SOAK_S = 600.0, 120.0
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
VERBS: dict[str, str] = {
    "start": "start a rollout of a release",
    "status": "show the state of a rollout",
    "pause": "stop opening waves; boards of open waves finish",
    "resume": "continue a rollout after a pause, an interruption or failures; earlier failures do not count",
    "abort": "end a rollout; boards that have the release keep it",
    "back": "end a rollout and revert its boards to their previous release",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command and its verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, meaning in VERBS.items():
        verb_parser = add_command(verbs, verb, meaning)
        if verb == "start":
            _start_arguments(verb_parser)
        else:
            verb_parser.add_argument("rollout", nargs="?", default="", metavar="ROLLOUT", help="default: the last one")
        if verb in ("start", "resume", "abort", "back"):
            verb_parser.add_argument(
                "--stay", action="store_true", help="wait for offline boards until interrupted (Ctrl-C or SIGTERM)"
            )
        if verb in ("start", "resume"):
            help_ = "stop with exit code 1 if no eligible board has been online for T; default: 60s"
            verb_parser.add_argument("--wait", type=_parse_seconds, default=60.0, metavar="T", help=help_)
        folders.add_options(verb_parser, form=True)


def _start_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("release", nargs="?", default="", metavar="RELEASE", help="NAME/VERSION, or NAME for the newest")
    help_ = "roll out this version of the agent instead, from `edge-server packages list`"
    what.add_argument("--agent", default="", metavar="VERSION", help=help_)
    help_ = (
        "size of the first wave (canaries): N boards of each board profile, 0 for no such wave; default: %(default)s"
    )
    parser.add_argument("--canary", type=_parse_count, default=1, metavar="N", help=help_)
    help_ = "share of all boards that has the release after each later wave; default: 10%%,50%%,100%%"
    parser.add_argument("--waves", type=_parse_shares, default=(0.1, 0.5, 1.0), metavar="X%,...", help=help_)
    help_ = "time that each board tests the release before keeping it, such as 90s, 1h; default: 10m; with --agent: 2m"
    parser.add_argument("--soak", type=_parse_seconds, default=None, metavar="T", help=help_)
    help_ = "stop the rollout when N boards have refused or reverted the release; default: %(default)s"
    parser.add_argument("--max-failures", type=_parse_count, default=1, metavar="N", help=help_)
    help_ = "after --max-failures: only stop, or also revert the updated boards (back); default: %(default)s"
    parser.add_argument("--on-failure", choices=("stop", "back"), default="stop", help=help_)
    parser.add_argument(
        "--devices", default="*", metavar="PATTERN", help="only boards whose names match PATTERN, for example 'pi-*'"
    )
    help_ = "allowed loss of accuracy on a board's local examples; default: %(default)s"
    parser.add_argument("--max-drop", type=_parse_share, default=0.02, metavar="X", help=help_)
    help_ = (
        "boards download only when their wave opens; by default, all download at once, so that each part is sent once"
    )
    parser.add_argument("--no-ahead", dest="ahead", action="store_false", help=help_)
    help_ = "minimum download rate in kB/s, below which a board has failed; default: 16"
    parser.add_argument("--min-rate", type=_parse_rate, default=16.0, metavar="X", help=help_)
    help_ = "maximum p95 latency of an inference; default: 1.5 times the previous version's"
    parser.add_argument("--max-latency-ms", type=_parse_milliseconds, default=0.0, metavar="MS", help=help_)


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: use 0 or more")
    return int(text)


def _parse_number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r}: use {expected}")
    return value


def _parse_share(text: str) -> float:
    return _parse_number(text, lambda value: 0 <= value <= 1, "a share from 0 to 1")


def _parse_rate(text: str) -> float:
    return _parse_number(text, lambda value: 0 < value < math.inf, "kB/s, more than 0")


def _parse_milliseconds(text: str) -> float:
    return _parse_number(text, lambda value: 0 <= value < math.inf, "milliseconds, or 0 for 1.5 times the previous")


def _parse_shares(text: str) -> tuple[float, ...]:
    """Parse increasing shares such as `10%,50%,100%`."""
    try:
        shares = tuple(float(part.strip().removesuffix("%")) / 100 for part in text.split(","))
    except ValueError:
        shares = ()
    is_growing = all(0 < share <= 1 for share in shares) and list(shares) == sorted(set(shares))
    if not shares or not is_growing:
        raise argparse.ArgumentTypeError(f"{text!r}: use increasing shares, such as 10%,50%,100%")
    return shares


def _parse_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: use 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2]]


def rollout(options: argparse.Namespace, received_by: Callable[[], set[int]]) -> int:
    """Start, show or control a rollout.

    Args:
        received_by: Makes signals cancel the current task; returns the set of received ones.

    Raises:
        ConfigError: There is no such release or rollout, another one is in progress, or there is no server's file.
        CorruptFile: A journal or a release is damaged.
        Unreachable: The broker cannot be reached.
    """
    from edge_server.release.rollout import orders  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    if options.verb == "status":
        rollout = orders.open_rollout(options.data_dir, options.rollout)
        _show(options, rollout.state)
        return EXIT_INCOMPLETE if rollout.state.outcome not in (None, "finished") else 0
    if options.verb == "start":
        return _drive(options, _start(options), received_by)
    rollout = orders.open_rollout(options.data_dir, options.rollout)
    order: Order = options.verb
    orders.give_order(rollout, order)
    if order == "pause" or orders.is_driven(options.data_dir):
        sys.stdout.write(f"{rollout.state.plan.deployment}: {order} requested\n")
        return 0
    return _drive(options, lambda: rollout, received_by)


def _start(options: argparse.Namespace) -> Callable[[], LoadedRollout]:
    """Validate a new rollout; return a function that begins it."""
    from edge_server.journal.rollouts.file import RolloutPlan  # noqa: PLC0415
    from edge_server.release.rollout.agents import find_agent, require_site_folder  # noqa: PLC0415
    from edge_server.release.rollout.orders import begin_rollout, require_no_active_rollout  # noqa: PLC0415
    from edge_server.release.store import find_release  # noqa: PLC0415

    names = ("canary", "waves", "max_failures", "on_failure", "devices", "max_drop", "max_latency_ms", "ahead")
    settings = {name: getattr(options, name) for name in names}
    usual_s = AGENT_SOAK_S if options.agent else SOAK_S
    settings["soak_s"] = usual_s if options.soak is None else options.soak
    settings["ahead"] = options.ahead and not options.agent
    settings["least_bytes_per_s"] = options.min_rate * 1e3
    try:
        terms = msgspec.convert({"deployment": "", "release": "", "sha256": "", **settings}, RolloutPlan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"rollout start: {error}") from error
    if options.agent:
        stored: StoredRelease | StoredAgent = find_agent(require_site_folder(_config(options).gateway), options.agent)
    else:
        stored = find_release(options.data_dir, options.release)
    require_no_active_rollout(options.data_dir)
    return lambda: begin_rollout(options.data_dir, stored, terms)


def _drive(
    options: argparse.Namespace, open_rollout: Callable[[], LoadedRollout], received_by: Callable[[], set[int]]
) -> int:
    """Drive a rollout in this process until it is complete."""
    from edge_server.release.rollout import drive  # noqa: PLC0415
    from edge_server.release.rollout.link import RolloutOptions  # noqa: PLC0415

    config = _config(options)

    async def go() -> tuple[RolloutState | None, set[int]]:
        received = received_by()
        try:
            return await drive.drive(config, open_rollout, settings), received
        except asyncio.CancelledError:
            return None, received

    stays = getattr(options, "stay", False)
    wait_s = math.inf if stays else getattr(options, "wait", math.inf)
    settings = RolloutOptions(stays, wait_s, _print_record, _say)
    state, received = asyncio.run(go())
    if state is None:
        verb = "abort" if options.verb == "abort" else "resume"
        sys.stderr.write(f"edge-server: interrupted; `edge-server rollout {verb} --config {options.config}` resumes\n")
        return EXIT_INTERRUPTED if signal.SIGINT in received else 0
    _show(options, state)
    expected = {"abort": "aborted", "back": "taken-back"}.get(options.verb, "finished")
    return 0 if state.outcome == expected else EXIT_INCOMPLETE


def _config(options: argparse.Namespace) -> ServerConfig:
    from edge_server.plan.server_config import load  # noqa: PLC0415

    if not options.config:
        raise ConfigError(f"rollout {options.verb}: add the server's file by --config, for the broker's address")
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
    write_text(sys.stdout, [*tables.heading_lines(state), tables.boards_table(state)])

"""`device-agent profile`: show and validate firmware profiles; apply clocks and power mode."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from device_agent.commands.diagnosis import record_board
from device_agent.exchange.state_files import ensure_writable
from device_agent.measurement.tuning.apply import JOURNAL_NAME, format_step, hold_settings
from device_agent.measurement.tuning.plan import Run, Settings, Target, plan_steps
from device_agent.measurement.tuning.settings import read_settings
from device_agent.profile.load import (
    SUFFIX,
    UNKNOWN_PROFILE,
    load_all,
    load_file,
    load_for_board,
    read_identity,
    read_source,
)
from shared.errors import ConfigError
from shared.runtime.command_line import add_command
from shared.runtime.folder_lock import hold_lock
from shared.runtime.text_table import TextColumn, TextTable, write_text

HERTZ_PER_MHZ = 1e6
MAX_S = 1e6
STOPS = (signal.SIGINT, signal.SIGTERM)
EXIT_DONE, EXIT_FAILED = 0, 1


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = add_command(verbs, "show", "print the profile of this board")
    show.add_argument(
        "--format",
        choices=("toml", "json"),
        default="toml",
        help="toml: the file with its comments (default); json: all values",
    )
    _add_board_options(show)
    _add_board_options(add_command(verbs, "list", "list all shipped profiles; a star marks this board's"))
    check = add_command(verbs, "check", "validate profile files")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for name, summary in (
        ("plan", "print the changes without applying them"),
        ("apply", "apply the changes until Ctrl-C, then restore everything"),
    ):
        verb = add_command(verbs, name, summary)
        verb.add_argument("--governor", default="", help="governor of all CPU frequency policies")
        verb.add_argument("--max-mhz", type=float, default=0.0, metavar="MHZ", help="highest clock; rounded down")
        verb.add_argument("--power-mode", default="", metavar="NAME", help="power mode of a Jetson")
        _add_board_options(verb)
        if name == "apply":
            verb.add_argument("--for", type=float, dest="seconds", metavar="SECONDS", help="stop after this time")
            help_ = "folder for the settings to restore; default: %(default)s"
            verb.add_argument("--state-dir", type=Path, default="/var/lib/fieldfleet", metavar="DIR", help=help_)


def _add_board_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="auto", metavar="NAME", help="profile id, TOML file, or auto (default)")
    help_ = "read a folder written by `device-agent probe --record` instead of this machine"
    parser.add_argument("--root", type=record_board.find_root, default="/", metavar="DIR", help=help_)


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return {"show": _show, "list": _list, "check": _check, "plan": _plan, "apply": _apply}[options.verb](options)


def _show(options: argparse.Namespace) -> int:
    profile = load_for_board(options.root, options.profile)
    if options.format == "toml" and profile != UNKNOWN_PROFILE:
        text = read_source(options.profile if options.profile.endswith(SUFFIX) else profile.id).rstrip()
    else:
        text = msgspec.json.format(msgspec.json.encode(profile)).decode()
    sys.stdout.write(f"{text}\n")  # verbatim, not folded to the terminal's width
    return EXIT_DONE


def _list(options: argparse.Namespace) -> int:
    identity, mine = read_identity(options.root), load_for_board(options.root, options.profile)
    rows = [(f"{'*' if id_ == mine.id else ' '} {id_}", profile.name) for id_, profile in load_all().items()]
    write_text(sys.stdout, TextTable((TextColumn(), TextColumn(least=16)), rows))
    _print(f"this board identifies itself as: {', '.join(identity.tokens()) or 'nothing'}")
    return EXIT_DONE


def _check(options: argparse.Namespace) -> int:
    wrong = 0
    for path in options.files:
        try:
            _print(f"{path}: well formed: {load_file(path).name}")
        except ConfigError as error:
            wrong += 1
            _print(str(error))
    return EXIT_FAILED if wrong else EXIT_DONE


def _plan(options: argparse.Namespace) -> int:
    profile, target = load_for_board(options.root, options.profile), _parse_target(options)
    now = read_settings(options.root, profile)
    steps = plan_steps(now, target)
    _print(_format_settings(now))
    for step in steps:
        _print(f"  {format_step(step)}")
        if isinstance(step, Run):
            _print("  then the clocks, within the limits of that mode")
    if not steps:
        _print("  nothing to do")
    return EXIT_DONE


def _apply(options: argparse.Namespace) -> int:
    if options.seconds is not None and not 0 < options.seconds <= MAX_S:
        raise ConfigError(f"--for {options.seconds:g}: must be above 0, up to {MAX_S:g} seconds")
    target, journal = (
        _parse_target(options),
        ensure_writable(options.state_dir, "give a folder this user may write as --state-dir") / JOURNAL_NAME,
    )
    profile = load_for_board(options.root, options.profile)
    # Signals stay blocked until sigwait below, so that the board is never left half configured.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with hold_lock(journal.parent), hold_settings(options.root, profile, target, journal) as now:
        _print(_format_settings(now))
        _print("set until Ctrl-C" if options.seconds is None else f"set for {options.seconds:g} s, or until Ctrl-C")
        sys.stdout.flush()
        if options.seconds is None:
            signal.sigwait(STOPS)
        else:
            signal.sigtimedwait(STOPS, options.seconds)
    if journal.exists():
        _print("not everything could be restored, see above; the next start tries again")
        return EXIT_FAILED
    _print("restored")
    return EXIT_DONE


def _parse_target(options: argparse.Namespace) -> Target:
    target = Target(power_mode=options.power_mode, governor=options.governor, max_hertz=options.max_mhz * HERTZ_PER_MHZ)
    if target == Target():
        raise ConfigError("nothing to set; give --governor, --max-mhz or --power-mode")
    return target


def _format_settings(now: Settings) -> str:
    lines = [
        f"{name}: {clocks.governor}, {clocks.min_hertz / HERTZ_PER_MHZ:g} to {clocks.max_hertz / HERTZ_PER_MHZ:g} MHz"
        for name, clocks in now.policies.items()
    ]
    if now.power_mode:
        lines.append(f"power mode: {now.power_mode}, of {', '.join(now.power_modes)}")
    return "\n".join(lines) or "this board has no clocks and no power mode to set"


def _print(line: str) -> None:
    write_text(sys.stdout, line)

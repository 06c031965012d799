"""`device-agent probe`: print or record this board's measurements, once or repeatedly."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device_agent.commands.diagnosis import board_text, record_board
from device_agent.commands.diagnosis.board_text import compute_rates
from device_agent.config import BoardConfig, load
from device_agent.hardware import tools
from device_agent.hardware.files import is_folder
from device_agent.measurement.board import Board, load_measuring, open_board, run_probes
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.link_test import probe_link
from device_agent.probes import PROBES
from device_agent.probes.base import ProbeResult, describe_absence
from device_agent.probes.power.source import TOTAL_WATTS
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from shared.errors import ConfigError, NoData
from shared.protocol.measurements import Absent, Reading
from shared.runtime import backports
from shared.runtime.clock import monotonic
from shared.runtime.extras import find_readable_config
from shared.runtime.text_table import terminal_columns

MIN_WATCH_S, USUAL_WATCH_S, MAX_WATCH_S = 0.2, 2.0, 3600.0
CONFIG_HELP = "the agent's TOML file, for its [board] table; default: the package's file, if readable"
SECOND_READ_S = 1.0
WIDTH = 80
CLEAR = "\x1b[H\x1b[J"


class ProbeOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of the command as JSON: all readings, absences and facts, and the id of the board's profile."""

    board: str
    readings: dict[str, Reading]
    absent: dict[str, Absent]
    facts: dict[str, str]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--root",
        type=record_board.find_root,
        metavar="DIR",
        help="read a folder written by `probe --record` instead of this machine",
    )
    parser.add_argument("--profile", metavar="ID", help="use this firmware profile instead of the detected one")
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        help="output format; default: table; with --watch into a pipe: json, one line each time",
    )
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=USUAL_WATCH_S,
        metavar="SECONDS",
        help=f"repeat every SECONDS seconds (default: {USUAL_WATCH_S:g}), and show the rates of counters",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="copy all sensor files to a new folder, without serial numbers, addresses and network names",
    )
    parser.add_argument(
        "--link",
        action="store_true",
        help="also measure the link to the broker of --config, by saturating it for about 10 seconds",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; a board that measures nothing is not a failure: the table shows what is absent and why."""
    if options.watch is not None and not MIN_WATCH_S <= options.watch <= MAX_WATCH_S:
        raise ConfigError(f"--watch {options.watch:g}: {MIN_WATCH_S} to {MAX_WATCH_S:g} seconds")
    options.config = options.config or _find_default_config(options)
    if options.link and (not options.config or options.record or options.watch is not None):
        raise ConfigError("--link needs --config FILE for the broker, and excludes --record and --watch")
    board = _open_board(options)
    if options.record:
        _record(board, options.record)
    elif options.watch is not None:
        shape = options.format or ("table" if sys.stdout.isatty() else "json")
        backports.run(_watch(board, options.watch, in_table=shape == "table"))
    else:
        result = backports.run(read_twice(board))
        if options.link:
            link = backports.run(probe_link(load(options.config)))
            result = replace(result, readings=result.readings | link.readings, absent=result.absent | link.absent)
        width = terminal_columns(sys.stdout)
        in_table = options.format != "json"
        _print(
            board_text.format_table(board.profile, result, width) if in_table else _format_json(board.profile, result)
        )
    return 0


def _find_default_config(options: argparse.Namespace) -> Path | None:
    """Return the package's file if no option selects a board and this user may read it."""
    return None if options.root or options.profile else find_readable_config("agent.toml")


def _open_board(options: argparse.Namespace) -> Board:
    config = load(options.config) if options.config else None
    board = config.board if config else BoardConfig()
    if options.root:
        board = replace(board, root=str(options.root))
    if options.profile:
        board = replace(board, profile=options.profile)
    if not is_folder(Path(board.root)):
        raise ConfigError(f"{board.root} is not a folder; name the root of a recorded board")
    return open_board(load_measuring(board, Path(config.state_dir)) if config else MeasurementSettings(board=board))


def _read_all(board: Board) -> ProbeResult:
    """Read all probes, and the total power as the agent would."""
    result = run_probes(board.root, board.profile, PROBES, monotonic)
    if board.power is None:
        return result
    try:
        total = board.power.source.read()
    except NoData as error:
        if TOTAL_WATTS in result.readings and board.measuring.board.meter is None:
            return result
        readings = {name: reading for name, reading in result.readings.items() if name != TOTAL_WATTS}
        return replace(result, readings=readings, absent=result.absent | {TOTAL_WATTS: describe_absence(error)})
    others = {name: lack for name, lack in result.absent.items() if name not in (TOTAL_WATTS, "power")}
    return replace(result, readings=result.readings | {TOTAL_WATTS: total}, absent=others)


async def read_twice(board: Board) -> ProbeResult:
    """Read once, and again if a counter or model needs two reads for the power."""
    result = _read_all(board)
    if board.root == tools.LIVE_ROOT and board.power is not None and TOTAL_WATTS not in result.readings:
        await asyncio.sleep(SECOND_READ_S)
        result = _read_all(board)
    return result


async def _watch(board: Board, period_s: float, *, in_table: bool) -> None:
    before: dict[str, Reading] = {}
    while True:
        result = _read_all(board)
        with_rates = replace(result, readings=compute_rates(before, result.readings) | result.readings)
        before = result.readings
        _print(_format_screen(board.profile, with_rates) if in_table else _format_json(board.profile, with_rates))
        await asyncio.sleep(period_s)


def _format_screen(profile: Profile, result: ProbeResult) -> list[str]:
    """Format the whole table, drawn over the previous one on a terminal; a table taller than the terminal scrolls.

    In a pipe or a file the tables follow each other, separated by an empty line.
    """
    if not sys.stdout.isatty():
        return [*board_text.format_table(profile, result), ""]
    size = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS may describe another terminal
    lines = board_text.format_table(profile, result, size.columns or WIDTH)
    return [CLEAR + lines[0], *lines[1:]]


def _record(board: Board, folder: Path) -> None:
    summary = record_board.record(board.root, folder)
    copy = folder / record_board.ROOT
    profile = load_for_board(copy, board.measuring.board.profile)
    record_board.save_expected(
        folder, record_board.make_expected(profile, run_probes(copy, profile, PROBES, monotonic))
    )
    rows = [(name, f"did not answer: {lack}") for name, lack in sorted(summary.lacks.items())]
    rows += [(name, "left out: too large") for name in summary.left_out]
    _print(
        [
            f"{folder}: {summary.files} files, {summary.size_bytes / 1024:.0f} KiB; board {profile.id}",
            *board_text.format_columns(rows, width=terminal_columns(sys.stdout)),
            "Serial numbers, addresses, network and host names are removed; review it before you share it.",
        ]
    )


def _format_json(profile: Profile, result: ProbeResult) -> list[str]:
    output = ProbeOutput(board=profile.id, readings=result.readings, absent=result.absent, facts=result.facts)
    return [msgspec.json.encode(output).decode()]


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()

"""`device-agent doctor`: diagnose problems of measuring and training, with fixes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from device_agent.commands.diagnosis import examine, record_board
from device_agent.commands.diagnosis.board_text import format_columns
from device_agent.commands.diagnosis.checks import Check
from device_agent.commands.diagnosis.data_check import check_examples
from device_agent.commands.diagnosis.identity import examine_identity, fix_modes
from device_agent.commands.diagnosis.serving import examine_serving
from device_agent.commands.diagnosis.upgrades import examine_upgrade
from device_agent.config import AgentConfig, BoardConfig, load
from device_agent.hardware.files import is_folder
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.inference.release_projects import export_board_plugins
from device_agent.profile.load import UNKNOWN_PROFILE, load_for_board
from device_agent.profile.schema import Profile
from device_agent.upgrade.record import find_versions_folder
from shared.errors import ConfigError, split_remedy
from shared.runtime.extras import find_packaged_config
from shared.runtime.folder_lock import is_held
from shared.runtime.interpreter import find_interpreter
from shared.runtime.text_table import fold_text, terminal_columns

EXIT_BAD, EXIT_CONFIG = 1, 2
CONFIG_HELP = (
    "the agent's TOML file, which names broker, state folder and board; default: the package's file, if it exists"
)
COLOURS = {"ok": "\x1b[32m", "warn": "\x1b[33m", "bad": "\x1b[31m"}
PLAIN = "\x1b[0m"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)
    parser.add_argument(
        "--root",
        type=record_board.find_root,
        metavar="DIR",
        help="read a folder written by `probe --record` instead of this machine",
    )
    help_ = "first apply safe fixes: permissions of the key and the password file"
    parser.add_argument("--fix", action="store_true", help=help_)
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="output format; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Print each check as it completes; return 0 if nothing is bad, 1 if something is, 2 for the configuration."""
    config = options.config or (None if options.root else find_packaged_config("agent.toml"))
    checks: list[Check] = []
    in_colour = sys.stdout.isatty()
    for check in run_checks(config, options.root, fix=options.fix):
        checks.append(check)
        if options.format == "table":
            _print(format_check(check, terminal_columns(sys.stdout), in_colour=in_colour))
    if options.format == "json":
        _print([msgspec.json.encode(checks).decode()])
    else:
        _print([_format_summary(checks)])
    bad = [check.name for check in checks if check.state == "bad"]
    return EXIT_CONFIG if "config" in bad else EXIT_BAD if bad else 0


def run_checks(path: Path | None, root: Path | None, *, fix: bool = False) -> Iterator[Check]:
    """Yield all checks; without a configuration only those that need none, of a recorded board only its files.

    Args:
        path: Configuration; None for none.
        root: Recorded board; None for this machine.

    Raises:
        ConfigError: The root is not a folder.
    """
    config, check = _check_config(path)
    yield check
    board = config.board if config else BoardConfig()
    root = root or Path(board.root)
    if not is_folder(root):
        raise ConfigError(f"{root} is not a folder; name the root of a recorded board")
    yield from examine.examine_board(root, board, Path(config.state_dir) if config else None)
    if root != LIVE_ROOT:
        return
    yield from examine.examine_machine(config, _load_profile(board.profile))
    if config and config.serve:
        runs = is_held(Path(config.state_dir))
        yield from examine_serving(config, _load_profile(board.profile), agent_runs=runs)
    if config:
        export_board_plugins(config)
        if config.data:
            with suppress(ConfigError):  # reported by the check of torch
                interpreter = find_interpreter(config.trainer.python)
                yield from check_examples(config.data, config.trainer.memory_mb, interpreter=interpreter)
        if fix:
            yield from fix_modes(config.broker)
        yield from examine_identity(config)
        yield from examine_upgrade(find_versions_folder(), Path(config.state_dir))
        yield from examine.examine_broker(config)


def _check_config(path: Path | None) -> tuple[AgentConfig | None, Check]:
    if path is None:
        finding = "none given: broker and state_dir are not checked"
        return None, Check(name="config", state="ok", finding=finding, remedy="name it with --config FILE")
    try:
        config = load(path)
    except ConfigError as error:
        problem, remedy = split_remedy(str(error))
        return None, Check(name="config", state="bad", finding=problem, remedy=remedy)
    return config, Check(name="config", state="ok", finding=f"{path}: device {config.device} of site {config.site}")


def _load_profile(name: str) -> Profile:
    try:
        return load_for_board(LIVE_ROOT, name)
    except ConfigError:
        return UNKNOWN_PROFILE  # reported already


def format_check(check: Check, width: int | None, *, in_colour: bool) -> list[str]:
    """Format a check as lines: state, name and finding in columns, the remedy below.

    Args:
        width: Columns of the terminal; None if it is not one.
    """
    lines = format_columns([(check.state.upper().ljust(4), check.name.ljust(22), check.finding)], width=width)
    lines += fold_text(f"      -> {check.remedy}", width) if check.remedy else []
    if in_colour:
        lines[0] = COLOURS[check.state] + lines[0][:4] + PLAIN + lines[0][4:]
    return lines


def _format_summary(checks: Sequence[Check]) -> str:
    counts = {state: sum(check.state == state for check in checks) for state in ("bad", "warn", "ok")}
    return f"{counts['bad']} bad, {counts['warn']} warnings, {counts['ok']} ok"


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()

"""`device-agent setup`: bring what trains or serves on this board, once the package of the agent is on it."""

from __future__ import annotations

import argparse
import sys

from shared.errors import ConfigError
from shared.runtime.support.command import add_arguments, set_up
from shared.runtime.support.install import find_extras, is_current, name_of
from shared.runtime.support.table import Purpose, choose, find_row, read_table, read_wheels, this_system

PURPOSES: tuple[Purpose, ...] = ("train", "infer")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    help_ = "train: PyTorch, and all of infer; infer: ONNX Runtime alone; left out: say what fits and what is there"
    parser.add_argument("purpose", nargs="?", choices=PURPOSES, help=help_)
    add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Bring it, or say what there is; return the exit code."""
    if options.purpose:
        return set_up(options.purpose, options, _say)
    return _show()


def _show() -> int:
    system, table, wheels = this_system(), read_table(), read_wheels()
    row = find_row(table, system)
    _say(f"{row.systems}: tested {row.tested}")
    for purpose in PURPOSES:
        try:
            choice = choose(table, wheels, system, purpose)
        except ConfigError as error:
            _say(f"{purpose}: {error}")
            continue
        is_there = is_current(find_extras(), name_of(choice, purpose))
        largest = choice.wheels[-1]
        told = f"{choice.bytes / 1e6:.0f} MB, {largest.name} {largest.version} the largest"
        _say(f"{purpose}: {'there' if is_there else f'`device-agent setup {purpose}` brings {told}'}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

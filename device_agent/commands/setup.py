"""`device-agent setup`: bring what trains or serves on this board, once the package of the agent is on it."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping

from device_agent.commands.diagnosis.checks import check_library
from device_agent.config import TrainerConfig
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes.runtime import find_missing_isa, smoke_test
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from device_agent.trainer.beside_serving import choose_trainer_device
from shared.errors import ConfigError
from shared.runtime.support.command import add_arguments, set_up
from shared.runtime.support.install import find_extras, folder_name, is_current
from shared.runtime.support.table import Purpose, choose, find_row, read_table, read_wheels, this_system

PURPOSES: tuple[Purpose, ...] = ("train", "infer")
LIBRARIES: Mapping[Purpose, tuple[str, ...]] = {"train": ("torch", "onnxruntime"), "infer": ("onnxruntime",)}
"""Libraries of a purpose; without the first one the board is of no use for it."""
EXIT_UNUSABLE = 1
"""What was brought does not compute here."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    help_ = "train: PyTorch, and all of infer; infer: ONNX Runtime alone; left out: say what fits and what is there"
    parser.add_argument("purpose", nargs="?", choices=PURPOSES, help=help_)
    add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Bring it and try it, or say what there is; return the exit code."""
    if not options.purpose:
        return _show()
    if code := set_up(options.purpose, options, _say):
        return code
    return 0 if options.list else try_out(options.purpose, load_for_board(LIVE_ROOT))


def try_out(purpose: Purpose, profile: Profile) -> int:
    """Let each installed library compute in a process of its own; return the exit code.

    Args:
        purpose: Decides which libraries are tried.
        profile: Firmware profile of this board.
    """
    code, device = 0, choose_trainer_device(TrainerConfig(), profile)
    needed = LIBRARIES[purpose][0]
    for library in LIBRARIES[purpose]:
        verdict = smoke_test(library, board=profile.id, device=device)
        lacking = find_missing_isa(LIVE_ROOT, library, profile)
        check = check_library(verdict, lacking, platform.machine(), is_needed=library == needed, is_packaged=True)
        _say(f"{library}: {check.finding}" + (f"; {check.remedy}" if check.state != "ok" else ""))
        code = code or (EXIT_UNUSABLE if check.state == "bad" else 0)
    return code


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
        is_there = is_current(find_extras(), folder_name(choice, purpose))
        largest = choice.wheels[-1]
        download = f"{choice.bytes / 1e6:.0f} MB, {largest.name} {largest.version} the largest"
        _say(f"{purpose}: {'there' if is_there else f'`device-agent setup {purpose}` brings {download}'}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

"""`device-agent setup`: install and test PyTorch or ONNX Runtime."""

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
from device_agent.trainer.processor_share import choose_trainer_device
from shared.errors import ConfigError
from shared.runtime.support.command import add_arguments, set_up
from shared.runtime.support.install import find_extras, folder_name, is_current
from shared.runtime.support.table import Purpose, choose, find_row, read_table, read_wheels, this_system

PURPOSES: tuple[Purpose, ...] = ("train", "infer")
LIBRARIES: Mapping[Purpose, tuple[str, ...]] = {"train": ("torch", "onnxruntime"), "infer": ("onnxruntime",)}
"""Libraries of a purpose; the first one is indispensable."""
EXIT_UNUSABLE = 1
"""An installed library does not run on this board."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    help_ = "train: PyTorch and all of infer; infer: ONNX Runtime only; omitted: show what fits and what is installed"
    parser.add_argument("purpose", nargs="?", choices=PURPOSES, help=help_)
    add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Install and test the libraries, or show what is installed; return the exit code."""
    if not options.purpose:
        return _show()
    if code := set_up(options.purpose, options, _print):
        return code
    return 0 if options.list else try_out(options.purpose, load_for_board(LIVE_ROOT))


def try_out(purpose: Purpose, profile: Profile) -> int:
    """Run the smoke test of each installed library; return the exit code."""
    code, device = 0, choose_trainer_device(TrainerConfig(), profile)
    needed = LIBRARIES[purpose][0]
    for library in LIBRARIES[purpose]:
        verdict = smoke_test(library, board=profile.id, device=device)
        lacking = find_missing_isa(LIVE_ROOT, library, profile)
        check = check_library(verdict, lacking, platform.machine(), is_needed=library == needed, is_packaged=True)
        _print(f"{library}: {check.finding}" + (f"; {check.remedy}" if check.state != "ok" else ""))
        code = code or (EXIT_UNUSABLE if check.state == "bad" else 0)
    return code


def _show() -> int:
    system, table, wheels = this_system(), read_table(), read_wheels()
    row = find_row(table, system)
    _print(f"{row.systems}: tested {row.tested}")
    for purpose in PURPOSES:
        try:
            choice = choose(table, wheels, system, purpose)
        except ConfigError as error:
            _print(f"{purpose}: {error}")
            continue
        is_installed = is_current(find_extras(), folder_name(choice, purpose))
        largest = choice.wheels[-1]
        download = f"{choice.bytes / 1e6:.0f} MB, {largest.name} {largest.version} the largest"
        _print(f"{purpose}: {'installed' if is_installed else f'`device-agent setup {purpose}` installs {download}'}")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

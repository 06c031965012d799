"""`device-agent calibrate`: fit this board's power model to a meter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from device_agent.config import MeterConfig, load
from device_agent.measurement.calibrate import CalibrationSetup, calibrate, open_meters
from device_agent.measurement.calibration_file import FILE_NAME, Calibration
from device_agent.profile.load import load_for_board
from shared.errors import ConfigError
from shared.runtime import backports, processes
from shared.runtime.clock import monotonic
from shared.runtime.command_line import add_config
from shared.runtime.folder_lock import hold_lock
from shared.runtime.text_table import write_text

USUAL_MINUTES, MAX_MINUTES = 4.0, 60.0
IDLE_S, PHASE_S = 60.0, 20.0
"""Phases of a calibration of four minutes, with three clocks and three thread counts."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(parser, "agent.toml", "the agent's TOML file")
    parser.add_argument(
        "--meter",
        metavar="KIND=ADDRESS",
        help="reference meter, such as shelly=http://192.0.2.7 or chip=ina226; default: [board.meter], else the "
        "board's sensor",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=USUAL_MINUTES,
        help="approximate duration, on boards whose clocks can be set; default: %(default)g",
    )


def run(options: argparse.Namespace) -> int:
    """Calibrate; the agent must not be running."""
    config = load(options.config)
    processes.configure(config.log_level, options.verbose)
    if not 0 < options.minutes <= MAX_MINUTES:
        raise ConfigError(f"--minutes must be above 0, up to {MAX_MINUTES:g}")
    meter = parse_meter(options.meter) if options.meter else config.board.meter
    root, folder = Path(config.board.root), Path(config.state_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profile = load_for_board(root, config.board.profile)
    reference, sensor = open_meters(root, profile, meter, monotonic)
    _print(
        f"board {profile.id}, meter {reference.provenance.source}"
        + ("; compared with the board's own sensor" if sensor else "")
    )
    share = options.minutes / USUAL_MINUTES
    setup = CalibrationSetup(root, profile, folder, reference, sensor, share * IDLE_S, share * PHASE_S, _print)
    with hold_lock(folder):
        fit = backports.run(calibrate(setup))
    print_fit(fit, folder / FILE_NAME)
    return 0


def parse_meter(text: str) -> MeterConfig:
    """Parse a meter given as `KIND=URL` or `chip=NAME`; raises ConfigError if it is invalid."""
    kind, _, place = text.partition("=")
    try:
        return msgspec.convert({"kind": kind, "chip" if kind == "chip" else "url": place}, MeterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--meter {text}: {error}; give KIND=URL, such as shelly=http://192.0.2.7, or chip=NAME"
        ) from error


def print_fit(calibration: Calibration, path: Path) -> None:
    """Print a calibration for people."""
    model, line = calibration.model, calibration.line
    if model:
        core_w = model.core_joules_per_cycle * model.max_hertz
        _print(
            f"idle {model.idle_w:.2f} W, a busy core {core_w:.2f} W at {model.max_hertz / 1e6:.0f} MHz "
            f"({model.core_joules_per_cycle * 1e9:.2f} nJ a cycle), exponent {model.exponent:.2f}"
        )
    if line:
        _print(f"the whole board draws {line.gain:.3f} times its sensor's value plus {line.offset_w:.2f} W")
    _print(f"residual {calibration.residual_w:.3f} W, R squared {calibration.r_squared:.3f}")
    if fit := line or model:
        meter = f" plus {fit.uncertainty_w:g} W, the meter's error" if fit.uncertainty_w else ""
        _print(f"each figure has an uncertainty of ±{fit.uncertainty:.1%}{meter}")
    if model is None:
        _print("no power model, since this board has several kinds of cores; the agent uses its own sensor")
    _print(f"saved in {path}; the agent uses it from its next start")


def _print(line: str) -> None:
    write_text(sys.stdout, line)

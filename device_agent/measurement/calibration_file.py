"""Calibration of a board against a meter: its file, and its place in the firmware profile."""

from __future__ import annotations

from pathlib import Path

import msgspec

from device_agent.config import BoardConfig
from device_agent.profile.schema import PowerModel, Profile
from shared.errors import CorruptFile
from shared.runtime.durable import replace_file

FILE_NAME = "calibration.json"
MAX_BYTES = 1 << 16


class SensorLine(msgspec.Struct, frozen=True, kw_only=True):
    """Watts of the whole board by those of its own sensor: `gain * sensed + offset_w`.

    Attributes:
        uncertainty: One standard deviation, as a share.
        uncertainty_w: The part of it that is the same at every load: the meter's own error.
    """

    gain: float
    offset_w: float
    uncertainty: float
    uncertainty_w: float = 0.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fit, and the conditions under which it was made.

    Attributes:
        profile: Id of the firmware profile; a fit is of no use with another one.
        meter: What it was fitted against.
        stamp: Calendar time (UTC), for people.
        governor: Of the CPU's clock meanwhile; empty where it is unknown.
        celsius: The hottest zone at its end; None where it is unknown.
        residual_w: Root mean square of what the fit leaves.
        r_squared: Share of the variance that it explains.
        model: Watts by clock and load, where the board has no sensor.
        line: Of the board's own sensor, where it has one.
    """

    profile: str
    meter: str
    stamp: str
    governor: str = ""
    celsius: float | None = None
    residual_w: float
    r_squared: float
    model: PowerModel | None = None
    line: SensorLine | None = None


def save(folder: Path, calibration: Calibration) -> Path:
    """Write a calibration so that a power cut leaves the old one or the new one; return its path.

    Raises:
        Unwritable: The disk takes nothing.
    """
    path = folder / FILE_NAME
    replace_file(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    return path


def load(folder: Path) -> Calibration | None:
    """Load the calibration of a state folder; None where there is none.

    Raises:
        CorruptFile: It cannot be read.
    """
    path = folder / FILE_NAME
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path}: {error}; remove it, or calibrate again") from error


def apply_calibration(profile: Profile, calibration: Calibration | None) -> Profile:
    """Return the profile with the fit of this board in place of the figures for any of its kind."""
    if calibration is None or calibration.profile != profile.id:
        return profile
    power = profile.power
    if calibration.model:
        power = msgspec.structs.replace(power, model=calibration.model)
    if calibration.line:
        line = calibration.line
        figures = {name: getattr(line, name) for name in line.__struct_fields__}
        power = msgspec.structs.replace(power, **figures)
    return msgspec.structs.replace(profile, power=power)


class Measuring(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer measures its tasks.

    Attributes:
        board: As the agent's file has it.
        calibration: Of this very board, if there is one.
    """

    board: BoardConfig = BoardConfig()
    calibration: Calibration | None = None

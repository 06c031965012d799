"""Calibration file of a board, and its application to the firmware profile."""

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
    """Linear correction of the board's own sensor: `watts = gain * sensed + offset_w`.

    Attributes:
        uncertainty: One standard deviation, relative.
        uncertainty_w: Load-independent part of it in watts: the meter's own error.
    """

    gain: float
    offset_w: float
    uncertainty: float
    uncertainty_w: float = 0.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A power fit and its conditions.

    Attributes:
        profile: Id of the firmware profile; the fit is invalid for any other.
        stamp: UTC date and time, for display.
        governor: CPU frequency governor during the calibration; empty if unknown.
        celsius: Hottest zone at its end; None if unknown.
        residual_w: Root mean square of the residuals.
        r_squared: Explained fraction of the variance.
        model: Power model, for a board without a sensor.
        line: Correction of the board's own sensor, if it has one.
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


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write a calibration atomically, safe against power cuts; return its path.

    Raises:
        Unwritable: The disk refuses the write.
    """
    path = folder / FILE_NAME
    replace_file(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    return path


def load_calibration(folder: Path) -> Calibration | None:
    """Load the calibration from a state folder; None if there is none.

    Raises:
        CorruptFile: It is unreadable.
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
    """Replace the profile's generic power figures by this board's fit."""
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


class MeasurementSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement settings of a device's tasks.

    Attributes:
        board: The `[board]` table of the configuration.
        calibration: Calibration of this individual board; None if there is none.
    """

    board: BoardConfig = BoardConfig()
    calibration: Calibration | None = None

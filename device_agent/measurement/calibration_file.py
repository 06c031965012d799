"""What was fitted on this very board against a meter: kept in a file, and put in place of what its profile says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from device_agent.config import BoardConfig
from device_agent.profile.schema import PowerModel, Profile
from shared.errors import CorruptFile
from shared.runtime.durable import replace_file

FILE = "calibration.json"
MAX_BYTES = 1 << 16


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole board takes, by what its own sensor sees: `gain * seen + offset_w`.

    Attributes:
        uncertainty: One standard deviation, as a share.
    """

    gain: float
    offset_w: float
    uncertainty: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fit, and under which conditions it was made.

    Attributes:
        profile: Id of the firmware profile; a fit is of no use with another one.
        meter: What it was fitted against.
        stamp: Calendar time (UTC), for people.
        governor: Of the CPU's clock meanwhile; empty where none is told.
        celsius: The hottest zone at its end; None where none is told.
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
    line: Line | None = None


def save(folder: Path, calibration: Calibration) -> Path:
    """Write a calibration so that a power cut leaves the old one or the new one; return its path.

    Raises:
        Unwritable: The disk takes nothing.
    """
    path = folder / FILE
    replace_file(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    return path


def load(folder: Path) -> Calibration | None:
    """Return the calibration of a state folder; None where there is none.

    Raises:
        CorruptFile: It cannot be read.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Calibration)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptFile(f"{path}: {error}; remove it, or calibrate again") from error


def applied(profile: Profile, calibration: Calibration | None) -> Profile:
    """Return the profile with what was fitted on this board in place of what holds for any of its kind."""
    if calibration is None or calibration.profile != profile.id:
        return profile
    power = profile.power
    if calibration.model:
        power = msgspec.structs.replace(power, model=calibration.model)
    if calibration.line:
        line = calibration.line
        power = msgspec.structs.replace(power, gain=line.gain, offset_w=line.offset_w, uncertainty=line.uncertainty)
    return msgspec.structs.replace(profile, power=power)


class Measuring(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer measures what it does.

    Attributes:
        board: As the agent's file says.
        calibration: What was fitted on this very board, if anything was.
    """

    board: BoardConfig = BoardConfig()
    calibration: Calibration | None = None

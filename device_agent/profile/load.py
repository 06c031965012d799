"""Load firmware profiles from TOML, and select the profile of a board."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import firmware_profiles
from device_agent.hardware.files import read_text_or
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.profile.check import find_problems
from device_agent.profile.match import Identity, choose_profile
from device_agent.profile.schema import Cpu, Power, Profile
from shared.config import parse, read
from shared.config_faults import find_faults
from shared.errors import ConfigError
from shared.spelling import guess

SUFFIX = ".toml"
COMPATIBLE_FILES = ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible")
DMI_FIELDS = ("sys_vendor", "product_name", "board_name")
_REQUIRED = {"schema": 1, "id": "x", "name": "x"}
"""Placeholders for required keys, to validate the rest of a profile that lacks them."""
UNKNOWN_PROFILE = Profile(
    schema=1,
    id="unknown",
    name="Unknown board",
    cpu=Cpu(driver_clock="modelled"),
    power=Power(sources=("ina3221", "ina2xx", "battery", "model")),
)
"""For an unknown board: reads what every kernel provides, and power chips."""


def load_for_board(root: Path, name: str = "auto") -> Profile:
    """Return the profile of the board below `root`, or a named one: by its id, or by the path of a TOML file.

    Only shipped files that mention one of the board's tokens are parsed, because parsing is slow on a small board.

    Raises:
        ConfigError: There is no such profile, or its file is invalid.
    """
    if name.endswith(SUFFIX):
        return load_file(Path(name))
    texts = _read_shipped()
    if name != "auto":
        if name not in texts:
            suggestion = guess(name, texts)
            raise ConfigError(
                f"there is no profile {name!r}; use auto, the path of a TOML file, or {', '.join(texts)}{suggestion}"
            )
        return _parse_shipped(name, texts[name])
    identity = read_identity(root)
    named = [f'"{token}"'.encode() for token in identity.tokens()]
    likely = (_parse_shipped(id_, data) for id_, data in texts.items() if any(token in data for token in named))
    return choose_profile(likely, identity) or UNKNOWN_PROFILE


def load_all() -> dict[str, Profile]:
    """Load the shipped profiles, by id."""
    return {id_: _parse_shipped(id_, data) for id_, data in _read_shipped().items()}


def load_file(path: Path) -> Profile:
    """Load a profile from a TOML file.

    Raises:
        ConfigError: It is unreadable or invalid; one line per problem.
    """
    try:
        profile = read(path, Profile)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_find_more_problems(path)])) from error
    return _validate(profile, path)


def _find_more_problems(path: Path) -> list[str]:
    """Return the problems of a profile's well-formed tables when other tables are malformed."""
    try:
        value = read(path, dict[str, Any])
    except ConfigError:
        return []
    sound = {key: part for key, part in value.items() if not find_faults({**_REQUIRED, key: part}, Profile)}
    problems = find_problems(msgspec.convert({**_REQUIRED, **sound}, Profile))
    return [f"{path}: {problem}" for problem in problems if re.split(r"\W", problem)[0] in sound]


def read_source(name: str) -> str:
    """Return a profile's TOML source with comments: a shipped one by its id, another by its path."""
    if name.endswith(SUFFIX):
        return Path(name).read_text("utf-8-sig")
    return _read_shipped()[name].decode()


def read_identity(root: Path) -> Identity:
    """Read the tokens of the board below `root`; missing ones are empty."""
    compatible = next((text for name in COMPATIBLE_FILES if (text := read_text_or(root / name))), "")
    dmi = (read_text_or(root / "sys/class/dmi/id" / name) for name in DMI_FIELDS)
    return Identity(
        compatible=tuple(compatible.split("\0")) if compatible else (),
        dmi=tuple(value for value in dmi if value),
        machine=os.uname().machine if root == LIVE_ROOT else _guess_machine(root),
    )


def _read_shipped() -> Mapping[str, bytes]:
    folder = Path(firmware_profiles.__file__).parent
    return {path.stem: path.read_bytes() for path in sorted(folder.glob(f"*{SUFFIX}"))}


def _parse_shipped(id_: str, data: bytes) -> Profile:
    path = Path("firmware_profiles") / f"{id_}{SUFFIX}"
    profile = _validate(parse(data, Profile, path), path)
    if profile.id != id_:
        raise ConfigError(f"{path}: id: {profile.id!r} is not the name of its file; make them the same")
    return profile


def _validate(profile: Profile, path: Path) -> Profile:
    if problems := find_problems(profile):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return profile


def _guess_machine(root: Path) -> str:
    """Return the machine type of a recorded board, from fields that only its /proc/cpuinfo has."""
    cpuinfo = read_text_or(root / "proc/cpuinfo")
    if "vendor_id" in cpuinfo:
        return "x86_64"
    return "aarch64" if "CPU implementer" in cpuinfo else ""

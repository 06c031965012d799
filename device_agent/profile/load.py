"""Read firmware profiles, and choose the one for a board."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from device_agent.hardware.files import text
from device_agent.profile.check import problems
from device_agent.profile.match import Facts, choose
from device_agent.profile.schema import Profile
from shared.config import parse, read
from shared.errors import ConfigError, NoData

LIVE = Path("/")
SUFFIX = ".toml"
COMPATIBLE = ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible")
DMI = ("sys_vendor", "product_name", "board_name")
NOBODY = Profile(schema=1, id="unknown", name="A board nobody has described")
"""For a machine that no profile is for: what the kernel says everywhere is still read."""


def for_board(root: Path, name: str = "auto") -> Profile:
    """Return the profile of the board below `root`, or the one named: by its id, or by the path of a TOML file.

    Of the shipped files only those that name one of the board's tokens are parsed: a small board is slow at it.

    Raises:
        ConfigError: There is none of that name, or its file cannot be used.
    """
    if name.endswith(SUFFIX):
        return from_file(Path(name))
    texts = _shipped()
    if name != "auto":
        if name not in texts:
            raise ConfigError(f"there is no profile {name!r}; use auto, the path of a TOML file, or {', '.join(texts)}")
        return _shipped_profile(name, texts[name])
    found = facts(root)
    named = [f'"{token}"'.encode() for token in found.tokens()]
    likely = (_shipped_profile(id_, data) for id_, data in texts.items() if any(token in data for token in named))
    return choose(likely, found) or NOBODY


def all_profiles() -> dict[str, Profile]:
    """Return the shipped profiles by id."""
    return {id_: _shipped_profile(id_, data) for id_, data in _shipped().items()}


def from_file(path: Path) -> Profile:
    """Return the profile a file holds.

    Raises:
        ConfigError: It cannot be read, or says what cannot be true; one line for each problem.
    """
    return _checked(read(path, Profile), path)


def source(name: str) -> str:
    """Return a profile as it was written, with its comments: a shipped one by its id, another by its path."""
    if name.endswith(SUFFIX):
        return Path(name).read_text()
    return _shipped()[name].decode()


def facts(root: Path) -> Facts:
    """Return what the board below `root` says of itself; what it does not say is empty."""
    compatible = next((found for name in COMPATIBLE if (found := _text(root / name))), "")
    dmi = (_text(root / "sys/class/dmi/id" / name) for name in DMI)
    return Facts(
        compatible=tuple(compatible.split("\0")) if compatible else (),
        dmi=tuple(one for one in dmi if one),
        machine=os.uname().machine if root == LIVE else _recorded_machine(root),
    )


def _shipped() -> Mapping[str, bytes]:
    folder = resources.files("firmware_profiles")
    files = {file.name.removesuffix(SUFFIX): file for file in folder.iterdir() if file.name.endswith(SUFFIX)}
    return {id_: files[id_].read_bytes() for id_ in sorted(files)}


def _shipped_profile(id_: str, data: bytes) -> Profile:
    path = Path("firmware_profiles") / f"{id_}{SUFFIX}"
    profile = _checked(parse(data, Profile, path), path)
    if profile.id != id_:
        raise ConfigError(f"{path}: id: {profile.id!r} is not the name of its file; make them the same")
    return profile


def _checked(profile: Profile, path: Path) -> Profile:
    if found := problems(profile):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in found))
    return profile


def _text(path: Path) -> str:
    try:
        return text(path)
    except NoData:
        return ""


def _recorded_machine(root: Path) -> str:
    """Return the machine of a recorded board, by words that only its kind of /proc/cpuinfo has."""
    cpuinfo = _text(root / "proc/cpuinfo")
    if "vendor_id" in cpuinfo:
        return "x86_64"
    return "aarch64" if "CPU implementer" in cpuinfo else ""

"""In what form versions write each kind of state file, and whether one can read what another left.

`formats.json` in a folder of state holds the newest form of each kind that was ever written there. A version that knows
an older one alone does not begin: it would take what it finds for damage, and set it aside or throw it away. A folder
without that file is of versions before there was one, whose forms are the first. What kinds there are, agent and server
say each for itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import ConfigError, CorruptFile
from shared.runtime.durable import replace_file

FILE = "formats.json"
MOST_BYTES = 64 << 10
"""Of this file, and of any other small one that `decode_small` reads."""
READABLE = 0o644

T = TypeVar("T")


@dataclass(frozen=True)
class StateKind:
    """A kind of state file.

    Attributes:
        files: Their names in the folder.
        holds: What is lost with them.
    """

    files: tuple[str, ...]
    holds: str


class WrittenFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The newest forms in a folder.

    Attributes:
        version: Which version raised one last.
    """

    formats: dict[str, int]
    version: str = ""

    @property
    def writer(self) -> str:
        """Who wrote there, for people."""
        return f"version {self.version}" if self.version else "a newer version"


def decode_small(data: bytes, kind: type[T], place: str) -> T:
    """Return what a small JSON file says.

    Args:
        place: Where it lies, for the error.

    Raises:
        CorruptFile: It says no such thing, or is longer than any of these files.
    """
    if len(data) > MOST_BYTES:
        raise CorruptFile(f"{place}: {len(data)} bytes or more, {MOST_BYTES} at most are looked at")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{place}: it is not as it was written ({str(error)[:200]})") from error


def decode_formats(data: bytes, place: str) -> WrittenFormats:
    """Return what a file of forms says.

    Args:
        place: Where it lies, for the error.

    Raises:
        ConfigError: It is damaged, so that nobody knows whether this version may write there.
    """
    try:
        return decode_small(data, WrittenFormats, place)
    except CorruptFile as error:
        raise ConfigError(f"{error}; delete it if no newer version ever ran here") from error


def encode_formats(formats: Mapping[str, int], version: str) -> bytes:
    """Return the file's content: forms by kind, and which version raised one last."""
    return msgspec.json.encode(WrittenFormats(formats=dict(formats), version=version), order="deterministic") + b"\n"


def read_formats(folder: Path) -> WrittenFormats:
    """Return what a folder holds; no forms where no version wrote any down, or there is no such folder.

    Raises:
        ConfigError: As `decode_formats`; or the file cannot be read.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            return decode_formats(file.read(MOST_BYTES + 1), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return WrittenFormats(formats={})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def find_losses(written: Mapping[str, int], known: Mapping[str, int], kinds: Mapping[str, StateKind]) -> dict[str, str]:
    """Return the kinds that a version cannot read, and what is lost with each.

    A kind that the version does not know at all is none of these: it leaves such files alone.

    Args:
        written: The newest forms in a folder, by kind.
        known: Those that the version writes.
        kinds: What each kind holds.
    """
    unreadable = [name for name, number in written.items() if name in known and number > known[name]]
    return {name: kinds[name].holds if name in kinds else f"files of the kind {name}" for name in sorted(unreadable)}


def require_readable(folder: Path, known: Mapping[str, int], kinds: Mapping[str, StateKind], otherwise: str) -> None:
    """Refuse to work in a folder that a newer version wrote in so that this one cannot read it.

    Args:
        known: What this version writes.
        kinds: What each kind holds.
        otherwise: What else can be done than to install the version that wrote there.

    Raises:
        ConfigError: It did: what would be lost, and which version to take; or as `read_formats`.
    """
    written = read_formats(folder)
    if losses := find_losses(written.formats, known, kinds):
        kept = "; ".join(f"{name}: {what}" for name, what in losses.items())
        raise ConfigError(
            f"{folder} was written by {written.writer}, and this one cannot read ({kept}); install {written.writer} or "
            f"a later one, or {otherwise}"
        )


def raise_formats(folder: Path, version: str, known: Mapping[str, int], *, several: bool = False) -> bool:
    """Write down that a version writes here; returns whether a form was raised.

    Args:
        several: Whether processes of several users may work there: all may read the file then, and root leaves it to
            whose folder it is.

    Raises:
        ConfigError: As `read_formats`.
        Unwritable: The disk takes nothing more.
    """
    written = read_formats(folder).formats
    highest = written | {name: max(number, written.get(name, 0)) for name, number in known.items()}
    if highest == written:
        return False
    path, data = folder / FILE, encode_formats(highest, version)
    if not several:
        replace_file(path, data)
        return True
    about = folder.stat()
    owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None
    replace_file(path, data, concurrent=True, mode=READABLE, owner=owner)
    return True

"""Format versions of state files; protects state from downgrades.

`formats.json` in a state folder holds the newest format of each kind that was ever written there. A version that only
knows an older one refuses to start: it would take the files for damaged, and set them aside or delete them. A folder
without that file is of versions before there was one, whose formats are all 1. Agent and server each define their
kinds.
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
"""Limit for this file and other small JSON files read by `decode_small`."""
READABLE = 0o644

T = TypeVar("T")


@dataclass(frozen=True)
class StateKind:
    """A kind of state file.

    Attributes:
        files: Names in the folder.
        holds: Description of what is lost with them, for the error.
    """

    files: tuple[str, ...]
    holds: str


class WrittenFormats(msgspec.Struct, frozen=True, kw_only=True):
    """Newest format of each kind in a folder.

    Attributes:
        version: Software version that raised a format last.
    """

    formats: dict[str, int]
    version: str = ""

    @property
    def writer(self) -> str:
        """The software that wrote last, for messages."""
        return f"version {self.version}" if self.version else "a newer version"


def decode_small(data: bytes, kind: type[T], place: str) -> T:
    """Decode a small JSON file.

    Raises:
        CorruptFile: It is not valid, or too long.
    """
    if len(data) > MOST_BYTES:
        raise CorruptFile(f"{place}: {len(data)} bytes or more, the limit is {MOST_BYTES}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptFile(f"{place}: damaged ({str(error)[:200]})") from error


def decode_formats(data: bytes, place: str) -> WrittenFormats:
    """Decode a formats file.

    Raises:
        ConfigError: It is damaged, so that it is unknown whether this version may write there.
    """
    try:
        return decode_small(data, WrittenFormats, place)
    except CorruptFile as error:
        raise ConfigError(f"{error}; delete it if no newer version ever ran here") from error


def encode_formats(formats: Mapping[str, int], version: str) -> bytes:
    """Encode a formats file: format by kind, and the version that raised one last."""
    return msgspec.json.encode(WrittenFormats(formats=dict(formats), version=version), order="deterministic") + b"\n"


def read_formats(folder: Path) -> WrittenFormats:
    """Read a folder's formats; empty where no version recorded any, or the folder does not exist.

    Raises:
        ConfigError: The file is damaged or cannot be read.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            return decode_formats(file.read(MOST_BYTES + 1), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return WrittenFormats(formats={})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def find_losses(
    written: Mapping[str, int], supported: Mapping[str, int], kinds: Mapping[str, StateKind]
) -> dict[str, str]:
    """Return the kinds that a version cannot read, and what is lost with each.

    Kinds that the version does not know at all are not included: it leaves such files alone.

    Args:
        written: Newest format in a folder, by kind.
        supported: Newest format that the version reads, by kind.
    """
    unreadable = [name for name, number in written.items() if name in supported and number > supported[name]]
    return {name: kinds[name].holds if name in kinds else f"files of the kind {name}" for name in sorted(unreadable)}


def require_readable(
    folder: Path, supported: Mapping[str, int], kinds: Mapping[str, StateKind], otherwise: str
) -> None:
    """Refuse to work in a folder whose state a newer version wrote in a format that this one cannot read.

    Args:
        supported: Newest format that this version reads, by kind.
        otherwise: Alternative remedy to installing the newer version.

    Raises:
        ConfigError: It did: what would be lost, and which version to install; or the file of formats is unreadable.
    """
    written = read_formats(folder)
    if losses := find_losses(written.formats, supported, kinds):
        unreadable = "; ".join(f"{name}: {what}" for name, what in losses.items())
        raise ConfigError(
            f"{folder} was written by {written.writer}, and this one cannot read ({unreadable}); "
            f"install {written.writer} or a later one, or {otherwise}"
        )


def raise_formats(folder: Path, version: str, supported: Mapping[str, int], *, several: bool = False) -> bool:
    """Record that this version writes here; return whether a format was raised.

    Args:
        several: Whether processes of several users share the folder: then all may read the file, and root gives it to
            the folder's owner.

    Raises:
        ConfigError: The file of formats is damaged or cannot be read.
        Unwritable: The disk is full, read-only or failing.
    """
    written = read_formats(folder).formats
    highest = written | {name: max(number, written.get(name, 0)) for name, number in supported.items()}
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

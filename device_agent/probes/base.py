"""What a probe is, and how it reads a board's files: whatever a sensor does, the answer is a figure or a named lack."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware import recorded
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Lack, Reading

MAX_BYTES, PART_BYTES = 1 << 20, 1 << 12

LACKS: dict[int, Lack] = {
    errno.ENOENT: "not_present",
    errno.ENOTDIR: "not_present",
    errno.ENODEV: "not_present",
    errno.ENXIO: "not_present",
    errno.EOPNOTSUPP: "not_present",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EAGAIN: "busy",
    errno.EBUSY: "busy",
}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found.

    Attributes:
        readings: By name, which ends in its unit: `cpu.policy0_hertz`.
        absent: Figures that should be there and are not, by the same names.
        facts: What is no figure.
    """

    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}


Probe: TypeAlias = Callable[[Path, Profile, float], Found]
"""`read(root, profile, at)`: reads below `root` only, keeps nothing; raises NoData where there is nothing at all."""


def text(path: Path) -> str:
    """Return a file's text without white space and NUL bytes around it.

    Unbuffered and non-blocking: a sensor whose block is powered down answers EAGAIN, out of which Python's own text
    layer makes a TypeError.

    Raises:
        NoData: It cannot be read; says which of the four lacks it is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = b""
            while len(data) < MAX_BYTES and (part := os.read(descriptor, PART_BYTES)):
                data += part
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}", lack=LACKS.get(error.errno or 0, "invalid")) from error
    return recorded.checked(data.decode(errors="replace").strip("\0 \t\r\n"), path)


def number(path: Path, scale: float = 1.0) -> float:
    """Return the figure a file holds, times `scale`; raises NoData as `text`, or where it holds none."""
    content = text(path)
    try:
        return int(content) * scale
    except (ValueError, OverflowError):
        raise NoData(f"{path}: {content[:40]!r} is no whole number", lack="invalid") from None


def absent(error: NoData) -> Absent:
    """Return an error as what a report says of it."""
    return Absent(lack=error.lack, cause=str(error))

"""Read sysfs and procfs files: their text, or a `NoData` that names one of four lacks.

A recorded board marks a file that did not answer: it holds `#lack busy` alone.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import get_args

from shared.errors import NoData
from shared.protocol.measurements import Lack

LACK_MARK = "#lack "
LACK_BY_MARK: dict[str, Lack] = {LACK_MARK + lack: lack for lack in get_args(Lack)}


def parse_recorded(content: str, path: Path) -> str:
    """Return what a file holds; raises NoData where it is recorded not to have answered, with the lack of then."""
    lack = LACK_BY_MARK.get(content.strip()) if content.startswith(LACK_MARK) else None
    if lack is not None:
        raise NoData(f"{path}: recorded as {lack}", lack=lack)
    return content


MAX_BYTES, CHUNK_BYTES = 1 << 20, 1 << 12

LACK_BY_ERRNO: dict[int, Lack] = {
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


def read_text(path: Path) -> str:
    """Return a file's text without white space and NUL bytes around it.

    Unbuffered and non-blocking: a sensor whose block is powered down answers EAGAIN, out of which Python's own text
    layer makes a TypeError.

    Raises:
        NoData: It cannot be read; names which of the four lacks it is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            data = b""
            while len(data) < MAX_BYTES and (part := os.read(descriptor, CHUNK_BYTES)):
                data += part
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}", lack=LACK_BY_ERRNO.get(error.errno or 0, "invalid")) from error
    return parse_recorded(data.decode(errors="replace").strip("\0 \t\r\n"), path)

"""Read sysfs and procfs files and folders: their content, or a `NoData` that names one of four lacks.

A recorded board marks a file or folder that did not answer: a file in its place holds `#lack busy` alone.
"""

from __future__ import annotations

import errno
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import get_args

from shared.errors import NoData
from shared.protocol.measurements import Lack

LACK_MARK = "#lack "
LACK_BY_MARK: dict[str, Lack] = {LACK_MARK + lack: lack for lack in get_args(Lack)}

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

OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def parse_recorded(content: str, path: Path) -> str:
    """Return what a file holds; raises NoData where it is recorded not to have answered, with the lack of then."""
    lack = LACK_BY_MARK.get(content.strip()) if content.startswith(LACK_MARK) else None
    if lack is not None:
        raise NoData(f"{path}: recorded as {lack}", lack=lack)
    return content


MAX_BYTES, CHUNK_BYTES = 1 << 20, 1 << 12


def read_text(path: Path) -> str:
    """Return a file's text without white space and NUL bytes around it; raises NoData as `read_whole`."""
    return read_whole(path).strip("\0 \t\r\n")


def read_whole(path: Path) -> str:
    """Return a file's text, of one that has no end the first 1 MiB.

    Unbuffered and non-blocking: a sensor whose block is powered down answers EAGAIN, out of which Python's own text
    layer makes a TypeError. Nothing that has no end is read to its end, as a recording may hold.

    Raises:
        NoData: It cannot be read; names which of the four lacks it is.
    """
    try:
        descriptor = os.open(path, OPEN_FLAGS)
        try:
            data = b""
            while len(data) < MAX_BYTES and (part := os.read(descriptor, CHUNK_BYTES)):
                data += part
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _explain(error, path) from error
    except ValueError as error:  # a NUL in its name
        raise NoData(f"{str(path)!r}: {error}", lack="invalid") from error
    return parse_recorded(data.decode(errors="replace"), path)


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the entries of a folder whose names fit, `zone2` before `zone10`; none where there is no such folder.

    Names that cannot be printed are no kernel's, and are left out.

    Args:
        pattern: Of shells, for the name.

    Raises:
        NoData: It is there, and may not be listed.
    """
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        refusal = _explain(error, folder)
        if refusal.lack == "not_present":
            return []
        raise refusal from error
    except ValueError as error:
        raise NoData(f"{str(folder)!r}: {error}", lack="invalid") from error
    return [folder / name for name in sorted(names, key=_order) if name.isprintable() and fnmatchcase(name, pattern)]


def find_paths(root: Path, pattern: str) -> list[Path]:
    """Return the paths below `root` that fit a pattern; of a folder that may not be listed, that folder.

    Whoever reads it gets the same refusal.

    Args:
        root: Where the pattern begins.
        pattern: Names and patterns of shells, joined by `/`.
    """
    folders, refused = [root], list[Path]()
    for part in PurePosixPath(pattern).parts:
        within = list[Path]()
        for folder in folders:
            if re.search(r"[*?\[]", part) is None:
                within.append(folder / part)
                continue
            try:
                within += list_folder(folder, part)
            except NoData:
                refused.append(folder)
        folders = within
    return [*(path for path in folders if _may_be_there(path)), *refused]


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder; one that may not be looked at counts as absent."""
    try:
        return path.exists()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; one that may not be looked at counts as absent."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _may_be_there(path: Path) -> bool:
    """Return whether something is there, or nobody may say: a folder above may not be searched."""
    try:
        path.stat()
    except OSError as error:
        return LACK_BY_ERRNO.get(error.errno or 0) == "denied"
    except ValueError:
        return False
    return True


def _order(name: str) -> tuple[tuple[str, int], ...]:
    """Return the key by which names are sorted as people count."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name))


def _explain(error: OSError, path: Path) -> NoData:
    """Return an error as a lack; below what was recorded as a folder that did not answer, the lack of then."""
    if error.errno == errno.ENOTDIR:
        try:
            if above := next((parent for parent in (path, *path.parents) if parent.is_file()), None):
                with above.open("rb") as file:
                    parse_recorded(file.read(CHUNK_BYTES).decode(errors="replace").strip(), path)
        except OSError:
            pass
        except NoData as recorded:
            return recorded
    return NoData(f"{path}: {error.strerror}", lack=LACK_BY_ERRNO.get(error.errno or 0, "invalid"))

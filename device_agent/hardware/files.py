"""Read sysfs and procfs files and folders; failures become `NoData`.

`NoData` names one of four causes. In a recorded board, a file that contains only `#lack busy` marks a file or folder
that could not be read.
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
    """Return a file's content; raise NoData with the recorded cause if the file marks a failed read."""
    lack = LACK_BY_MARK.get(content.strip()) if content.startswith(LACK_MARK) else None
    if lack is not None:
        raise NoData(f"{path}: recorded as {lack}", lack=lack)
    return content


MAX_BYTES, CHUNK_BYTES = 1 << 20, 1 << 12


def read_text(path: Path) -> str:
    """Return a file's text without surrounding white space and NUL bytes; raises NoData as `read_bounded`."""
    return read_bounded(path).strip("\0 \t\r\n")


def read_text_or(path: Path, default: str = "") -> str:
    """Return a file's text as `read_text`, or a default if it cannot be read."""
    try:
        return read_text(path)
    except NoData:
        return default


def read_bounded(path: Path) -> str:
    """Return a file's text, at most its first 1 MiB, since recordings may contain endless files.

    Unbuffered and non-blocking: a powered-down sensor answers EAGAIN, which Python's text layer turns into a TypeError.

    Raises:
        NoData: It cannot be read; names one of the four causes.
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
    """Return the entries whose names match a shell pattern, `zone2` before `zone10`; none for a missing folder.

    Unprintable names are skipped: the kernel creates none.

    Raises:
        NoData: The folder exists but may not be listed.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError as error:
        refusal = _explain(error, folder)
        if refusal.lack == "not_present":
            return []
        raise refusal from error
    except ValueError as error:
        raise NoData(f"{str(folder)!r}: {error}", lack="invalid") from error
    return [
        folder / name for name in sorted(names, key=_natural_key) if name.isprintable() and fnmatchcase(name, pattern)
    ]


def find_paths(root: Path, pattern: str) -> list[Path]:
    """Return the paths below `root` that match a pattern; for an unlistable folder, that folder.

    Reading such a folder raises the same error again.

    Args:
        pattern: Names and shell patterns, joined by `/`.
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
    return [*(path for path in folders if _may_exist(path)), *refused]


def path_exists(path: Path) -> bool:
    """Return True for an existing file or folder; inaccessible ones count as absent."""
    try:
        return path.exists()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return True for an existing folder; inaccessible ones count as absent."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _may_exist(path: Path) -> bool:
    """Return True if a path exists or if a parent may not be searched."""
    try:
        path.stat()
    except OSError as error:
        return LACK_BY_ERRNO.get(error.errno or 0) == "denied"
    except ValueError:
        return False
    return True


def _natural_key(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key that orders numbers within names by value."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name))


def _explain(error: OSError, path: Path) -> NoData:
    """Convert an error to NoData; below a folder recorded as failed, with the recorded cause."""
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

"""Durable, atomic file writes and disk errors with remedies."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from shared.errors import Unwritable

MAX_CORRUPT_FILES = 3
"""Corrupt files per folder that are retained for inspection."""

_READ_ONLY = "it is read-only: look for disk errors in the kernel's log, then mount it writable"
REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there or raise the quota",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`, LimitFSIZE of the service)",
    errno.EROFS: _READ_ONLY,
    errno.EMFILE: "raise the limit of open files (`ulimit -n`, LimitNOFILE of the service)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "there is too little memory: end other programs, or use a smaller model",
    errno.EIO: "the disk may be failing: look at the kernel's log",
}


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)
        else:
            os.fdatasync(descriptor)  # without its times, which would be a second write
    finally:
        os.close(descriptor)


def replace_file(
    path: Path,
    data: bytes | Iterable[bytes],
    *,
    durable: bool = True,
    concurrent: bool = False,
    mode: int | None = None,
    owner: tuple[int, int] | None = None,
) -> None:
    """Replace a file atomically: every reader sees the old content or the new one.

    Args:
        data: The content, whole or in parts.
        durable: Whether to flush to the disk; if not, a power cut may bring the old content back.
        concurrent: Whether several processes may write it at once.
        mode: Permissions from the first byte on; None for those of the umask.
        owner: User and group id; None for this process's.

    Raises:
        Unwritable: The disk is full, read-only or failing; the old content is untouched.
    """
    partial = path.with_name(f".{path.name}.part" + (f"-{os.getpid()}" if concurrent else ""))
    with explain_disk_errors(path):
        try:
            _write(partial, [data] if isinstance(data, bytes) else data, mode, owner)
            if durable:
                sync(partial)
            partial.replace(path)
        except Exception:
            with suppress(OSError):
                partial.unlink()  # may be what fills the disk
            raise
        if durable:
            sync(path.parent)


def _write(path: Path, parts: Iterable[bytes], mode: int | None, owner: tuple[int, int] | None) -> None:
    if mode is None:
        with path.open("wb") as file:
            file.writelines(parts)
        return
    path.unlink(missing_ok=True)  # a leftover of a crash may be readable to others, or open in another process
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        if owner:
            os.fchown(file.fileno(), owner[0], owner[1])
        file.writelines(parts)


class explain_disk_errors:  # noqa: N801 - read as a verb; a generator costs three times as much without an error
    """Convert disk errors inside the block into `Unwritable`, with path, free space and remedy.

    Raises:
        Unwritable: The disk is full, read-only or failing, or the file may not grow.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing: only errors matter."""

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, Unwritable) or not isinstance(error, OSError):
            return
        if error.errno is not None and error.errno in REMEDIES:
            raise disk_error(self._path, error.errno) from error


def disk_error(path: Path, number: int) -> Unwritable:
    """Make the error for an errno of `REMEDIES`."""
    return Unwritable(f"{path}: {os.strerror(number)}, {_describe_free_space(path)}; {REMEDIES[number]}")


def _describe_free_space(path: Path) -> str:
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        disk = os.statvfs(existing)
    except (OSError, StopIteration):
        return "free space unknown"
    return f"{disk.f_bavail * disk.f_frsize / (1 << 20):.1f} MiB free"


def unused_name(path: Path, why: str = "corrupt") -> Path:
    """Return an unused name beside a file, under which it is set aside for inspection.

    Args:
        why: Reason, a part of the new name.
    """
    number = 1
    while (unused := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    return unused


def drop_oldest(paths: Iterable[Path], keep: int = MAX_CORRUPT_FILES) -> None:
    """Remove files and folders except the `keep` renamed last."""
    for path in sorted(paths, key=lambda entry: entry.stat().st_ctime_ns)[:-keep]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

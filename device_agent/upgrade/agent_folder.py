"""Root's access to the agent's untrusted state folder.

A compromised agent may place symlinks to secrets, endless pipes, or files that change while they are read. So files
are opened with the agent's user id, copied into memory up to a bounded size, and verified after reading.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from device_agent.upgrade.record import BUSY, FOLDER, PROOF, WANTED, HealthProof, UpgradeTarget
from device_agent.upgrade.state_formats import KINDS
from shared.errors import ConfigError, CorruptFile
from shared.protocol.packages import MOST_SIGNED
from shared.runtime.durable import replace_file, sync
from shared.runtime.state_formats import (
    FILE,
    MOST_BYTES,
    WrittenFormats,
    decode_formats,
    decode_small,
    encode_formats,
)

PACKAGE, MANIFEST = ".deb", ".json"
ASIDE = "aside"
PRIVATE_FOLDER = 0o700
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

T = TypeVar("T")


@contextmanager
def as_owner(folder: Path) -> Iterator[None]:
    """Switch to the folder's owner in a block; does nothing unless this process is root.

    Raises:
        ConfigError: There is no such folder.
    """
    if os.geteuid() != 0:
        yield
        return
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name the agent's file with --config") from error
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([status.st_gid])
    os.setegid(status.st_gid)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


@dataclass(frozen=True)
class AgentFolder:
    """State folder of an agent."""

    state_dir: Path

    def read_target(self) -> UpgradeTarget | None:
        """Read the requested version; None for none.

        Raises:
            CorruptFile: The file is damaged.
            ConfigError: The file cannot be read.
        """
        return self._read_struct(WANTED, UpgradeTarget)

    def read_proof(self) -> HealthProof | None:
        """Read the proof of a running agent; None if missing or unreadable."""
        try:
            return self._read_struct(PROOF, HealthProof)
        except (ConfigError, CorruptFile):
            return None

    def read_manifest(self, version: str) -> bytes:
        """Read the signed manifest of a version that the agent fetched."""
        return self._read_required(f"{version}{MANIFEST}", MOST_SIGNED)

    def read_package(self, version: str, size: int) -> bytes:
        """Read the package of a version that the agent fetched; `size` is its size in bytes by the manifest."""
        return self._read_required(f"{version}{PACKAGE}", size)

    def is_busy(self) -> bool:
        """Check for a running task by the agent's lock file."""
        try:
            with as_owner(self.state_dir):
                descriptor = os.open(self.state_dir / FOLDER / BUSY, os.O_RDONLY | _PLAIN)
        except (OSError, ConfigError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(descriptor)
        return False

    def read_formats(self) -> WrittenFormats:
        """Read the newest state formats written there; raises ConfigError if the file is damaged."""
        with as_owner(self.state_dir):
            data = _read_bounded(self.state_dir / FILE, MOST_BYTES)
        return WrittenFormats(formats={}) if data is None else decode_formats(data, str(self.state_dir / FILE))

    def set_aside(self, kinds: Collection[str], version: str) -> None:
        """Move state files that a version cannot read into a folder, and lower the formats; idempotent."""
        written = self.read_formats()
        with as_owner(self.state_dir):
            aside = self._make_aside_folder(version)
            if not (aside / FILE).exists():
                replace_file(aside / FILE, encode_formats(written.formats, written.version))
            for name in _list_files(kinds):
                if (self.state_dir / name).exists() and not (aside / name).exists():
                    (self.state_dir / name).rename(aside / name)
            remaining = {name: number for name, number in written.formats.items() if name not in kinds}
            replace_file(self.state_dir / FILE, encode_formats(remaining, written.version))
            sync(aside)

    def restore_files(self, kinds: Collection[str], version: str) -> None:
        """Undo `set_aside`; files that the version wrote meanwhile are kept under another name."""
        with as_owner(self.state_dir):
            aside = self._make_aside_folder(version)
            for name in _list_files(kinds):
                if (aside / name).exists():
                    if (self.state_dir / name).exists():
                        (self.state_dir / name).rename(_find_free_name(aside / f"{name}.of-{version}"))
                    (aside / name).rename(self.state_dir / name)
            if (data := _read_bounded(aside / FILE, MOST_BYTES)) is not None:
                replace_file(self.state_dir / FILE, data)
                (aside / FILE).unlink()
            sync(self.state_dir)

    def _make_aside_folder(self, version: str) -> Path:
        folder = self.state_dir / FOLDER / f"{ASIDE}-{version}"
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return folder

    def _read_struct(self, name: str, kind: type[T]) -> T | None:
        path = self.state_dir / FOLDER / name
        with as_owner(self.state_dir):
            data = _read_bounded(path, MOST_BYTES)
        return None if data is None else decode_small(data, kind, str(path))

    def _read_required(self, name: str, most: int) -> bytes:
        path = self.state_dir / FOLDER / name
        with as_owner(self.state_dir):
            data = _read_bounded(path, most)
        if data is None:
            raise ConfigError(f"{path} does not exist")
        return data


def _list_files(kinds: Collection[str]) -> list[str]:
    return [name for kind in kinds if kind in KINDS for name in KINDS[kind].files]


def _find_free_name(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number, candidate = number + 1, path.with_name(f"{path.name}-{number}")
    return candidate


def _read_bounded(path: Path, most: int) -> bytes | None:
    """Return up to `most` + 1 bytes of a regular file; None if there is no file.

    Raises:
        ConfigError: It is not a regular file, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _PLAIN)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a regular file")
        return file.read(most + 1)

"""Versions of the agent side by side in one folder, and the two links that say which one runs and which one upgrades.

HOME/0.4.0/                 a whole version: it came under its name by one rename, once all of it was on the disk
HOME/0.4.0/.laid            SHA-256 of its package, where we laid it; what dpkg laid has none, and is dpkg's to remove
HOME/current -> 0.4.0       replaced by one rename
HOME/.new, HOME/.gone       half of a version that comes or goes; swept away
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from device_agent.upgrade.record import CURRENT, UPDATER, VERSION
from shared.errors import ConfigError, CorruptFile
from shared.runtime.durable import explain_disk_errors, sync
from shared.runtime.support.deb_file import MIB, PackedEntry

MARK, NEW, GONE = ".laid", ".new", ".gone"
SPARE_BYTES = 64 * MIB
FOLDER_MODE, FILE_MODE, PROGRAM_MODE = 0o755, 0o644, 0o755
_WORDS = re.compile(r"([^0-9]*)([0-9]*)")


def is_older(version: str, than: str) -> bool:
    """Tell whether a version comes before another, in the order of deb-version(7)."""
    return _sort_key(version) < _sort_key(than)


def _sort_key(version: str) -> list[list[tuple[list[int], int]]]:
    """Return what versions are compared by: letters and numbers in turn, those behind the last hyphen last."""
    upstream, hyphen, revision = version.rpartition("-")
    parts = (upstream, revision or "0") if hyphen else (version, "0")
    return [
        [([*map(_rank, letters), 0], int(digits or 0)) for letters, digits in _WORDS.findall(part)] for part in parts
    ]


def _rank(letter: str) -> int:
    """Return a place in the order: `~` before the end, letters before other signs."""
    return -1 if letter == "~" else ord(letter) + 256 * (not letter.isalpha())


@dataclass(frozen=True)
class Versions:
    """The versions in a folder."""

    home: Path

    def current(self) -> str:
        """Return the version that runs; empty where no link says so."""
        return self._read(CURRENT)

    def updater(self) -> str:
        """Return the version that upgrades; empty where no link says so."""
        return self._read(UPDATER)

    def _read(self, link: str) -> str:
        path = self.home / link
        return path.readlink().name if path.is_symlink() else ""

    def is_installed(self, version: str) -> bool:
        """Tell whether a version is here, whole."""
        return bool(VERSION.fullmatch(version)) and (self.home / version).is_dir()

    def read_digest(self, version: str) -> str:
        """Return the SHA-256 of the package that a version was laid from; empty where dpkg laid it."""
        try:
            return (self.home / version / MARK).read_text()
        except OSError:
            return ""

    def remove_partial(self) -> None:
        """Remove halves of versions that an earlier process left."""
        for name in (NEW, GONE):
            shutil.rmtree(self.home / name, ignore_errors=True)

    def require_room(self, size: int) -> None:
        """Refuse what would fill the disk.

        Raises:
            ConfigError: It would.
        """
        free = shutil.disk_usage(self.home).free
        if free < size + SPARE_BYTES:
            needs = (size + SPARE_BYTES) // MIB
            raise ConfigError(f"{self.home}: it takes {needs} MiB and {free // MIB} MiB are free; make room there")

    def install(self, version: str, sha256: str, entries: Iterable[PackedEntry]) -> None:
        """Lay a version beside the others; when this returns, all of it is on the disk.

        Args:
            entries: What is in it.

        Raises:
            CorruptFile: As `package_file.unpack_package`.
            Unwritable: The disk takes nothing more.
        """
        new, final = self.home / NEW, self.home / version
        self.remove_partial()
        with explain_disk_errors(new):
            for entry in entries:
                _write_entry(new / entry.path, entry)
            compileall.compile_dir(new, quiet=2, stripdir=str(new), prependdir=str(final))
            (new / MARK).write_text(sha256)
            os.sync()  # each file alone would take a thousand waits
            if final.exists():
                final.rename(self.home / GONE)
            new.rename(final)
            sync(self.home)
        self.remove_partial()

    def switch(self, link: str, version: str) -> None:
        """Have a link lead to a version; when this returns, it does so after a power cut too.

        Args:
            link: `current` or `updater`.

        Raises:
            ConfigError: It is not.
        """
        if not self.is_installed(version):
            raise ConfigError(
                f"{self.home / version} is gone; `sudo apt install --reinstall` of the package mends that"
            )
        part = self.home / f".{link}.part"
        with explain_disk_errors(part):
            part.unlink(missing_ok=True)
            part.symlink_to(version)
            part.replace(self.home / link)
            sync(self.home)

    def remove_unused(self, retained: Iterable[str]) -> None:
        """Remove the versions that we laid and that nobody needs any more; what dpkg laid stays."""
        retained = {*retained, self.current(), self.updater()}
        for path in sorted(self.home.iterdir()):
            is_ours = VERSION.fullmatch(path.name) and path.is_dir() and (path / MARK).is_file()
            if is_ours and path.name not in retained:
                path.rename(self.home / GONE)
                self.remove_partial()


def _write_entry(path: Path, entry: PackedEntry) -> None:
    if entry.kind == "folder":
        path.mkdir(mode=FOLDER_MODE)
        path.chmod(FOLDER_MODE)
    elif entry.kind == "link":
        path.symlink_to(entry.content.decode())
    else:
        mode = PROGRAM_MODE if entry.is_program else FILE_MODE
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(entry.content)
        except FileExistsError:
            raise CorruptFile(f"the package has {entry.path[:100]!r} twice") from None

"""Installed agent versions in one folder, and the links to the active ones.

HOME/0.4.0/                 complete version: renamed atomically once all of it was on the disk
HOME/0.4.0/.laid            SHA-256 of its package; missing if dpkg installed the version and must remove it
HOME/current -> 0.4.0       replaced atomically
HOME/.new, HOME/.gone       version that is being installed or removed; deleted after an interruption
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
    """Compare two versions in the order of deb-version(7)."""
    return _sort_key(version) < _sort_key(than)


def _sort_key(version: str) -> list[list[tuple[list[int], int]]]:
    """Return a sort key: alternating letters and numbers, of the upstream version and then the revision."""
    upstream, hyphen, revision = version.rpartition("-")
    parts = (upstream, revision or "0") if hyphen else (version, "0")
    return [
        [([*map(_rank, letters), 0], int(digits or 0)) for letters, digits in _WORDS.findall(part)] for part in parts
    ]


def _rank(letter: str) -> int:
    """Return a letter's rank: `~` before the end of the text, letters before other characters."""
    return -1 if letter == "~" else ord(letter) + 256 * (not letter.isalpha())


@dataclass(frozen=True)
class Versions:
    """Versions installed in a folder."""

    home: Path

    def current(self) -> str:
        """Return the running version; empty without a link."""
        return self._read(CURRENT)

    def updater(self) -> str:
        """Return the version whose updater runs; empty without a link."""
        return self._read(UPDATER)

    def _read(self, link: str) -> str:
        path = self.home / link
        return path.readlink().name if path.is_symlink() else ""

    def is_installed(self, version: str) -> bool:
        """Check that a version is completely installed."""
        return bool(VERSION.fullmatch(version)) and (self.home / version).is_dir()

    def read_digest(self, version: str) -> str:
        """Return the SHA-256 of a version's package; empty if dpkg installed it."""
        try:
            return (self.home / version / MARK).read_text()
        except OSError:
            return ""

    def remove_partial(self) -> None:
        """Remove partial versions that an interrupted process left."""
        for name in (NEW, GONE):
            shutil.rmtree(self.home / name, ignore_errors=True)

    def require_room(self, size: int) -> None:
        """Raise ConfigError if a version of this size would fill the disk."""
        free = shutil.disk_usage(self.home).free
        if free < size + SPARE_BYTES:
            needs = (size + SPARE_BYTES) // MIB
            raise ConfigError(f"{self.home}: {needs} MiB needed, {free // MIB} MiB free; free some space")

    def install(self, version: str, sha256: str, entries: Iterable[PackedEntry]) -> None:
        """Install a version durably beside the others.

        Args:
            entries: Content of the version, from `package_file.unpack_package`.

        Raises:
            CorruptFile: The package is damaged, or has unexpected content.
            Unwritable: The disk is full or read-only.
        """
        new, final = self.home / NEW, self.home / version
        self.remove_partial()
        with explain_disk_errors(new):
            for entry in entries:
                _write_entry(new / entry.path, entry)
            compileall.compile_dir(new, quiet=2, stripdir=str(new), prependdir=str(final))
            (new / MARK).write_text(sha256)
            os.sync()  # once, since an fsync per file would take far longer
            if final.exists():
                final.rename(self.home / GONE)
            new.rename(final)
            sync(self.home)
        self.remove_partial()

    def switch(self, link: str, version: str) -> None:
        """Point a link (`current` or `updater`) to a version, durably.

        Raises:
            ConfigError: The version is not installed.
        """
        if not self.is_installed(version):
            raise ConfigError(
                f"{self.home / version} does not exist; run `sudo apt install --reinstall` with the package"
            )
        part = self.home / f".{link}.part"
        with explain_disk_errors(part):
            part.unlink(missing_ok=True)
            part.symlink_to(version)
            part.replace(self.home / link)
            sync(self.home)

    def remove_unused(self, retained: Iterable[str]) -> None:
        """Remove versions that are neither retained nor linked to, except those that dpkg installed."""
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
            raise CorruptFile(f"the package contains {entry.path[:100]!r} twice") from None

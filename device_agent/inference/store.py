"""Releases on a board: parts under the digests of their content, manifests by name and version, a record a name.

    releases/.parts/SHA256           every part, once for all that have it in common
    releases/NAME/VERSION.json       the manifest
    releases/NAME/state              what the board is at with that name, durable
    releases/NAME/state.before       the same one step earlier, for a disk that damages the newer one
    releases/.ahead                  the manifest of a release that will be offered, whose parts may be here already

One process writes here, the agent, from one thread or several; those that serve and that try releases out read.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.inference.release import MAX_MANIFEST_BYTES, ReleaseManifest, ReleasePart, read_manifest
from shared.protocol.topics import is_name
from shared.protocol.update import UpdateRecord, read_record, write_record
from shared.runtime import backports
from shared.runtime.durable import explain_disk_errors, replace_file, sync

log = logging.getLogger(__name__)

FOLDER, PARTS, STATE, BEFORE, SUFFIX = "releases", ".parts", "state", "state.before", ".json"
AHEAD = ".ahead"
RESERVE_BYTES = 32 << 20
"""What must be free beside a release: updates that wait for the server need room too."""
PRIVATE = 0o700
READ_ONLY = 0o400
MIB = 1 << 20


class BoardStore:
    """What a board has of releases, and what it is at with each name.

    Args:
        state_dir: Folder that survives reboots.
        reserve_bytes: What must be left free on its disk.
    """

    def __init__(self, state_dir: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.folder, self._reserve = state_dir / FOLDER, reserve_bytes
        self._parts = self.folder / PARTS
        self._turn = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of which there is a record, in order."""
        return [name for name in self._folders() if any((self.folder / name / one).exists() for one in (STATE, BEFORE))]

    def _folders(self) -> list[str]:
        try:
            return sorted(path.name for path in self.folder.iterdir() if is_name(path.name) and path.is_dir())
        except FileNotFoundError:
            return []

    def record(self, name: str) -> UpdateRecord:
        """Return what the board is at with a name; an empty record where nothing was ever offered.

        Raises:
            CorruptFile: Neither the record nor the one before it is as it was written.
            ConfigError: A newer fieldfleet wrote it.
        """
        found = self._read(name)
        return UpdateRecord(name=name) if found is None else found

    def _read(self, name: str) -> UpdateRecord | None:
        """Return the newest record that is whole; None where there is no file of one."""
        damage: CorruptFile | None = None
        for path in (self.folder / name / STATE, self.folder / name / BEFORE):
            try:
                return read_record(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except CorruptFile as error:
                log.warning("%s", error)
                damage = error
        if damage:
            raise damage
        return None

    def write(self, record: UpdateRecord, manifest: bytes | None = None) -> None:
        """Make a record the one of its name; when this returns, it is on the disk.

        Args:
            manifest: Of its candidate as it came, where that is new.

        Raises:
            Unwritable: The disk takes nothing more; the record before is untouched.
        """
        folder = self._made(self.folder / record.name)
        with self._turn:
            if manifest is not None:
                replace_file(self._manifest(record.name, record.candidate), manifest)
            with suppress(CorruptFile):  # a damaged one is worth no copy
                if before := self._read(record.name):
                    replace_file(folder / BEFORE, write_record(before))
            replace_file(folder / STATE, write_record(record))

    def _made(self, folder: Path) -> Path:
        """Return a folder that is there, for this user alone, and stays there after a power cut.

        Raises:
            Unwritable: It cannot be made.
        """
        with explain_disk_errors(folder):
            for path in (self.folder, folder):
                if not path.is_dir():
                    path.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
                    sync(path.parent)
        return folder

    def path(self, digest: str) -> Path:
        """Return where a part lies, or would."""
        return self._parts / digest

    def manifest(self, name: str, version: int) -> ReleaseManifest:
        """Return the manifest of a version.

        Raises:
            CorruptFile: There is none, or it is not as it was written.
            ConfigError: It is of a newer format.
        """
        path = self._manifest(name, version)
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise CorruptFile(f"{path}: larger than any manifest")
            found = read_manifest(path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise CorruptFile(f"{path} is gone") from error
        if (found.name, found.version) != (name, version):
            raise CorruptFile(f"{path}: it is the manifest of {found.reference}")
        return found

    def release(self, name: str, version: int) -> str:
        """Return the SHA-256 of a version's manifest; empty where there is none."""
        with suppress(FileNotFoundError):
            return digest_of(self._manifest(name, version))
        return ""

    def _manifest(self, name: str, version: int) -> Path:
        return self.folder / name / f"{version}{SUFFIX}"

    def missing(self, manifest: ReleaseManifest) -> dict[str, ReleasePart]:
        """Return the parts of a release that are not here, by their names; of what is here the size is looked at."""
        return {name: part for name, part in manifest.parts.items() if self._size(part.sha256) != part.size}

    def _size(self, digest: str) -> int:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return -1

    def require_room(self, manifest: ReleaseManifest) -> None:
        """Refuse a release that the disk has no room for, before any of it is fetched.

        Raises:
            Unwritable: Too little is free.
        """
        sizes = {part.sha256: part.size for part in self.missing(manifest).values()}
        needed = sum(sizes.values()) + self._reserve
        free = shutil.disk_usage(self._made(self.folder)).free
        if free < needed:
            raise Unwritable(
                f"{self.folder}: release {manifest.reference} needs {needed / MIB:.1f} MiB free, "
                f"{self._reserve / MIB:.0f} of them for updates, and {free / MIB:.1f} are; make room there"
            )

    def keep_ahead(self, manifest: bytes) -> None:
        """Keep the parts of a release that will be offered, in place of those of another one that was to be.

        Raises:
            Unwritable: There is no room for it beside what is here.
        """
        folder = self._made(self.folder)
        with self._turn:
            replace_file(folder / AHEAD, manifest)
        self.tidy()
        try:
            self.require_room(read_manifest(manifest, AHEAD))
        except Unwritable:
            self.forget_ahead()
            raise

    def ahead(self) -> ReleaseManifest | None:
        """Return the manifest of a release that will be offered; None for none, or for one that cannot be read."""
        try:
            return read_manifest((self.folder / AHEAD).read_bytes(), AHEAD)
        except (OSError, CorruptFile, ConfigError):
            return None

    def forget_ahead(self) -> None:
        """Keep nothing for a release that was to be offered."""
        (self.folder / AHEAD).unlink(missing_ok=True)

    def adopt(self, digest: str, path: Path) -> None:
        """Take a file that was fetched as a part; reads all of it, so not for the event loop.

        Args:
            digest: SHA-256 that it must have.
            path: On the same disk; it is gone from there afterwards.

        Raises:
            CorruptFile: It has another digest; it is left where it is.
            Unwritable: The disk takes nothing more.
        """
        if digest_of(path) != digest:
            raise CorruptFile(f"{path}: it is not the part {digest[:12]}")
        folder = self._made(self._parts)
        with explain_disk_errors(path):
            path.chmod(READ_ONLY)
            sync(path)
            path.replace(self.path(digest))
            sync(folder)

    def add(self, digest: str, data: bytes) -> None:
        """Keep the bytes of a part.

        Args:
            digest: SHA-256 that they must have.
            data: The bytes.

        Raises:
            CorruptFile: They have another digest.
            Unwritable: The disk takes nothing more.
        """
        if hashlib.sha256(data).hexdigest() != digest:
            raise CorruptFile(f"{len(data)} bytes that are not the part {digest[:12]}")
        self._made(self._parts)
        replace_file(self.path(digest), data)
        self.path(digest).chmod(READ_ONLY)

    def drop(self, digest: str) -> None:
        """Part with a part that is damaged, so that it is fetched again."""
        self.path(digest).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what no record wants kept; nothing while something that must be kept cannot be read.

        What is fetched must be recorded as offered before, or be of the release that will be, or it is removed here.
        """
        with self._turn:
            self._tidy()

    def _tidy(self) -> None:
        ahead, unwanted = self.ahead(), list[Path]()
        wanted = {part.sha256 for part in ahead.parts.values()} if ahead else set[str]()
        try:
            for name in self._folders():
                kept = self.record(name).retained_versions
                for version in self.versions(name):
                    if version in kept:
                        wanted |= {part.sha256 for part in self.manifest(name, version).parts.values()}
                    else:
                        unwanted.append(self._manifest(name, version))
        except (CorruptFile, ConfigError) as error:
            log.warning("nothing is removed from %s: %s", self.folder, error)
            return
        with suppress(FileNotFoundError):
            unwanted += [path for path in self._parts.iterdir() if path.name not in wanted]
        for path in unwanted:
            with suppress(OSError):  # what cannot be removed costs room and no release
                path.unlink()

    def versions(self, name: str) -> list[int]:
        """Return the versions of a name whose manifests lie here, in order."""
        found = (path.name.removesuffix(SUFFIX) for path in (self.folder / name).glob(f"*{SUFFIX}"))
        return sorted(int(version) for version in found if version.isdecimal())


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return backports.file_digest(file, "sha256").hexdigest()

"""Release store of a board: parts, manifests and update records.

    releases/.parts/SHA256           a part, shared by all releases that contain it
    releases/NAME/VERSION.json       manifest
    releases/NAME/state              update record of the model, durable
    releases/NAME/state.before       the previous record, in case the disk damages the newer one
    releases/.ahead                  manifest of a release to be offered, whose parts may have been fetched already

Only the agent writes here, from one or more threads; the serving and gate processes read.
"""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from device_agent.inference.part_store import PartStore, ensure_folder
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.inference.release import MAX_MANIFEST_BYTES, ReleaseManifest, read_manifest
from shared.protocol.topics import is_name
from shared.protocol.update import UpdateRecord, read_record, write_record
from shared.runtime.durable import replace_file
from shared.runtime.file_digest import file_sha256

log = logging.getLogger(__name__)

FOLDER, STATE, BEFORE, SUFFIX = "releases", "state", "state.before", ".json"
AHEAD = ".ahead"
RESERVE_BYTES = 32 << 20
"""Space left free beside releases: updates that wait for the server need it."""
MIB = 1 << 20


class BoardStore:
    """Releases and update records on the board's disk.

    Args:
        state_dir: Folder that survives reboots.
        reserve_bytes: Space to leave free on its disk.

    Attributes:
        parts: The parts of all releases.
    """

    def __init__(self, state_dir: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.folder, self._reserve = state_dir / FOLDER, reserve_bytes
        self.parts = PartStore(self.folder)
        self._turn = threading.Lock()

    def names(self) -> list[str]:
        """Return the models that have a record, sorted."""
        return [
            name
            for name in _list_folders(self.folder)
            if any((self.folder / name / file).exists() for file in (STATE, BEFORE))
        ]

    def record(self, name: str) -> UpdateRecord:
        """Return the record of a model; an empty one if no release was ever offered.

        Raises:
            CorruptFile: Both the record and its predecessor are damaged.
            ConfigError: A newer fieldfleet wrote it.
        """
        record = self._read(name)
        return UpdateRecord(name=name) if record is None else record

    def _read(self, name: str) -> UpdateRecord | None:
        """Return the newest undamaged record; None if there is no file."""
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
        """Write a record durably.

        Args:
            manifest: Manifest of a new candidate, as received.

        Raises:
            Unwritable: The disk refuses the write; the previous record is intact.
        """
        folder = ensure_folder(self.folder, self.folder / record.name)
        with self._turn:
            if manifest is not None:
                replace_file(_manifest_path(self.folder, record.name, record.candidate), manifest)
            with suppress(CorruptFile):  # do not back up a damaged record
                if before := self._read(record.name):
                    replace_file(folder / BEFORE, write_record(before))
            replace_file(folder / STATE, write_record(record))

    def manifest(self, name: str, version: int) -> ReleaseManifest:
        """Return the manifest of a version.

        Raises:
            CorruptFile: It is missing or damaged.
            ConfigError: It has a newer format.
        """
        path = _manifest_path(self.folder, name, version)
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise CorruptFile(f"{path}: larger than the limit of a manifest ({MAX_MANIFEST_BYTES} bytes)")
            manifest = read_manifest(path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise CorruptFile(f"{path} is missing") from error
        if (manifest.name, manifest.version) != (name, version):
            raise CorruptFile(f"{path}: it is the manifest of {manifest.reference}")
        return manifest

    def release(self, name: str, version: int) -> str:
        """Return the SHA-256 of a version's manifest; empty if there is none."""
        with suppress(FileNotFoundError):
            return file_sha256(_manifest_path(self.folder, name, version))
        return ""

    def require_room(self, manifest: ReleaseManifest) -> None:
        """Refuse a release that does not fit on the disk, before any of it is fetched.

        Raises:
            Unwritable: Too little space is free.
        """
        sizes = {part.sha256: part.size for part in self.parts.missing(manifest).values()}
        needed = sum(sizes.values()) + self._reserve
        free = shutil.disk_usage(ensure_folder(self.folder, self.folder)).free
        if free < needed:
            raise Unwritable(
                f"{self.folder}: release {manifest.reference} needs {needed / MIB:.1f} MiB free, "
                f"{self._reserve / MIB:.0f} of them for updates, but only {free / MIB:.1f} are; free some space"
            )

    def keep_ahead(self, manifest: bytes) -> None:
        """Reserve the parts of a release to be offered, replacing an earlier reservation.

        Raises:
            Unwritable: It does not fit on the disk.
        """
        folder = ensure_folder(self.folder, self.folder)
        with self._turn:
            replace_file(folder / AHEAD, manifest)
        self.tidy()
        try:
            self.require_room(read_manifest(manifest, AHEAD))
        except Unwritable:
            self.forget_ahead()
            raise

    def ahead(self) -> ReleaseManifest | None:
        """Return the manifest of the release to be offered; None if there is none or it is unreadable."""
        try:
            return read_manifest((self.folder / AHEAD).read_bytes(), AHEAD)
        except (OSError, CorruptFile, ConfigError):
            return None

    def forget_ahead(self) -> None:
        """Drop the reservation for a release to be offered."""
        (self.folder / AHEAD).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what no record refers to; nothing if a record or retained manifest is unreadable.

        A fetched part must belong to a recorded offer or the release kept ahead, or it is removed.
        """
        with self._turn:
            self._tidy()

    def _tidy(self) -> None:
        ahead, unwanted = self.ahead(), list[Path]()
        needed = {part.sha256 for part in ahead.parts.values()} if ahead else set[str]()
        try:
            for name in _list_folders(self.folder):
                retained = self.record(name).retained_versions
                for version in self.versions(name):
                    if version in retained:
                        needed |= {part.sha256 for part in self.manifest(name, version).parts.values()}
                    else:
                        unwanted.append(_manifest_path(self.folder, name, version))
        except (CorruptFile, ConfigError) as error:
            log.warning("nothing is removed from %s: %s", self.folder, error)
            return
        with suppress(FileNotFoundError):
            unwanted += [path for path in self.parts.folder.iterdir() if path.name not in needed]
        for path in unwanted:
            with suppress(OSError):  # a leftover file costs space only
                path.unlink()

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model whose manifests are stored, sorted."""
        stems = (path.name.removesuffix(SUFFIX) for path in (self.folder / name).glob(f"*{SUFFIX}"))
        return sorted(int(version) for version in stems if version.isdecimal())


def _list_folders(releases: Path) -> list[str]:
    try:
        return sorted(path.name for path in releases.iterdir() if is_name(path.name) and path.is_dir())
    except FileNotFoundError:
        return []


def _manifest_path(releases: Path, name: str, version: int) -> Path:
    return releases / name / f"{version}{SUFFIX}"

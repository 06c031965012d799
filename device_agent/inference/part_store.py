"""Store of release parts by digest, shared by all releases that contain them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import CorruptFile
from shared.protocol.inference.release import ReleaseManifest, ReleasePart
from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.runtime.file_digest import file_sha256

PARTS = ".parts"
PRIVATE = 0o700
READ_ONLY = 0o400


class PartStore:
    """Parts of releases on the board's disk, one read-only file each.

    Args:
        releases: Folder of the release store.
    """

    def __init__(self, releases: Path) -> None:
        self.folder = releases / PARTS

    def path(self, digest: str) -> Path:
        """Return the path of a part, which may not exist."""
        return self.folder / digest

    def missing(self, manifest: ReleaseManifest) -> dict[str, ReleasePart]:
        """Return the parts of a release that are not stored, by name; stored parts are checked by size only."""
        return {name: part for name, part in manifest.parts.items() if self._size(part.sha256) != part.size}

    def _size(self, digest: str) -> int:
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return -1

    def adopt(self, digest: str, path: Path) -> None:
        """Move a fetched file into the store. Hashes all of it, so do not call this on the event loop.

        Args:
            digest: Expected SHA-256 in hexadecimal.
            path: File on the same disk.

        Raises:
            CorruptFile: The digest differs; the file stays.
            Unwritable: The disk refuses the write.
        """
        if file_sha256(path) != digest:
            raise CorruptFile(f"{path}: its digest is not {digest[:12]}…")
        folder = ensure_folder(self.folder.parent, self.folder)
        with explain_disk_errors(path):
            path.chmod(READ_ONLY)
            sync(path)
            path.replace(self.path(digest))
            sync(folder)

    def add(self, digest: str, data: bytes) -> None:
        """Store the bytes of a part.

        Args:
            digest: Expected SHA-256 in hexadecimal.

        Raises:
            CorruptFile: The digest differs.
            Unwritable: The disk refuses the write.
        """
        if hashlib.sha256(data).hexdigest() != digest:
            raise CorruptFile(f"part {digest[:12]}…: {len(data)} bytes with another digest")
        ensure_folder(self.folder.parent, self.folder)
        replace_file(self.path(digest), data)
        self.path(digest).chmod(READ_ONLY)

    def drop(self, digest: str) -> None:
        """Delete a damaged part so that it is fetched again."""
        self.path(digest).unlink(missing_ok=True)


def ensure_folder(root: Path, folder: Path) -> Path:
    """Create a private folder below another one so that both survive a power cut.

    Raises:
        Unwritable: It cannot be created.
    """
    with explain_disk_errors(folder):
        for path in (root, folder):
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
                sync(path.parent)
    return folder

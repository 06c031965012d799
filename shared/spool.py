"""A payload being received into a file, frame by frame, and read back as a view. No tensors here."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from shared import payload
from shared.chunks import Assembly, Frame
from shared.errors import WireError
from shared.messages import Transfer


class Spool:
    """One transfer on its way into `path`; memory does not grow with its size."""

    def __init__(self, path: Path, transfer: Transfer) -> None:
        self.path = path
        self.assembly = Assembly(transfer)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.bytes_received = 0
        try:
            os.ftruncate(self._file, transfer.size)  # what an earlier payload left is overwritten: half the cost
        except OSError:
            self.close()
            raise

    def write(self, frame: Frame, size: int) -> bool:
        """Store one frame of `size` bytes on the wire; tell whether it was new.

        Raises:
            WireError: The frame does not fit the transfer.
            OSError: The disk is full or cannot be written.
        """
        self.bytes_received += size
        if not self.assembly.accept(frame):
            return False
        os.pwrite(self._file, frame.data, frame.index * self.assembly.transfer.frame_bytes)
        return True

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._file)

    def finish(self) -> None:
        """Check the whole and close the file.

        Raises:
            WireError: The digest does not hold; the file is gone and the transfer must start again.
        """
        self.close()
        if payload.digest([view(self.path)]) != self.assembly.transfer.digest:
            self.path.unlink()
            raise WireError(f"{self.path.name}: digest does not hold", reason="digest")

    def close(self) -> None:
        """Close the file as it is."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def view(path: Path) -> memoryview:
    """Return a file's bytes without reading it whole; writes to the view do not reach the file."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))

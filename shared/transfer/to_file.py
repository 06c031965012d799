"""File sink for received payloads: resumable after a crash, memory-mapped for reading.

Beside the file `<name>` lies the progress file `.<name>`: the payload's digest, and a byte per block, 1 if received. A
killed process resumes from it. Data are written before their byte; should a power cut reorder that, the digest of the
whole payload reveals it.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path

from shared.protocol.messages import BLOCK_BYTES, Transfer

NOTED_BYTES = 1 << 20
"""Smaller payloads have no progress file: they are fetched again."""

_HEAD = struct.Struct("<16sQ")


class FileSink:
    """Sink for the blocks of one payload, at `path`; memory use does not grow with its size.

    Attributes:
        have: One byte per block, 1 if an earlier process received it; empty for none.
    """

    def __init__(self, path: Path, transfer: Transfer) -> None:
        """Create the file, or resume that of an earlier process.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        self.path = path
        self._note = path.with_name(f".{path.name}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._progress_file = -1
        try:
            self.have = self._load_progress(transfer)
            os.ftruncate(self._file, transfer.size)  # an earlier payload's blocks are overwritten: half the cost
            os.posix_fallocate(self._file, 0, transfer.size)  # fail now if the disk is too full
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.remove()  # release the space reserved so far
            raise

    def _load_progress(self, transfer: Transfer) -> bytes:
        """Read the progress file; start a new one if it is of another payload."""
        if transfer.size < NOTED_BYTES:
            self._note.unlink(missing_ok=True)
            return b""
        head = _HEAD.pack(transfer.digest, transfer.size)
        self._progress_file = os.open(self._note, os.O_RDWR | os.O_CREAT, 0o600)
        note = os.pread(self._progress_file, _HEAD.size + transfer.blocks + 1, 0)
        have = note[_HEAD.size :]
        same = note[: _HEAD.size] == head and os.fstat(self._file).st_size == transfer.size
        if same and len(have) == transfer.blocks and have.count(0) + have.count(1) == len(have):
            return have
        os.ftruncate(self._progress_file, 0)
        os.pwrite(self._progress_file, head, 0)
        os.ftruncate(self._progress_file, _HEAD.size + transfer.blocks)
        return b""

    def put(self, start: int, data: memoryview) -> None:
        """Write a frame's bytes, then mark its blocks.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        blocks, offset = -(-data.nbytes // BLOCK_BYTES), start * BLOCK_BYTES
        while data:
            written = os.pwrite(self._file, data, offset)  # a full disk first takes a part, then raises an error
            data, offset = data[written:], offset + written
        if self._progress_file >= 0:
            os.pwrite(self._progress_file, b"\1" * blocks, _HEAD.size + start)

    def sync(self) -> None:
        """Flush the data to the disk."""
        os.fdatasync(self._file)

    def to_view(self) -> memoryview:
        self.close()
        return view(self.path)

    def remove(self) -> None:
        self.close()
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file unchanged; another sink of the same payload can resume it."""
        for descriptor in (self._file, self._progress_file):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._progress_file = -1


def view(path: Path) -> memoryview:
    """Map a file's bytes into memory; writes to the view do not reach the file."""
    file = os.open(path, os.O_RDONLY)
    try:
        if not os.fstat(file).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(file)

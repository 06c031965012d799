"""Received payload in a file, frame by frame, and read back as a view. No tensors here.

Beside the file `<name>` lies `.<name>`: which payload it is becoming, and a byte for every block, 1 where it is here.
So a process that was killed in between goes on where it was. The data is written before its byte; what a power cut
makes of that order, the digest of the whole finds out.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from pathlib import Path

from shared.protocol.messages import BLOCK_BYTES, Transfer

NOTED_BYTES = 1 << 20
"""Smaller payloads are not worth a note: they are fetched again."""

_HEAD = struct.Struct("<16sQ")


class FileSink:
    """Where the blocks of one payload come together, at `path`; memory does not grow with its size.

    Attributes:
        have: A byte a block, 1 where an earlier process has received it; empty for nothing.
    """

    def __init__(self, path: Path, transfer: Transfer) -> None:
        """Begin, or go on where an earlier process stopped.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        self.path = path
        self._note = path.with_name(f".{path.name}")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._here = -1
        try:
            self.have = self._noted(transfer)
            os.ftruncate(self._file, transfer.size)  # what an earlier payload left is overwritten: half the cost
            os.posix_fallocate(self._file, 0, transfer.size)  # a disk that is too full says so now
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.remove()  # what was reserved of it is missing elsewhere
            raise

    def _noted(self, transfer: Transfer) -> bytes:
        """Return what the note says is here, and begin a new note if it is of another payload."""
        if transfer.size < NOTED_BYTES:
            self._note.unlink(missing_ok=True)
            return b""
        head = _HEAD.pack(transfer.digest, transfer.size)
        self._here = os.open(self._note, os.O_RDWR | os.O_CREAT, 0o600)
        found = os.pread(self._here, _HEAD.size + transfer.blocks + 1, 0)
        have = found[_HEAD.size :]
        same = found[: _HEAD.size] == head and os.fstat(self._file).st_size == transfer.size
        if same and len(have) == transfer.blocks and have.count(0) + have.count(1) == len(have):
            return have
        os.ftruncate(self._here, 0)
        os.pwrite(self._here, head, 0)
        os.ftruncate(self._here, _HEAD.size + transfer.blocks)
        return b""

    def put(self, start: int, data: memoryview) -> None:
        """Write a frame's bytes, from block `start` on, then note its blocks.

        Args:
            data: Whole blocks, but for the payload's last.

        Raises:
            OSError: The disk is full or cannot be written.
        """
        blocks, offset = -(-data.nbytes // BLOCK_BYTES), start * BLOCK_BYTES
        while data:
            written = os.pwrite(self._file, data, offset)  # where the disk ends, part of it at first, then an error
            data, offset = data[written:], offset + written
        if self._here >= 0:
            os.pwrite(self._here, b"\1" * blocks, _HEAD.size + start)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._file)

    def whole(self) -> memoryview:
        """Close the file and return a view of it."""
        self.close()
        return view(self.path)

    def remove(self) -> None:
        """Close the file and remove it with all that is known of it."""
        self.close()
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file as it is; another sink of the same payload goes on with it."""
        for descriptor in (self._file, self._here):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._here = -1


def view(path: Path) -> memoryview:
    """Return a file's bytes without reading it whole; writes to the view do not reach the file."""
    file = os.open(path, os.O_RDONLY)
    try:
        if not os.fstat(file).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(file)

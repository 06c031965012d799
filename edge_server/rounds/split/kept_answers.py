"""What a device was answered in a session: one that begins it anew does the same steps again, to the same bits.

A device half draws by its seed and the step's number. So a trainer that was killed, begins at step 1 and is answered as
before comes to where it was, and the server's part takes no step twice. What is kept are the payloads that were sent;
the gradients of a round have one bound for all devices together, and end with it. The first few MiB of them stay in
memory, where they are; of those behind, each device's last does, and the others lie in a file without a name.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.transfer.sender import Sender

log = logging.getLogger(__name__)

IN_MEMORY = 16 << 20
"""Bytes of a round's gradients from which on those that are no device's last are written into a file."""


class UnnamedFile:
    """Bytes on a disk that nobody else finds, and that are gone with the last who can read them."""

    def __init__(self, folder: Path) -> None:
        """Begin with none.

        Raises:
            OSError: There can be no file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._size = 0

    def append(self, views: Iterable[memoryview]) -> int:
        """Write bytes behind those that are here; return where they begin.

        Raises:
            OSError: The disk does not take them; what was here stays.
        """
        start = end = self._size
        for view in views:
            rest = view
            while rest:
                written = os.pwrite(self._file, rest, end)
                rest, end = rest[written:], end + written
        self._size = end
        return start

    def read(self, start: int, length: int) -> bytes:
        """Return so many bytes from there on."""
        return os.pread(self._file, length, start)


@dataclass(frozen=True)
class FilePart:
    """A payload in a file: see `sender.Source`.

    Attributes:
        size: How long it is.
    """

    file: UnnamedFile
    start: int
    size: int

    def read(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield views that together are `length` bytes from `offset`, fewer where the end comes first."""
        end = min(offset + length, self.size)
        while offset < end and (found := self.file.read(self.start + offset, end - offset)):
            yield memoryview(found)
            offset += len(found)


@dataclass
class Shelf:
    """Room for the gradients of one round.

    Attributes:
        limit: Bytes of all devices' together.
        folder: Of the file in which most of many lie; None keeps all in memory.
        is_full: Whether one found no room.
    """

    limit: int
    folder: Path | None = None
    used: int = 0
    is_full: bool = False
    _file: UnnamedFile | None = None

    def lay(self, gradient: Sender) -> Sender:
        """Return what is no device's last any more: out of memory where there is much, if the disk takes it."""
        if self.folder is None or self.used <= IN_MEMORY:
            return gradient
        try:
            self._file = self._file or UnnamedFile(self.folder)
            start = self._file.append(gradient.source.read(0, gradient.transfer.size))
        except OSError as error:
            log.warning("gradients of this round stay in memory, %s does not take them: %s", self.folder, error)
            self.folder = None
            return gradient
        return replace(gradient, source=FilePart(self._file, start, gradient.transfer.size))

    def take(self, size: int) -> bool:
        """Take room for so many bytes, if there is."""
        if self.used + size > self.limit:
            self.is_full = True
            return False
        self.used += size
        return True


@dataclass
class KeptAnswers:
    """Of one device, by step. The last one is kept in any case, until the next: the device may not have it yet."""

    _features: dict[int, bytes] = field(default_factory=dict)
    _gradients: dict[int, Sender] = field(default_factory=dict)
    _parted: set[int] = field(default_factory=set)
    _shelfless: int = 0
    _last: int = 0

    @property
    def last(self) -> int:
        """The last step that was served with the device; 0 for none."""
        return next(reversed(self._features), 0)

    def serve(self, step: int, features: bytes) -> None:
        """Note that a step, later than all before, was served with the device's features; `put` follows."""
        if self._shelfless:
            del self._gradients[self._shelfless]
            self._parted.add(self._shelfless)
            self._shelfless = 0
        self._features[step] = features

    def put(self, step: int, gradient: Sender, shelf: Shelf) -> None:
        """Keep a step's gradient; nothing of a device that failed meanwhile.

        Args:
            gradient: As it is sent.
            shelf: Has room for it, or not.
        """
        if step in self._features:
            if before := self._gradients.get(self._last):
                self._gradients[self._last] = shelf.lay(before)
            self._gradients[step], self._last = gradient, step
            if not shelf.take(gradient.transfer.size):
                self._shelfless = step

    def answers(self, step: int, features: bytes) -> bool:
        """Tell whether these features were served at a step: its gradient is here, or being computed."""
        return self._features.get(step) == features and step not in self._parted

    def following(self, step: int) -> int | None:
        """Return the next step that was served with the device behind one that was not; None behind any other."""
        return None if step in self._features else min((one for one in self._features if one > step), default=None)

    def of_step(self, step: int) -> Sender | None:
        """Return a step's gradient; None while it is being computed."""
        return self._gradients.get(step)

"""Sent gradients of a split round, for devices that restart their session.

A device draws random numbers by its seed and the step's number. So a killed trainer that starts at step 1 and gets the
same gradients again reaches the same position, and the server's part computes no step twice. One bound limits the
gradients of all devices in a round. The first few MiB stay in memory, and so does each device's last gradient; the
others are written to an unnamed file.
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
"""Bytes of a round's gradients above which all but each device's last are written to a file."""


class UnnamedFile:
    """Temporary file without a name, deleted with its last reader."""

    def __init__(self, folder: Path) -> None:
        """Create the file.

        Raises:
            OSError: The file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._size = 0

    def append(self, views: Iterable[memoryview]) -> int:
        """Append bytes; return their offset.

        Raises:
            OSError: The disk rejects them; earlier bytes stay.
        """
        start = end = self._size
        for view in views:
            remaining = view
            while remaining:
                written = os.pwrite(self._file, remaining, end)
                remaining, end = remaining[written:], end + written
        self._size = end
        return start

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._file, length, start)


@dataclass(frozen=True)
class FilePart:
    """A payload in a file; implements `sender.Source`."""

    file: UnnamedFile
    start: int
    size: int

    def read(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield views that together are `length` bytes from `offset`, fewer at the end of the file."""
        end = min(offset + length, self.size)
        while offset < end and (data := self.file.read(self.start + offset, end - offset)):
            yield memoryview(data)
            offset += len(data)


@dataclass
class GradientStore:
    """Space for the gradients of one round.

    Attributes:
        limit: Most bytes of all devices together.
        folder: Folder of the overflow file; None to keep all in memory.
        is_full: Whether a gradient was turned down.
    """

    limit: int
    folder: Path | None = None
    used: int = 0
    is_full: bool = False
    _file: UnnamedFile | None = None

    def offload(self, gradient: Sender) -> Sender:
        """Move a gradient that is not its device's last to disk, if there are many and the disk has room."""
        if self.folder is None or self.used <= IN_MEMORY:
            return gradient
        try:
            self._file = self._file or UnnamedFile(self.folder)
            start = self._file.append(gradient.source.read(0, gradient.transfer.size))
        except OSError as error:
            log.warning("gradients of this round stay in memory, cannot write to %s: %s", self.folder, error)
            self.folder = None
            return gradient
        return replace(gradient, source=FilePart(self._file, start, gradient.transfer.size))

    def take(self, size: int) -> bool:
        """Reserve `size` bytes; return false if there is no room."""
        if self.used + size > self.limit:
            self.is_full = True
            return False
        self.used += size
        return True


@dataclass
class SentGradients:
    """Gradients sent to one device, by step. The last is always stored: the device may not have it yet."""

    _features: dict[int, bytes] = field(default_factory=dict)
    _gradients: dict[int, Sender] = field(default_factory=dict)
    _parted: set[int] = field(default_factory=set)
    _shelfless: int = 0
    _last: int = 0

    @property
    def last(self) -> int:
        """The last step served with the device; 0 for none."""
        return next(reversed(self._features), 0)

    def serve(self, step: int, features: bytes) -> None:
        """Record that a step, later than all before, was served with the device's features; `put` follows."""
        if self._shelfless:
            del self._gradients[self._shelfless]
            self._parted.add(self._shelfless)
            self._shelfless = 0
        self._features[step] = features

    def put(self, step: int, gradient: Sender, store: GradientStore) -> None:
        """Store a step's gradient, unless the device has failed."""
        if step in self._features:
            if before := self._gradients.get(self._last):
                self._gradients[self._last] = store.offload(before)
            self._gradients[step], self._last = gradient, step
            if not store.take(gradient.transfer.size):
                self._shelfless = step

    def answers(self, step: int, features: bytes) -> bool:
        """Return true if these features were served at a step: its gradient is stored or being computed."""
        return self._features.get(step) == features and step not in self._parted

    def next_served(self, step: int) -> int | None:
        """Return the next step served with the device after one that was not; otherwise None."""
        return (
            None
            if step in self._features
            else min((served for served in self._features if served > step), default=None)
        )

    def of_step(self, step: int) -> Sender | None:
        """Return a step's gradient; None while it is being computed."""
        return self._gradients.get(step)

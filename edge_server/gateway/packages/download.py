"""What boards may fetch from a gateway: the index, what it names, and the script that installs the agent.

A name is looked up in the index, never in a folder; whatever is not in it is not there. Boards verify what they fetch:
packages by the manifest that the site signed, wheels by the digests that their own package knows.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from edge_server.gateway.enrolment.fair_places import FairPlaces
from edge_server.gateway.enrolment.registrar import Answer, Request, refusal
from edge_server.gateway.packages.store import (
    INDEX,
    WHEELS,
    PackageIndex,
    WheelFile,
    packages_folder,
    read_index,
)
from shared.errors import Unreachable
from shared.runtime.clock import Clock, monotonic
from shared.runtime.executor import in_thread

PREFIX, SCRIPT = "/packages/", "/install.sh"
MOST_PATH = 512
MOST_STREAMS, MOST_STREAMS_EACH = 48, 4
"""Downloads at once, in all and to one address: who joins finds a connection free."""
BLOCK_BYTES = 256 << 10
TURN_S = 30.0
"""For so long a download goes on even where others wait; it goes on later where it was, by a Range."""
STALL_S, LEAST_BYTES_PER_S = 30.0, 16e3
"""A reader that takes no block in so long, or the whole more slowly, is hung up on; it may go on where it was."""
AGAIN_S = 15.0

_RANGE = re.compile(r"bytes=([0-9]{0,12})-([0-9]{0,12})")
_PAGE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Download:
    """A file, or a run of its bytes, on its way to a board.

    Attributes:
        tag: By which one content is told from another.
        begin: First byte that is sent.
        count: Bytes that are sent.
        whole: Bytes of the file.
    """

    path: Path
    kind: str
    tag: str
    begin: int
    count: int
    whole: int

    def lines(self) -> list[str]:
        """Return the headers that tell what part of the file follows."""
        told = [f"Content-Type: {self.kind}", f"Content-Length: {self.count}", "Accept-Ranges: bytes"]
        told += [f'ETag: "{self.tag}"'] * bool(self.tag)
        if self.count != self.whole:
            told.append(f"Content-Range: bytes {self.begin}-{self.begin + self.count - 1}/{self.whole}")
        return told

    @property
    def status(self) -> int:
        """Of HTTP."""
        return 200 if self.count == self.whole else 206


def install_script() -> bytes:
    """Return the script that makes a bare board a device of a site; it is the same for every site and board."""
    return importlib.resources.files(__package__).joinpath("install.sh").read_bytes()


@dataclass
class PackageShelf:
    """What a site's boards may fetch; read anew when the index was written."""

    site: Path
    _seen: tuple[int, ...] = ()
    _index: PackageIndex = field(default_factory=PackageIndex)

    def find(self, request: Request) -> Answer | Download | None:
        """Return what is behind a path; None where it is none of ours. Not for the event loop.

        Raises:
            ConfigError: The index cannot be read.
        """
        if request.method != "GET":
            return None
        if request.path == SCRIPT:
            return Answer(200, "text/x-shellscript", install_script())
        if not request.path.startswith(PREFIX) or len(request.path) > MOST_PATH:
            return None
        name = unquote(request.path.removeprefix(PREFIX))
        index = self._read()
        if name == INDEX:
            return Answer(200, body=msgspec.json.encode(index))
        if name.startswith(f"{WHEELS}/") and name.endswith("/"):
            return _page(index, name.removeprefix(f"{WHEELS}/").removesuffix("/"))
        return self._file(index, name, request)

    def _read(self) -> PackageIndex:
        seen: tuple[int, ...] = ()
        with suppress(FileNotFoundError):
            about = (packages_folder(self.site) / INDEX).stat()
            seen = (about.st_mtime_ns, about.st_ino, about.st_size)
        if seen != self._seen:
            self._index, self._seen = read_index(self.site), seen
        return self._index

    def _file(self, index: PackageIndex, name: str, request: Request) -> Answer | Download:
        known = {f"{WHEELS}/{one.file}": one.sha256 for one in index.wheels}
        known |= {build.file: build.sha256 for one in index.manifests() for build in one.builds}
        path = packages_folder(self.site) / name
        if name not in known or (whole := _size(path)) is None:
            return refusal("malformed", status=404)
        part = find_range(request.range, whole)
        if part is None:
            return Answer(416, "text/plain")
        return Download(path, "application/octet-stream", known[name], *part, whole)


def _size(path: Path) -> int | None:
    """Return the bytes of a plain file; None for what is none: a link to one neither."""
    with suppress(OSError):
        about = path.lstat()
        return about.st_size if stat.S_ISREG(about.st_mode) else None
    return None


def open_file(path: Path) -> int:
    """Open a plain file to be read; it may have become something else since it was looked at. Not for the event loop.

    Raises:
        Unreachable: It is none.
        OSError: It cannot be opened; a link neither.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreachable(f"{path} is no plain file")
    return descriptor


def find_range(header: str, whole: int) -> tuple[int, int] | None:
    """Return the first byte and the number of those that a Range asks for (RFC 9110, section 14); None for none there.

    What is no range of bytes, or several, asks for the whole file.

    Args:
        header: Its value; empty where there is none.
        whole: Bytes of the file.
    """
    found = _RANGE.fullmatch(header.replace(" ", ""))
    if not found or not (found[1] or found[2]):
        return 0, whole
    if not found[1]:
        count = min(int(found[2]), whole)
        return (whole - count, count) if count else None
    begin, end = int(found[1]), int(found[2]) if found[2] else whole - 1
    if end < begin and found[2]:
        return 0, whole
    return (begin, min(end, whole - 1) - begin + 1) if begin < whole else None


def _page(index: PackageIndex, project: str) -> Answer:
    """Return an index's page of one project, as pip reads it (PEP 691)."""
    if not _PAGE.fullmatch(project):
        return refusal("malformed", status=404)
    files = [one for one in index.wheels if _project(one) == project]
    if not files:
        return refusal("malformed", status=404)
    told = {
        "meta": {"api-version": "1.0"},
        "name": project,
        "files": [
            {"filename": one.file, "url": f"../{quote(one.file)}", "hashes": {"sha256": one.sha256}} for one in files
        ],
    }
    return Answer(200, "application/vnd.pypi.simple.v1+json", msgspec.json.encode(told))


def _project(wheel: WheelFile) -> str:
    return re.sub(r"[-_.]+", "-", wheel.file.partition("-")[0]).lower()


@dataclass
class Streams:
    """Downloads under way.

    Attributes:
        most_each: Of these to one address.
        stall_s: Seconds for which a reader may take nothing.
        clock: Monotonic seconds.
        sent: Bytes of files that were handed to connections.
    """

    most: int = MOST_STREAMS
    most_each: int = MOST_STREAMS_EACH
    stall_s: float = STALL_S
    clock: Clock = monotonic
    sent: int = 0

    def __post_init__(self) -> None:
        """Have all places free."""
        self.places = FairPlaces(self.most, self.most_each, TURN_S, self.clock)

    @contextmanager
    def place(self, source: str, leave: Callable[[], None]) -> Iterator[bool]:
        """Tell whether there is room for one more to an address; it is taken while the block lasts.

        Args:
            leave: Is called if another has to be let in; the block is to end then.
        """
        taken = self.places.take(source, leave)
        try:
            yield taken is not None
        finally:
            if taken:
                self.places.free(taken)

    def patience_s(self, download: Download) -> float:
        """Return the seconds that a download may take in all."""
        return self.stall_s + download.count / LEAST_BYTES_PER_S

    async def send(self, writer: asyncio.StreamWriter, download: Download) -> None:
        """Send what a download is of, no faster than it is read: one block of it is in memory.

        Args:
            writer: Where to; its head has been written.

        Raises:
            TimeoutError: The reader takes nothing.
            Unreachable: The file has become shorter.
            OSError: The connection is gone.
        """
        file = await in_thread(open_file, download.path)
        try:
            place, left = download.begin, download.count
            while left:
                data = await in_thread(os.pread, file, min(BLOCK_BYTES, left), place)
                if not data:
                    raise Unreachable(f"{download.path} has become shorter while it was sent")
                writer.write(data)
                async with asyncio.timeout(self.stall_s):
                    await writer.drain()
                place, left = place + len(data), left - len(data)
                self.sent += len(data)
        finally:
            os.close(file)

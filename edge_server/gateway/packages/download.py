"""HTTP downloads for boards: package index, packages, wheels, install script.

Files are looked up in the index, never in a folder. Boards verify what they download: packages by the manifest that the
site signed, wheels by the digests in their own package.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from edge_server.gateway.enrolment.fair_slots import FairSlots
from edge_server.gateway.enrolment.registrar import Answer, Request, refusal
from edge_server.gateway.packages.store import (
    INDEX,
    PROJECTS,
    WHEELS,
    PackageIndex,
    WheelFile,
    packages_folder,
    read_index,
)
from shared.errors import Unreachable
from shared.protocol.packages import encode_signed_manifest
from shared.runtime.clock import Clock, monotonic
from shared.runtime.executor import in_thread

PREFIX, SCRIPT = "/packages/", "/install.sh"
MOST_PATH = 512
MOST_STREAMS, MOST_STREAMS_EACH = 48, 4
"""Simultaneous downloads in all and per address, fewer than connections, so that joining boards find one."""
BLOCK_BYTES = 256 << 10
TURN_S = 30.0
"""A download continues this long even if others wait; it can be resumed by a Range."""
STALL_S, LEAST_BYTES_PER_S = 30.0, 16e3
"""A reader that takes no block for so long, or is slower than this in all, is disconnected; it may resume."""
AGAIN_S = 15.0

_RANGE = re.compile(r"bytes=([0-9]{0,12})-([0-9]{0,12})")
_PAGE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Download:
    """A file, or a range of its bytes, to send to a board.

    Attributes:
        tag: ETag, which identifies the content.
        begin: Offset of the first byte.
        count: Number of bytes to send.
        size: Size of the file in bytes.
    """

    path: Path
    kind: str
    tag: str
    begin: int
    count: int
    size: int

    def lines(self) -> list[str]:
        """Return the content headers."""
        headers = [f"Content-Type: {self.kind}", f"Content-Length: {self.count}", "Accept-Ranges: bytes"]
        headers += [f'ETag: "{self.tag}"'] * bool(self.tag)
        if self.count != self.size:
            headers.append(f"Content-Range: bytes {self.begin}-{self.begin + self.count - 1}/{self.size}")
        return headers

    @property
    def status(self) -> int:
        """HTTP status."""
        return 200 if self.count == self.size else 206


def install_script() -> bytes:
    """Return the script that installs the agent on a board; it is the same for every site and board."""
    return importlib.resources.files(__package__).joinpath("install.sh").read_bytes()


@dataclass
class PackageCatalogue:
    """Files of a site for its boards; the index is read again when it has changed.

    Attributes:
        is_board: Return whether a client certificate (DER) is that of a board with rights; only boards have projects.
    """

    site: Path
    is_board: Callable[[bytes], bool] = lambda _certificate: False
    _seen: tuple[int, ...] = ()
    _index: PackageIndex = field(default_factory=PackageIndex)

    def find(self, request: Request) -> Answer | Download | None:
        """Return the content of a path; None if the path is not served here. Blocking.

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
        if name.startswith(f"{PROJECTS}/"):
            return self._project_file(index, name.removeprefix(f"{PROJECTS}/"), request)
        return self._package_file(index, name, request)

    def _package_file(self, index: PackageIndex, name: str, request: Request) -> Answer | Download:
        """Return the index, the page of a wheel, or a file of the agent's."""
        if name == INDEX:
            return Answer(200, body=msgspec.json.encode(msgspec.structs.replace(index, projects=())))
        if name.startswith(f"{WHEELS}/") and name.endswith("/"):
            return _page(index, name.removeprefix(f"{WHEELS}/").removesuffix("/"))
        return self._file(index, name, request)

    def _read(self) -> PackageIndex:
        version: tuple[int, ...] = ()
        with suppress(FileNotFoundError):
            about = (packages_folder(self.site) / INDEX).stat()
            version = (about.st_mtime_ns, about.st_ino, about.st_size)
        if version != self._seen:
            self._index, self._seen = read_index(self.site), version
        return self._index

    def _project_file(self, index: PackageIndex, name: str, request: Request) -> Answer | Download:
        """Return a project's signed manifest or wheel, for boards of the site alone."""
        if not request.peer or not self.is_board(request.peer):
            return refusal("malformed", status=403)
        for signed, manifest in zip(index.projects, index.project_manifests(), strict=True):
            if name == f"{manifest.name}/{manifest.version}.json":
                return Answer(200, body=encode_signed_manifest(signed))
            if name == f"{manifest.name}/{manifest.file}":
                return self._open(f"{PROJECTS}/{name}", {f"{PROJECTS}/{name}": manifest.sha256}, request)
        return refusal("malformed", status=404)

    def _file(self, index: PackageIndex, name: str, request: Request) -> Answer | Download:
        digests = {f"{WHEELS}/{wheel.file}": wheel.sha256 for wheel in index.wheels}
        digests |= {build.file: build.sha256 for manifest in index.manifests() for build in manifest.builds}
        return self._open(name, digests, request)

    def _open(self, name: str, digests: Mapping[str, str], request: Request) -> Answer | Download:
        path = packages_folder(self.site) / name
        if name not in digests or (size := _size(path)) is None:
            return refusal("malformed", status=404)
        requested = find_range(request.range, size)
        if requested is None:
            return Answer(416, "text/plain")
        begin, count = requested
        return Download(path, "application/octet-stream", digests[name], begin, count, size)


def _size(path: Path) -> int | None:
    """Return the size of a regular file; None for anything else, also for a link."""
    with suppress(OSError):
        about = path.lstat()
        return about.st_size if stat.S_ISREG(about.st_mode) else None
    return None


def open_file(path: Path) -> int:
    """Open a regular file for reading, even if it was replaced since it was checked. Blocking.

    Raises:
        Unreachable: It is not a regular file.
        OSError: It cannot be opened, or is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreachable(f"{path} is not a regular file")
    return descriptor


def find_range(header: str, size: int) -> tuple[int, int] | None:
    """Return offset and length of a requested Range (RFC 9110, section 14); None if it cannot be satisfied.

    Anything but a single byte range means the entire file.

    Args:
        header: Value of the header; empty if there is none.
        size: Size of the file in bytes.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if not match or not (match[1] or match[2]):
        return 0, size
    if not match[1]:
        count = min(int(match[2]), size)
        return (size - count, count) if count else None
    begin, end = int(match[1]), int(match[2]) if match[2] else size - 1
    if end < begin and match[2]:
        return 0, size
    return (begin, min(end, size - 1) - begin + 1) if begin < size else None


def _page(index: PackageIndex, project: str) -> Answer:
    """Return the index page of a project, as pip reads it (PEP 691)."""
    if not _PAGE.fullmatch(project):
        return refusal("malformed", status=404)
    files = [wheel for wheel in index.wheels if _project(wheel) == project]
    if not files:
        return refusal("malformed", status=404)
    page = {
        "meta": {"api-version": "1.0"},
        "name": project,
        "files": [
            {"filename": wheel.file, "url": f"../{quote(wheel.file)}", "hashes": {"sha256": wheel.sha256}}
            for wheel in files
        ],
    }
    return Answer(200, "application/vnd.pypi.simple.v1+json", msgspec.json.encode(page))


def _project(wheel: WheelFile) -> str:
    return re.sub(r"[-_.]+", "-", wheel.file.partition("-")[0]).lower()


@dataclass
class DownloadSlots:
    """Limits of simultaneous downloads.

    Attributes:
        most_each: Limit for one address.
        stall_s: Seconds without progress after which a reader is disconnected.
        clock: Monotonic clock in seconds.
        sent: Bytes of files passed to connections so far.
    """

    most: int = MOST_STREAMS
    most_each: int = MOST_STREAMS_EACH
    stall_s: float = STALL_S
    clock: Clock = monotonic
    sent: int = 0

    def __post_init__(self) -> None:
        self.slots = FairSlots(self.most, self.most_each, TURN_S, self.clock)

    @contextmanager
    def slot(self, source: str, evict: Callable[[], None]) -> Iterator[bool]:
        """Hold a slot for a download during the block; yield whether there was one.

        Args:
            evict: Called if the block is to end early, to make room for another.
        """
        slot = self.slots.acquire(source, evict)
        try:
            yield slot is not None
        finally:
            if slot:
                self.slots.release(slot)

    def time_limit_s(self, download: Download) -> float:
        """Return the time limit of an entire download, in seconds."""
        return self.stall_s + download.count / LEAST_BYTES_PER_S

    async def send(self, writer: asyncio.StreamWriter, download: Download) -> None:
        """Send a file's range, no faster than it is read, with one block of it in memory.

        Args:
            writer: Connection, to which the head has been written.

        Raises:
            TimeoutError: The reader has stalled.
            Unreachable: The file has become shorter.
            OSError: The connection was lost.
        """
        file = await in_thread(open_file, download.path)
        try:
            offset, remaining = download.begin, download.count
            while remaining:
                data = await in_thread(os.pread, file, min(BLOCK_BYTES, remaining), offset)
                if not data:
                    raise Unreachable(f"{download.path} has become shorter while it was sent")
                writer.write(data)
                async with asyncio.timeout(self.stall_s):
                    await writer.drain()
                offset, remaining = offset + len(data), remaining - len(data)
                self.sent += len(data)
        finally:
            os.close(file)

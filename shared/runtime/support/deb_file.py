"""Read Debian packages: an `ar` file with two xz-compressed tars, control and data.

Gateways check packages with it before they offer them, and boards unpack them with it. It writes nothing. All sizes are
bounded before memory is allocated, and packages with suspicious entries are refused as a whole: paths that lead out,
devices, pipes, hard links, set-user-id. Formats: deb(5), ar(5) and tar(5), ustar with GNU's long names.
"""

from __future__ import annotations

import lzma
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import CorruptFile

MIB = 1 << 20
MOST_PACKAGE = 64 * MIB
MOST_UNPACKED, MOST_FILE, MOST_ENTRIES = 512 * MIB, 64 * MIB, 20_000
MOST_EXPANSION, FREE_UNPACKED = 64, 16 * MIB
"""Largest expansion of an archive beyond the latter size; ours expand to less than ten times."""
MOST_NAME, MOST_SHOWN = 1024, 120
MOST_DICTIONARY = 128 * MIB
"""Memory limit of the decompression: `xz -9` needs 65 MiB."""
STEP = 64 << 10
BLOCK = 512
_AR, _AR_HEAD, _AR_END = b"!<arch>\n", 60, b"`\n"
CONTROL, DATA = "control.tar.xz", "data.tar.xz"
_MEMBERS = ("debian-binary", CONTROL, DATA)
_SPECIAL = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
_FILE, _FOLDER, _LINK, _LONG_NAME, _LONG_LINK = b"0", b"5", b"2", b"L", b"K"


@dataclass(frozen=True)
class PackedEntry:
    """A file, folder or link in an archive.

    Attributes:
        path: Full path without `./` and without a trailing slash; empty for the root folder.
        content: Data of a file; target of a link.
        is_program: Whether a file is executable.
    """

    path: str
    kind: str
    content: bytes = b""
    is_program: bool = False


class _Head(NamedTuple):
    kind: bytes
    size: int
    mode: int


def read_entries(data: bytes, part: str) -> Iterator[PackedEntry]:
    """Yield the entries of one of a package's two archives, in order.

    Args:
        part: Archive to read, `CONTROL` or `DATA`.

    Raises:
        CorruptFile: It is damaged, or has entries that no package of ours has.
    """
    if len(data) > MOST_PACKAGE:
        raise CorruptFile(f"the package has {len(data)} bytes, the limit is {MOST_PACKAGE}")
    return _read_archive(_XzStream(_find_parts(data)[part]))


def _find_parts(data: bytes) -> dict[str, memoryview]:
    """Locate the parts of a package by name."""
    if not data.startswith(_AR):
        raise CorruptFile("it is not a Debian package")
    place, parts = len(_AR), dict[str, memoryview]()
    for name in _MEMBERS:
        head = data[place : place + _AR_HEAD]
        stored_name, digits = head[:16].rstrip(b" /"), head[48:58].strip()
        if len(head) < _AR_HEAD or head[58:] != _AR_END or stored_name != name.encode() or not digits.isdigit():
            raise package_error(f"part {name} is missing or out of order")
        begin, size = place + _AR_HEAD, int(digits)
        if size > len(data) - begin:
            raise package_error(f"part {name} ends too soon")
        parts[name] = memoryview(data)[begin : begin + size]
        place = begin + size + size % 2
    if len(data) > place:
        raise package_error("data follows its last part")
    return parts


class _XzStream:
    """A bounded xz stream that must end where its data ends."""

    def __init__(self, data: memoryview) -> None:
        self._packed, self._place = data, 0
        self._most = min(MOST_UNPACKED, max(FREE_UNPACKED, MOST_EXPANSION * len(data)))
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_DICTIONARY)
        self._ready, self._bytes = bytearray(), 0

    def read(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        while len(self._ready) < count:
            if not self._more():
                raise package_error("its archive ends too soon")
        data = bytes(self._ready[:count])
        del self._ready[:count]
        return data

    def skip(self, count: int) -> None:
        """Skip `count` bytes."""
        while count:
            count -= len(self.read(min(count, STEP)))

    def finish(self) -> None:
        """Read to the end, where the checksum is; only zeros may follow."""
        while any(self._ready) or self._more():
            if any(self._ready):
                raise package_error("data follows its archive")
            self._ready.clear()
        if self._xz.unused_data or self._place < len(self._packed):
            raise package_error("data follows its archive")

    def _more(self) -> bool:
        if self._xz.eof:
            return False
        piece = b""
        if self._xz.needs_input:
            piece = bytes(self._packed[self._place : self._place + STEP])
            self._place += len(piece)
            if not piece:
                raise package_error("its archive is cut off")
        try:
            unpacked = self._xz.decompress(piece, STEP)
        except (lzma.LZMAError, EOFError, MemoryError) as error:
            raise package_error(f"its archive cannot be unpacked: {error}") from error
        self._bytes += len(unpacked)
        if self._bytes > self._most:
            raise package_error(f"it unpacks to more than {self._most} bytes, from {len(self._packed)}")
        self._ready += unpacked
        return True


def _read_archive(archive: _XzStream) -> Iterator[PackedEntry]:
    """Yield the entries of an archive under their full paths."""
    longer: dict[bytes, str] = {}
    for _ in range(MOST_ENTRIES):
        head = archive.read(BLOCK)
        if not any(head):
            archive.finish()
            return
        fields = _check_head(head)
        if fields.kind in (_LONG_NAME, _LONG_LINK):
            longer[fields.kind] = _decode_name(_read_content(archive, fields.size, MOST_NAME))
            continue
        short_name = _decode_name(head[:100])
        if head[257:263] == b"ustar\0" and (prefix := _decode_name(head[345:500])):
            short_name = f"{prefix}/{short_name}"
        name = _normalise_path(longer.pop(_LONG_NAME, short_name))
        link = longer.pop(_LONG_LINK, _decode_name(head[157:257]))
        yield _read_entry(archive, name, fields, link)
    raise package_error(f"it has more than {MOST_ENTRIES} entries")


def _read_entry(archive: _XzStream, name: str, head: _Head, link: str) -> PackedEntry:
    kind, size, mode = head
    if kind == _FILE:
        if mode & _SPECIAL:
            raise package_error(f"{quote_name(name)} would run as another user")
        return PackedEntry(name, "file", _read_content(archive, size, MOST_FILE), bool(mode & stat.S_IXUSR))
    if size:
        raise package_error(f"{quote_name(name)} has content, but is not a file")
    if kind == _FOLDER:
        return PackedEntry(name, "folder")
    if kind == _LINK:
        return PackedEntry(name, "link", link.encode())
    raise package_error(f"{quote_name(name)} is neither a file nor a folder nor a symbolic link")


def _check_head(head: bytes) -> _Head:
    """Verify the checksum of an entry's header, and parse it."""
    checksum = _parse_octal(head[148:156])
    if checksum != sum(head[:148]) + sum(b" " * 8) + sum(head[156:]) or head[257:262] != b"ustar":
        raise package_error("an entry of its archive has a wrong checksum or format")
    kind = head[156:157]
    return _Head(_FILE if kind == b"\0" else kind, _parse_octal(head[124:136]), _parse_octal(head[100:108]))


def _read_content(archive: _XzStream, size: int, most: int) -> bytes:
    if size > most:
        raise package_error(f"an entry has {size} bytes, the limit is {most}")
    content = archive.read(size)
    archive.skip(-size % BLOCK)
    return content


def _parse_octal(digits: bytes) -> int:
    octal = digits.strip(b" \0")
    if not octal.isdigit():
        raise package_error("an entry of its archive has a malformed number")
    try:
        return int(octal, 8)
    except ValueError:
        raise package_error("an entry of its archive has a malformed number") from None


def _decode_name(name: bytes) -> str:
    """Decode a zero-padded name; one with an unprintable character is refused."""
    try:
        text = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise package_error("a name in it is not UTF-8 text") from None
    if not text.isprintable():
        raise package_error(f"{quote_name(text)} has an unprintable character")
    return text


def _normalise_path(name: str) -> str:
    """Strip `./` and the trailing slash of a path; one that leads out of its folder is refused."""
    plain = name.removeprefix("./").removesuffix("/") if name != "./" else ""
    parts = plain.split("/") if plain else []
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or len(name) > MOST_NAME:
        raise package_error(f"{quote_name(name)} leads out of its folder")
    return plain


def quote_name(name: str) -> str:
    """Quote a name of an archive for a message."""
    return repr(name[:MOST_SHOWN])


def package_error(why: str) -> CorruptFile:
    """Make the error for a damaged or foreign package."""
    return CorruptFile(f"the package is damaged, or not a fieldfleet package: {why}")

"""Read a Debian package of ours: an `ar` file with two tars of xz inside, its control file and what is installed.

Gateways look into packages by it before they offer them, and boards unpack them by it. Nothing is written here.
Everything is bounded before memory is taken for it, and what no package of ours holds is refused as a whole: names that
lead out, devices, pipes, hard links, set-user-id. The formats are those of deb(5), ar(5) and tar(5): ustar, with GNU's
long names.
"""

from __future__ import annotations

import lzma
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import CorruptFile

MIB = 1 << 20
MOST_PACKAGE = 64 * MIB
MOST_UNPACKED, MOST_FILE, MOST_ENTRIES = 512 * MIB, 64 * MIB, 20_000
MOST_EXPANSION, FREE_UNPACKED = 64, 16 * MIB
"""An archive beyond the latter unpacks to so many times its size at most: ours to less than ten times."""
MOST_NAME, MOST_SHOWN = 1024, 120
MOST_DICTIONARY = 128 * MIB
"""Memory of the decompression: `xz -9` wants 65 MiB."""
STEP = 64 << 10
BLOCK = 512
_AR, _AR_HEAD, _AR_END = b"!<arch>\n", 60, b"`\n"
CONTROL, DATA = "control.tar.xz", "data.tar.xz"
_MEMBERS = ("debian-binary", CONTROL, DATA)
_SPECIAL = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
_FILE, _FOLDER, _LINK, _LONG_NAME, _LONG_LINK = b"0", b"5", b"2", b"L", b"K"


@dataclass(frozen=True)
class PackedEntry:
    """Something in an archive.

    Attributes:
        path: Its whole name without `./` and without a slash at its end; empty for the topmost folder.
        content: Of a file; of a link, what it leads to.
        is_program: Whether a file may be run.
    """

    path: str
    kind: str
    content: bytes = b""
    is_program: bool = False


def read_entries(data: bytes, part: str) -> Iterator[PackedEntry]:
    """Yield what one of a package's two archives holds, in its order.

    Args:
        part: `CONTROL` or `DATA`.

    Raises:
        CorruptFile: It is damaged, or holds what no package of ours does.
    """
    if len(data) > MOST_PACKAGE:
        raise CorruptFile(f"the package has {len(data)} bytes, more than {MOST_PACKAGE}")
    return _entries(_Unpacked(_find_parts(data)[part]))


def _find_parts(data: bytes) -> dict[str, memoryview]:
    """Return the parts of a package by their names."""
    if not data.startswith(_AR):
        raise CorruptFile("it is no Debian package")
    place, parts = len(_AR), dict[str, memoryview]()
    for name in _MEMBERS:
        head = data[place : place + _AR_HEAD]
        told, digits = head[:16].rstrip(b" /"), head[48:58].strip()
        if len(head) < _AR_HEAD or head[58:] != _AR_END or told != name.encode() or not digits.isdigit():
            raise damaged(f"its part {name} is not where it should be")
        begin, size = place + _AR_HEAD, int(digits)
        if size > len(data) - begin:
            raise damaged(f"its part {name} ends too soon")
        parts[name] = memoryview(data)[begin : begin + size]
        place = begin + size + size % 2
    if len(data) > place:
        raise damaged("something follows its last part")
    return parts


class _Unpacked:
    """A stream of xz, read to its end and no further than is allowed."""

    def __init__(self, data: memoryview) -> None:
        self._packed, self._place = data, 0
        self._most = min(MOST_UNPACKED, max(FREE_UNPACKED, MOST_EXPANSION * len(data)))
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_DICTIONARY)
        self._ready, self._bytes = bytearray(), 0

    def read(self, count: int) -> bytes:
        """Return just so many bytes."""
        while len(self._ready) < count:
            if not self._more():
                raise damaged("its archive ends too soon")
        found = bytes(self._ready[:count])
        del self._ready[:count]
        return found

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        while count:
            count -= len(self.read(min(count, STEP)))

    def finish(self) -> None:
        """Read to the end, where the checksum is; nothing may follow but zeros."""
        while any(self._ready) or self._more():
            if any(self._ready):
                raise damaged("something follows its archive")
            self._ready.clear()
        if self._xz.unused_data or self._place < len(self._packed):
            raise damaged("something follows its archive")

    def _more(self) -> bool:
        if self._xz.eof:
            return False
        piece = b""
        if self._xz.needs_input:
            piece = bytes(self._packed[self._place : self._place + STEP])
            self._place += len(piece)
            if not piece:
                raise damaged("its archive is cut off")
        try:
            found = self._xz.decompress(piece, STEP)
        except (lzma.LZMAError, EOFError, MemoryError) as error:
            raise damaged(f"its archive cannot be unpacked: {error}") from error
        self._bytes += len(found)
        if self._bytes > self._most:
            raise damaged(f"it unpacks to more than {self._most} bytes, from {len(self._packed)}")
        self._ready += found
        return True


def _entries(archive: _Unpacked) -> Iterator[PackedEntry]:
    """Yield each entry of an archive under its whole name."""
    longer: dict[bytes, str] = {}
    for _ in range(MOST_ENTRIES):
        head = archive.read(BLOCK)
        if not any(head):
            archive.finish()
            return
        kind, size = _check_head(head)
        if kind in (_LONG_NAME, _LONG_LINK):
            longer[kind] = _text(_content(archive, size, MOST_NAME))
            continue
        told = _text(head[:100])
        if head[257:263] == b"ustar\0" and (prefix := _text(head[345:500])):
            told = f"{prefix}/{told}"
        name = _plain(longer.pop(_LONG_NAME, told))
        link = longer.pop(_LONG_LINK, _text(head[157:257]))
        yield _entry(archive, name, (kind, size, _number(head[100:108])), link)
    raise damaged(f"it holds more than {MOST_ENTRIES} entries")


def _entry(archive: _Unpacked, name: str, told: tuple[bytes, int, int], link: str) -> PackedEntry:
    kind, size, mode = told
    if kind == _FILE:
        if mode & _SPECIAL:
            raise damaged(f"{shown(name)} would run as another user")
        return PackedEntry(name, "file", _content(archive, size, MOST_FILE), bool(mode & stat.S_IXUSR))
    if size:
        raise damaged(f"{shown(name)} has a content, and is no file")
    if kind == _FOLDER:
        return PackedEntry(name, "folder")
    if kind == _LINK:
        return PackedEntry(name, "link", link.encode())
    raise damaged(f"{shown(name)} is neither a file nor a folder nor a symbolic link")


def _check_head(head: bytes) -> tuple[bytes, int]:
    """Return kind and size of an entry."""
    told = _number(head[148:156])
    if told != sum(head[:148]) + sum(b" " * 8) + sum(head[156:]) or head[257:262] != b"ustar":
        raise damaged("an entry of its archive is not as it was written")
    kind = head[156:157]
    return (_FILE if kind == b"\0" else kind), _number(head[124:136])


def _content(archive: _Unpacked, size: int, most: int) -> bytes:
    if size > most:
        raise damaged(f"an entry has {size} bytes, more than {most}")
    found = archive.read(size)
    archive.skip(-size % BLOCK)
    return found


def _number(digits: bytes) -> int:
    told = digits.strip(b" \0")
    if not told.isdigit():
        raise damaged("an entry of its archive is not as it was written")
    try:
        return int(told, 8)
    except ValueError:
        raise damaged("an entry of its archive is not as it was written") from None


def _text(name: bytes) -> str:
    """Return a name, which zeros may follow; one with a zero or another character that is not shown is refused."""
    try:
        told = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise damaged("a name in it is no text") from None
    if not told.isprintable():
        raise damaged(f"{shown(told)} has a character that no name of a file should have")
    return told


def _plain(name: str) -> str:
    """Return a name without its `./` and its last slash; one that leads out is refused, wherever it is."""
    plain = name.removeprefix("./").removesuffix("/") if name != "./" else ""
    parts = plain.split("/") if plain else []
    if name.startswith("/") or any(one in ("", ".", "..") for one in parts) or len(name) > MOST_NAME:
        raise damaged(f"{shown(name)} leads out of its folder")
    return plain


def shown(name: str) -> str:
    """Return a name of an archive as it may be printed."""
    return repr(name[:MOST_SHOWN])


def damaged(why: str) -> CorruptFile:
    """Return the error that says what is wrong with a package."""
    return CorruptFile(f"the package is damaged, or none of ours: {why}")

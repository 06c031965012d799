"""Read a Debian package of ours: an `ar` file with a tar of xz inside, of which one version's folder is taken.

Nothing else of it is looked at, and nothing is written here. Everything is bounded before memory is taken for it, and
what no package of ours holds is refused as a whole: names that lead out, links that do, devices, pipes, hard links,
set-user-id. The formats are those of deb(5), ar(5) and tar(5): ustar, with GNU's long names.
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
MOST_NAME, MOST_SHOWN = 1024, 120
MOST_DICTIONARY = 128 * MIB
"""Memory of the decompression: `xz -9` wants 65 MiB."""
STEP = 64 << 10
BLOCK = 512
_AR, _AR_HEAD, _AR_END = b"!<arch>\n", 60, b"`\n"
_MEMBERS = ("debian-binary", "control.tar.xz", "data.tar.xz")
_SPECIAL = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX
_FILE, _FOLDER, _LINK, _LONG_NAME, _LONG_LINK = b"0", b"5", b"2", b"L", b"K"


@dataclass(frozen=True)
class PackedEntry:
    """Something in a version's folder.

    Attributes:
        path: Below that folder, its parts separated by slashes; empty for the folder itself.
        kind: What it is.
        content: Of a file; of a link, what it leads to.
        is_program: Whether a file may be run.
    """

    path: str
    kind: str
    content: bytes = b""
    is_program: bool = False


def unpack_package(data: bytes, folder: str, python: str) -> Iterator[PackedEntry]:
    """Yield what a package holds below a folder, folders before what is in them.

    Args:
        data: The package.
        folder: Such as `opt/fieldfleet/0.4.0`.
        python: The interpreter that it may lead to, such as `/usr/bin/python3.11`.

    Raises:
        CorruptFile: It is damaged, or holds what no package of ours does.
    """
    if len(data) > MOST_PACKAGE:
        raise CorruptFile(f"the package has {len(data)} bytes, more than {MOST_PACKAGE}")
    folders, seen = set[str](), set[str]()
    for name, entry in _entries(_Unpacked(_find_data(data))):
        if name == folder or name.startswith(f"{folder}/"):
            path = name[len(folder) + 1 :]
            _check_place(path, entry, seen, folders, python)
            yield PackedEntry(path, entry.kind, entry.content, entry.is_program)
    if "" not in folders:
        raise CorruptFile(f"the package has no folder {folder}: it is of another version, or none of the agent's")


def _check_place(path: str, entry: PackedEntry, seen: set[str], folders: set[str], python: str) -> None:
    """Refuse what is there twice, what has no folder, and a link that leads out; take note of the others."""
    if path in seen or (path and path.rpartition("/")[0] not in folders):
        raise _damaged(f"{_shown(entry.path)} is there twice, or its folder is not")
    seen.add(path)
    if entry.kind == "folder":
        folders.add(path)
    elif not path:
        raise _damaged(f"{_shown(entry.path)} is no folder")
    elif entry.kind == "link":
        _check_link(path, entry.content.decode(), python)


def _find_data(data: bytes) -> memoryview:
    """Return the archive of files in a package."""
    if not data.startswith(_AR):
        raise CorruptFile("it is no Debian package")
    place = len(_AR)
    for name in _MEMBERS:
        head = data[place : place + _AR_HEAD]
        told, digits = head[:16].rstrip(b" /"), head[48:58].strip()
        if len(head) < _AR_HEAD or head[58:] != _AR_END or told != name.encode() or not digits.isdigit():
            raise _damaged(f"its part {name} is not where it should be")
        begin, size = place + _AR_HEAD, int(digits)
        if size > len(data) - begin:
            raise _damaged(f"its part {name} ends too soon")
        place = begin + size + size % 2
    if len(data) > place:
        raise _damaged("something follows its last part")
    return memoryview(data)[begin : begin + size]


class _Unpacked:
    """A stream of xz, read to its end and no further than is allowed."""

    def __init__(self, data: memoryview) -> None:
        self._packed, self._place = data, 0
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_DICTIONARY)
        self._ready, self._bytes = bytearray(), 0

    def read(self, count: int) -> bytes:
        """Return just so many bytes."""
        while len(self._ready) < count:
            if not self._more():
                raise _damaged("its archive ends too soon")
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
                raise _damaged("something follows its archive")
            self._ready.clear()
        if self._xz.unused_data or self._place < len(self._packed):
            raise _damaged("something follows its archive")

    def _more(self) -> bool:
        if self._xz.eof:
            return False
        piece = b""
        if self._xz.needs_input:
            piece = bytes(self._packed[self._place : self._place + STEP])
            self._place += len(piece)
            if not piece:
                raise _damaged("its archive is cut off")
        try:
            found = self._xz.decompress(piece, STEP)
        except (lzma.LZMAError, EOFError, MemoryError) as error:
            raise _damaged(f"its archive cannot be unpacked: {error}") from error
        self._bytes += len(found)
        if self._bytes > MOST_UNPACKED:
            raise _damaged(f"it unpacks to more than {MOST_UNPACKED} bytes")
        self._ready += found
        return True


def _entries(archive: _Unpacked) -> Iterator[tuple[str, PackedEntry]]:
    """Yield each entry of an archive under its whole name."""
    longer: dict[bytes, str] = {}
    for _ in range(MOST_ENTRIES):
        head = archive.read(BLOCK)
        if not any(head):
            archive.finish()
            return
        kind, size = _check_head(head)
        if kind in (_LONG_NAME, _LONG_LINK):
            longer[kind] = _text(_content(archive, size, MOST_NAME).partition(b"\0")[0])
            continue
        told = _text(head[:100].partition(b"\0")[0])
        if head[257:263] == b"ustar\0" and (prefix := _text(head[345:500].partition(b"\0")[0])):
            told = f"{prefix}/{told}"
        name = _plain(longer.pop(_LONG_NAME, told))
        link = longer.pop(_LONG_LINK, _text(head[157:257].partition(b"\0")[0]))
        yield name, _entry(archive, name, (kind, size, _number(head[100:108])), link)
    raise _damaged(f"it holds more than {MOST_ENTRIES} entries")


def _entry(archive: _Unpacked, name: str, told: tuple[bytes, int, int], link: str) -> PackedEntry:
    kind, size, mode = told
    if kind == _FILE:
        if mode & _SPECIAL:
            raise _damaged(f"{_shown(name)} would run as another user")
        return PackedEntry(name, "file", _content(archive, size, MOST_FILE), bool(mode & stat.S_IXUSR))
    if size:
        raise _damaged(f"{_shown(name)} has a content, and is no file")
    if kind == _FOLDER:
        return PackedEntry(name, "folder")
    if kind == _LINK:
        return PackedEntry(name, "link", link.encode())
    raise _damaged(f"{_shown(name)} is neither a file nor a folder nor a symbolic link")


def _check_head(head: bytes) -> tuple[bytes, int]:
    """Return kind and size of an entry."""
    told = _number(head[148:156])
    if told != sum(head[:148]) + sum(b" " * 8) + sum(head[156:]) or head[257:262] != b"ustar":
        raise _damaged("an entry of its archive is not as it was written")
    kind = head[156:157]
    return (_FILE if kind == b"\0" else kind), _number(head[124:136])


def _content(archive: _Unpacked, size: int, most: int) -> bytes:
    if size > most:
        raise _damaged(f"an entry has {size} bytes, more than {most}")
    found = archive.read(size)
    archive.skip(-size % BLOCK)
    return found


def _number(digits: bytes) -> int:
    told = digits.strip(b" \0")
    if not told.isdigit():
        raise _damaged("an entry of its archive is not as it was written")
    try:
        return int(told, 8)
    except ValueError:
        raise _damaged("an entry of its archive is not as it was written") from None


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise _damaged("a name in it is no text") from None


def _plain(name: str) -> str:
    """Return a name without its `./` and its last slash; one that leads out is refused, wherever it is."""
    plain = name.removeprefix("./").removesuffix("/") if name != "./" else ""
    parts = plain.split("/") if plain else []
    if name.startswith("/") or any(one in ("", ".", "..") for one in parts) or len(name) > MOST_NAME:
        raise _damaged(f"{_shown(name)} leads out of its folder")
    return plain


def _check_link(path: str, target: str, python: str) -> None:
    """Refuse a link that leads out of the version's folder, but to its interpreter."""
    if path == "bin/python3" and target == python:
        return
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part == "." else 1
        if depth < 0 or not part:
            raise _damaged(f"{_shown(path)} leads out of its folder, to {_shown(target)}")


def _shown(name: str) -> str:
    return repr(name[:MOST_SHOWN])


def _damaged(why: str) -> CorruptFile:
    return CorruptFile(f"the package is damaged, or none of ours: {why}")

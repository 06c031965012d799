"""What a Debian package of the agent says of itself, read without dpkg: a gateway need not be a Debian.

The file is an `ar` archive of two tar archives (deb(5)): one with the control file, one with what is installed. Nothing
of it is run or unpacked; two small files of its tree are read.
"""

from __future__ import annotations

import ast
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shared.errors import ConfigError
from shared.protocol.packages import AGENT, Arch

MAGIC, HEAD_BYTES, END = b"!<arch>\n", 60, b"`\n"
MOST_CONTROL, MOST_FORMATS_FILE = 64 << 10, 256 << 10
HOME = "opt/fieldfleet/"
FORMATS_FILE, FORMATS = "/device_agent/upgrade/state_formats.py", "FORMATS"
"""The table in it says the form of each kind of state file that a version writes."""
BUILD_IT = "`make deb` builds packages of the agent"

_ARCHES: dict[str, Arch] = {"amd64": "amd64", "arm64": "arm64"}
_NEEDS_PYTHON = re.compile(r"python3 \(>= (3\.[0-9]{1,2})~\)")


class DebFacts(NamedTuple):
    """What a package is.

    Attributes:
        version: Name of its folder below /opt/fieldfleet.
        arch: Of which boards.
        python: That it needs, such as 3.11.
        formats: The newest form of each kind of state file that it writes; empty of a version before there were such.
    """

    version: str
    arch: Arch
    python: str
    formats: dict[str, int]


def read_deb(path: Path) -> DebFacts:
    """Return what a package of the agent says of itself.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _facts(path.name, dict(_control(file)), *_tree(file))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tarfile.TarError, EOFError, ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(f"{path.name} cannot be read as a Debian package ({error}); {BUILD_IT}") from error


def _facts(name: str, fields: dict[str, str], version: str, formats: dict[str, int]) -> DebFacts:
    if fields.get("package") != AGENT:
        raise ConfigError(f"{name} is of package {fields.get('package', '')[:64]!r}, not of {AGENT}; {BUILD_IT}")
    arch, python = _ARCHES.get(fields.get("architecture", "")), _NEEDS_PYTHON.search(fields.get("depends", ""))
    if arch is None or python is None or not version:
        raise ConfigError(f"{name} does not say its processor, its Python and its version; {BUILD_IT}")
    return DebFacts(version, arch, python[1], formats)


def _part(file: BinaryIO, wanted: str) -> tarfile.TarFile:
    """Return one of the two archives, to be read from its beginning."""
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("it is no ar archive")
    while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES and head.endswith(END):
        size = int(head[48:58])
        if not 0 <= size <= end - file.tell():
            raise ValueError("it is cut off")
        if head[:16].rstrip(b" /").startswith(wanted.encode()):
            return tarfile.open(fileobj=_Slice(file, size), mode="r|*")
        file.seek(size + size % 2, io.SEEK_CUR)
    raise ValueError(f"it has no {wanted}")


class _Slice(io.RawIOBase):
    """A part of a file, from where that stands."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)


def _control(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield the fields of the control file, by names in small letters."""
    with _part(file, "control.tar") as packed:
        for member in packed:
            if member.name.removeprefix("./") == "control":
                for line in _text(packed, member, MOST_CONTROL).splitlines():
                    name, colon, value = line.partition(":")
                    if colon and not line.startswith(" "):
                        yield name.lower(), value.strip()


def _tree(file: BinaryIO) -> tuple[str, dict[str, int]]:
    """Return the version whose folder the package has, and its forms of state files."""
    version, formats = "", dict[str, int]()
    with _part(file, "data.tar") as packed:
        for member in packed:
            name = member.name.removeprefix("./")
            if name == f"{HOME}current" and member.issym():
                version = member.linkname
            elif name.startswith(HOME) and name.endswith(FORMATS_FILE) and member.isfile():
                formats = _literal(_text(packed, member, MOST_FORMATS_FILE))
    return version, formats


def _text(packed: tarfile.TarFile, member: tarfile.TarInfo, most: int) -> str:
    found = packed.extractfile(member)
    if found is None or member.size > most:
        raise ValueError(f"{member.name} is none, or too long")
    return found.read(most).decode()


def _literal(source: str) -> dict[str, int]:
    """Return the table that a module assigns to `FORMATS`, without running it."""
    for node in ast.parse(source).body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(one, ast.Name) and one.id == FORMATS for one in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            found = ast.literal_eval(node.value) if node.value else {}
            return {str(name): int(number) for name, number in dict(found).items()}
    return {}

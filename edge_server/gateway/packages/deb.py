"""Metadata of an agent's Debian package, read without dpkg.

The gateway need not run Debian. The package is read by the boards' own reader (`shared.runtime.support.deb_file`), so
that none is offered that boards cannot read; nothing of it is run or unpacked.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from shared.errors import ConfigError, CorruptFile
from shared.protocol.packages import AGENT, Arch
from shared.runtime.support.deb_file import CONTROL, DATA, MOST_PACKAGE, PackedEntry, read_entries
from shared.runtime.text_table import printable_text

MOST_CONTROL, MOST_FORMATS_FILE = 64 << 10, 256 << 10
HOME = "opt/fieldfleet/"
FORMATS_FILE, FORMATS = "/device_agent/upgrade/state_formats.py", "FORMATS"
"""Holds a table with the format of each kind of state file that a version writes."""
MOST_PYTHONS = 10
BUILD_IT = "build packages of the agent by `make deb`"

_ARCHES: dict[str, Arch] = {"amd64": "amd64", "arm64": "arm64"}
_NEEDS_PYTHON = re.compile(r"python3 \(>= 3\.([0-9]{1,2})~\)(?:, python3 \(<< 3\.([0-9]{1,2})~?\))?")


class DebFacts(NamedTuple):
    """Metadata of a package.

    Attributes:
        version: Name of its folder below /opt/fieldfleet.
        python: Python versions that it supports, such as `3.11` or `3.11 3.12`.
        formats: Newest format of each kind of state file that it writes; empty for versions without the table.
    """

    version: str
    arch: Arch
    python: str
    formats: dict[str, int]


def read_deb(path: Path) -> DebFacts:
    """Return the metadata of an agent's package.

    Raises:
        ConfigError: It is not a package of the agent, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_PACKAGE + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    name = printable_text(path.name)
    try:
        return read_facts(data, name)
    except CorruptFile as error:
        raise ConfigError(f"{name}: {error}; {BUILD_IT}") from error


def read_facts(data: bytes, name: str) -> DebFacts:
    """Return the metadata from a package's bytes.

    Raises:
        ConfigError: It is the package of another program.
        CorruptFile: It is damaged, or not a package.
    """
    fields = _control(data)
    if fields.get("package") != AGENT:
        package = printable_text(fields.get("package", ""))[:64]
        raise ConfigError(f"{name} is a package of {package!r}, not of {AGENT}; {BUILD_IT}")
    version, formats = _tree(data)
    arch, bounds = _ARCHES.get(fields.get("architecture", "")), _NEEDS_PYTHON.search(fields.get("depends", ""))
    python = _pythons(int(bounds[1]), int(bounds[2] or int(bounds[1]) + 1)) if bounds else ""
    if arch is None or not python or not version:
        raise ConfigError(f"{name} does not declare its processor, Python and version; {BUILD_IT}")
    return DebFacts(version, arch, python, formats)


def _pythons(first: int, end: int) -> str:
    """Return the Python versions from minor version `first` on, before `end`."""
    return " ".join(f"3.{minor}" for minor in range(first, min(end, first + MOST_PYTHONS)))


def _control(data: bytes) -> dict[str, str]:
    """Return the fields of the control file, by lower-case names."""
    fields = dict[str, str]()
    for entry in read_entries(data, CONTROL):
        if entry.path == "control":
            for line in _text(entry, MOST_CONTROL).splitlines():
                name, colon, value = line.partition(":")
                if colon and not line.startswith(" "):
                    fields[name.lower()] = value.strip()
    return fields


def _tree(data: bytes) -> tuple[str, dict[str, int]]:
    """Return the version that the package's folder names, and its formats of state files."""
    version, formats = "", dict[str, int]()
    for entry in read_entries(data, DATA):
        if entry.path == f"{HOME}current" and entry.kind == "link":
            version = entry.content.decode()
        elif entry.path.startswith(HOME) and entry.path.endswith(FORMATS_FILE) and entry.kind == "file":
            formats = _table(_text(entry, MOST_FORMATS_FILE))
    return version, formats


def _text(entry: PackedEntry, most: int) -> str:
    if entry.kind != "file" or len(entry.content) > most:
        raise CorruptFile(f"its {entry.path[:64]!r} is not a file, or longer than {most} bytes")
    try:
        return entry.content.decode()
    except UnicodeDecodeError:
        raise CorruptFile(f"its {entry.path[:64]!r} is not text") from None


def _table(source: str) -> dict[str, int]:
    """Return the table that a module assigns to `FORMATS`, without running it."""
    try:
        formats = _assigned_value(source)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise CorruptFile(f"its {FORMATS} cannot be read ({printable_text(str(error))[:200]})") from error
    if not isinstance(formats, dict) or not all(type(name) is str for name in formats):
        raise CorruptFile(f"its {FORMATS} is not a table of names")
    if not all(type(number) is int for number in formats.values()):
        raise CorruptFile(f"its {FORMATS} has formats that are not integers")
    return formats


def _assigned_value(source: str) -> object:
    """Return the value that a module assigns to `FORMATS`; an empty table if there is none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == FORMATS for target in targets):
            return ast.literal_eval(value)
    return {}

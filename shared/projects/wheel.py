"""Write reproducible wheels of projects; read them with every entry checked.

A wheel holds pure Python: the project's package and its metadata, `NAME-VERSION.dist-info`. An archive with anything
else, with a path out of its folders, with links, compiled code or the metadata of another distribution, or that unpacks
to more than `MOST_UNPACKED`, is refused as a whole.
"""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator, Mapping

from shared.errors import CorruptFile
from shared.runtime.support.deb_file import PackedEntry

MOST_UNPACKED, MOST_ENTRIES, MOST_PATH = 64 << 20, 4096, 240
COMPILED = (".pyc", ".pyo", ".so", ".pyd")
"""Endings of code that Python would run in place of the sources, by whose digest servers and boards are compared."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every entry, so that equal files make equal wheels."""
PLAIN_FILE = 0o100644
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 0x1


def info_folder(name: str, version: str) -> str:
    """Return the name of a wheel's metadata folder."""
    return f"{name}-{version}.dist-info"


def write_wheel(
    name: str, version: str, files: Mapping[str, bytes], entry_points: Mapping[str, Mapping[str, str]] | None = None
) -> bytes:
    """Return a wheel with these files, by path in the archive.

    Args:
        files: Content of the package's files.
        entry_points: `module:attribute` by group and name.
    """
    info = info_folder(name, version)
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: fieldfleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if entry_points:
        lines = [line for group, names in sorted(entry_points.items()) for line in (f"[{group}]", *_assignments(names))]
        metadata[f"{info}/entry_points.txt"] = "".join(f"{line}\n" for line in lines).encode()
    content = dict(sorted(files.items())) | metadata
    record = "".join(f"{path},{_record_hash(data)},{len(data)}\n" for path, data in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr, entry.compress_type = PLAIN_FILE << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return out.getvalue()


def _assignments(names: Mapping[str, str]) -> Iterator[str]:
    return (f"{name} = {reference}" for name, reference in sorted(names.items()))


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def read_wheel(data: bytes, name: str, version: str) -> list[PackedEntry]:
    """Return the folders and files of a wheel, parents first.

    Raises:
        CorruptFile: The archive is damaged, or has unexpected content.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = list(_read_entries(archive, name, version))
        _require_metadata(files, name, version)
        return list(_with_folders(files))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise CorruptFile(f"the archive of project {name} is damaged: {error}") from error


def _read_entries(archive: zipfile.ZipFile, name: str, version: str) -> Iterator[PackedEntry]:
    entries, roots, remaining, paths = archive.infolist(), (name, info_folder(name, version)), MOST_UNPACKED, set[str]()
    if len(entries) > MOST_ENTRIES:
        raise _refusal(name, f"{len(entries)} entries, more than {MOST_ENTRIES}")
    for entry in entries:
        path = entry.orig_filename  # `filename` ends at a NUL
        _check_path(path, name, roots)
        folded = unicodedata.normalize("NFC", path).casefold()
        if folded in paths:
            raise _refusal(name, f"{path[:MOST_PATH]!r} is there twice")
        paths.add(folded)
        mode = entry.external_attr >> 16
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise _refusal(name, f"{path!r} is no plain file")
        if entry.compress_type not in METHODS or entry.flag_bits & ENCRYPTED:
            raise _refusal(name, f"{path!r} is packed in a way that wheels are not")
        with archive.open(entry) as file:
            content = file.read(remaining + 1)  # the sizes in the archive may be wrong
        remaining -= len(content)
        if remaining < 0:
            raise _refusal(name, f"more than {MOST_UNPACKED >> 20} MiB unpacked")
        yield PackedEntry(path, "file", content)


def _check_path(path: str, name: str, roots: tuple[str, str]) -> None:
    parts = path.split("/")
    is_plain = path.isprintable() and not {"\\", ":"} & set(path) and len(path.encode()) <= MOST_PATH
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise _refusal(name, f"{path[:MOST_PATH]!r} is no path in it")
    if len(parts) == 1 or parts[0] not in roots:
        raise _refusal(name, f"{path!r} is outside {' and '.join(roots)}")
    if path.endswith(COMPILED):
        raise _refusal(name, f"{path!r} is compiled code; projects are Python sources")


def _require_metadata(files: list[PackedEntry], name: str, version: str) -> None:
    """Refuse a wheel without its package, or that would be found as another distribution."""
    content = {file.path: file.content for file in files}
    lines = content.get(f"{info_folder(name, version)}/METADATA", b"").splitlines()
    identity = [line.decode(errors="replace") for line in lines if line.lower().startswith((b"name:", b"version:"))]
    if sorted(identity) != [f"Name: {name}", f"Version: {version}"]:
        raise _refusal(name, f"its METADATA is not that of {name} {version}")
    if f"{name}/__init__.py" not in content:
        raise _refusal(name, f"{name}/__init__.py is missing")


def _refusal(name: str, problem: str) -> CorruptFile:
    return CorruptFile(f"the archive of project {name} is refused: {problem}")


def _with_folders(files: list[PackedEntry]) -> Iterator[PackedEntry]:
    """Yield the files after the folders that they are in; the root has an empty path."""
    yield PackedEntry("", "folder")
    folders = {
        "/".join(parts[:count]) for file in files for parts in [file.path.split("/")] for count in range(1, len(parts))
    }
    paths = {file.path for file in files}
    for folder in sorted(folders):
        if folder in paths:
            raise CorruptFile(f"{folder!r} is a file and a folder")
        yield PackedEntry(folder, "folder")
    yield from files

"""Extract a version's folder from an agent package (.deb), in memory.

A package with unexpected content is refused as a whole: beside the checks of `shared.runtime.support.deb_file`, links
out of the folder, duplicates, and entries without a parent folder.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from shared.errors import CorruptFile
from shared.runtime.support.deb_file import DATA, PackedEntry, package_error, quote_name, read_entries


def unpack_package(data: bytes, folder: str, python: Container[str]) -> Iterator[PackedEntry]:
    """Yield a package's entries below a folder, parents first.

    Args:
        folder: Folder in the package, such as `opt/fieldfleet/0.4.0`.
        python: Interpreters that `bin/python3` may link to, such as `/usr/bin/python3`.

    Raises:
        CorruptFile: The package is damaged, or has unexpected content.
    """
    folders, paths, links = set[str](), set[str](), dict[str, str]()
    for entry in read_entries(data, DATA):
        if entry.path == folder or entry.path.startswith(f"{folder}/"):
            path = entry.path[len(folder) + 1 :]
            _check_parent(path, entry, paths, folders)
            if entry.kind == "link":
                links[path] = _check_link(path, entry.content.decode(), python)
            yield replace(entry, path=path)
    if "" not in folders:
        raise CorruptFile(f"the package has no folder {folder}: it is of another version or not an agent package")
    _check_chains(links)


def _check_parent(path: str, entry: PackedEntry, paths: set[str], folders: set[str]) -> None:
    """Refuse duplicates and entries without a parent folder; record the others."""
    if path in paths or (path and path.rpartition("/")[0] not in folders):
        raise package_error(f"{quote_name(entry.path)} is a duplicate, or its folder is missing")
    paths.add(path)
    if entry.kind == "folder":
        folders.add(path)
    elif not path:
        raise package_error(f"{quote_name(entry.path)} is not a folder")


def _check_link(path: str, target: str, python: Container[str]) -> str:
    """Return a link's target relative to the version's folder; refuse targets outside, other than the interpreter.

    `..` is accepted only at the beginning: after a name, which may be a link, it would resolve elsewhere.
    """
    if path == "bin/python3" and target in python:
        return path
    climbs = 0
    parts = target.split("/")
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    above, names = path.split("/")[:-1], parts[climbs:]
    if climbs > len(above) or any(name in ("", ".", "..") for name in names):
        raise package_error(f"{quote_name(path)} links out of its folder, or indirectly, to {quote_name(target)}")
    return "/".join([*above[: len(above) - climbs], *names])


def _check_chains(links: Mapping[str, str]) -> None:
    """Refuse links through other links, whose targets cannot be checked here."""
    for path, target in links.items():
        parts = target.split("/")
        if any("/".join(parts[:count]) in links for count in range(1, len(parts))):
            raise package_error(f"{quote_name(path)} links through another link to {quote_name(target)}")

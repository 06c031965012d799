"""What of a Debian package of ours becomes a version's folder; nothing else of it is looked at, and nothing is written.

What no package of ours holds is refused as a whole: beside what `shared.runtime.support.deb_file` refuses, links that
lead out, and what has no folder.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from shared.errors import CorruptFile
from shared.runtime.support.deb_file import DATA, PackedEntry, package_error, quote_name, read_entries


def unpack_package(data: bytes, folder: str, python: Container[str]) -> Iterator[PackedEntry]:
    """Yield what a package holds below a folder, folders before what is in them.

    Args:
        folder: Such as `opt/fieldfleet/0.4.0`.
        python: The interpreters that it may lead to, such as `/usr/bin/python3`.

    Raises:
        CorruptFile: It is damaged, or holds what no package of ours does.
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
        raise CorruptFile(f"the package has no folder {folder}: it is of another version, or none of the agent's")
    _check_chains(links)


def _check_parent(path: str, entry: PackedEntry, paths: set[str], folders: set[str]) -> None:
    """Refuse what is there twice, and what has no folder; take note of the others."""
    if path in paths or (path and path.rpartition("/")[0] not in folders):
        raise package_error(f"{quote_name(entry.path)} is there twice, or its folder is not")
    paths.add(path)
    if entry.kind == "folder":
        folders.add(path)
    elif not path:
        raise package_error(f"{quote_name(entry.path)} is no folder")


def _check_link(path: str, target: str, python: Container[str]) -> str:
    """Return where a link leads, below the version's folder; refuse one that leads out, but to its interpreter.

    A `..` is taken at the beginning alone, where it climbs from a folder that is one: behind a name, that may be a
    link, and `..` is then beside what it leads to.
    """
    if path == "bin/python3" and target in python:
        return path
    climbs = 0
    parts = target.split("/")
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    above, names = path.split("/")[:-1], parts[climbs:]
    if climbs > len(above) or any(name in ("", ".", "..") for name in names):
        raise package_error(f"{quote_name(path)} leads out of its folder, or not straight, to {quote_name(target)}")
    return "/".join([*above[: len(above) - climbs], *names])


def _check_chains(links: Mapping[str, str]) -> None:
    """Refuse links that lead through links: where those end is nobody's to see."""
    for path, target in links.items():
        parts = target.split("/")
        if any("/".join(parts[:count]) in links for count in range(1, len(parts))):
            raise package_error(f"{quote_name(path)} leads through a link, to {quote_name(target)}")

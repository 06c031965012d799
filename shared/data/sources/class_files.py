"""Files in class folders: `root/<class>/<file>`, or `root/{train,test}/<class>/<file>`.

Classes are numbered in the order of their names. Devices agree on the numbers only where all have the same class
folders, so a class without a file on a device needs an empty folder, unless `classes` names them all.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.data.classes import find_class_folders, is_folder, is_system_folder, list_class_folders
from shared.data.identity import hash_texts
from shared.data.name_text import show_name
from shared.data.sources.arrays import NO_LABEL
from shared.data.spec import Data
from shared.errors import ConfigError, describe_cause
from shared.runtime.clock import utc_seconds

MOST_SEARCHED, SHOWN_KINDS = 1000, 6
HIDDEN = "hidden files"
UNFINISHED_S = 60.0
"""Age in seconds up to which a file of a growing folder may still be being written."""


@dataclass(frozen=True)
class FileKind:
    """Files that a source reads.

    Attributes:
        name: In the singular, for messages.
        suffixes: In lower case, with their dots.
    """

    name: str
    suffixes: tuple[str, ...]


@dataclass
class Listing:
    """Files of a split, and the entries that are skipped.

    Attributes:
        kind: Kind of the files.
        place: Folder of the split.
        files: Paths, in the order of `labels`.
        labels: Class of each file; `NO_LABEL` where no label is read.
        classes: Class names in label order.
        skipped: Number of skipped files and folders by reason.
        empty: Class folders without a file.
    """

    kind: FileKind
    place: Path
    files: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)
    empty: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each kind of entry that the user may have expected to be read."""
        lines = [f"skipped {skipped}"] if (skipped := describe_skipped(self)) else []
        noun = self.kind.name
        lines += [f"class folder {show_name(name)} holds no {noun}; if it is no class, move it" for name in self.empty]
        return lines

    def select(self, places: NDArray[np.int64]) -> None:
        """Keep the files at these places alone."""
        self.files = [self.files[place] for place in places.tolist()]
        self.labels = [self.labels[place] for place in places.tolist()]

    def identities(self) -> NDArray[np.uint64]:
        """Hash the path of each file within the split, uint64 of shape (N,)."""
        return hash_texts(path.relative_to(self.place).as_posix() for path in self.files)


def list_files(spec: Data, kind: FileKind) -> Listing:
    """List the files of a split, the newest `spec.recent` of them alone.

    Raises:
        ConfigError: The folder is absent, cannot be listed or holds no such file, or a class name cannot be used.
    """
    root = Path(spec.path)
    try:
        listing = _list_classes(root, spec, kind) if _has_class_folders(spec) else _list_unsorted(root, spec, kind)
        if not listing.files:
            raise ConfigError(explain_no_files(listing, spec))
        if spec.recent and len(listing.files) > spec.recent:
            times = [status.st_mtime_ns if (status := read_status(path)) else 0 for path in listing.files]
            listing.select(np.sort(np.argsort(times, kind="stable")[-spec.recent :]))
    except OSError as error:
        raise ConfigError(
            f"{root}: cannot be listed ({describe_cause(error)}); correct path or the folder's permissions"
        ) from error
    return listing


def is_unfinished(path: Path, spec: Data) -> bool:
    """Check whether a file of a growing folder may still be being written, or was removed since it was listed."""
    if not spec.growing:
        return False
    status = read_status(path)
    return abs(utc_seconds() - status.st_mtime) < UNFINISHED_S if status else not path.is_symlink()


def read_status(path: Path) -> os.stat_result | None:
    """Return size and times of a file; None where it was removed, or is a broken link, which its reader reports."""
    try:
        return path.stat()
    except OSError:
        return None


def _has_class_folders(spec: Data) -> bool:
    return spec.reads_labels and spec.target_kind == "class"


def _list_classes(root: Path, spec: Data, kind: FileKind) -> Listing:
    place, classes = find_class_folders(root, spec)
    listing = Listing(kind, place, classes=classes)
    for entry in _scan(place):
        if not is_folder(entry):
            listing.skipped[f"{_describe_kind(entry.name)} outside class folders"] += 1
        elif is_system_folder(entry.name) and entry.name not in classes:
            listing.skipped[f"system folder {entry.name}"] += 1
    folders = list_class_folders(place)  # without a class that only the other split has
    for number, name in enumerate(classes):
        paths = [path for folder in folders.get(name, ()) for path in _find_files(folder, listing)]
        listing.files += paths
        listing.labels += [number] * len(paths)
        if name in folders and not paths:
            listing.empty.append(name)
    return listing


def _list_unsorted(root: Path, spec: Data, kind: FileKind) -> Listing:
    """List a split's files in all subfolders but that of the masks, without classes."""
    place, _ = find_class_folders(root, msgspec.structs.replace(spec, classes=msgspec.UNSET))
    listing, masks = Listing(kind, place), place / (spec.masks or "")
    for folder, names, _ in os.walk(place, onerror=_raise):
        names[:] = sorted(
            name
            for name in names
            if name[0] != "." and not is_system_folder(name) and not (spec.masks and Path(folder, name) == masks)
        )
        listing.files += _find_files(Path(folder), listing, skips_folders=False)
    listing.labels = [NO_LABEL] * len(listing.files)
    return listing


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Check for a pipe, socket or device, which would block its reader; a broken link is read and then reported."""
    try:
        return not entry.is_file() and Path(entry).exists()
    except OSError:
        return False


def _raise(error: OSError) -> None:
    raise error


def _find_files(folder: Path, listing: Listing, *, skips_folders: bool = True) -> list[Path]:
    paths = []
    for entry in _scan(folder):
        if is_folder(entry):
            if skips_folders and entry.name[0] != "." and not is_system_folder(entry.name):
                listing.skipped["folders in class folders"] += 1
        elif entry.name[0] != "." and entry.name.lower().endswith(listing.kind.suffixes):
            if _is_special(entry):
                listing.skipped["pipes, sockets and devices"] += 1
            else:
                paths.append(folder / entry.name)
        else:
            listing.skipped[_describe_kind(entry.name)] += 1
    return sorted(paths)


def _describe_kind(name: str) -> str:
    if name.startswith("."):
        return HIDDEN
    suffix = Path(name).suffix.lower()
    return f"{show_name(suffix)} files" if suffix else "files without a suffix"


def describe_skipped(listing: Listing) -> str:
    """Format the number of skipped files by kind; empty if only hidden files were skipped."""
    kinds = [(kind, count) for kind, count in sorted(listing.skipped.items()) if not kind.startswith(HIDDEN)]
    if not kinds:
        return ""
    more = f" and {len(kinds) - SHOWN_KINDS} kinds more" if len(kinds) > SHOWN_KINDS else ""
    listed = ", ".join(f"{kind}: {count}" for kind, count in kinds[:SHOWN_KINDS])
    return f"{listed}{more}; formats read: {', '.join(listing.kind.suffixes)}"


def explain_no_files(listing: Listing, spec: Data) -> str:
    """Explain why a split has no file: those that it has instead, and the remedy."""
    place, has_classes = listing.place, _has_class_folders(spec)
    where = f"{place}: holds no {listing.kind.name}" + (" in a folder of its class" if has_classes else "")
    deeper = next(_deep_files(listing), None) if has_classes else None
    if deeper is not None and deeper.parent == place:
        return f"{where}: they lie in {place} itself; put each into a folder with the name of its class"
    if deeper is not None:
        return f"{where}: they lie deeper, in {deeper.parent}; set path to {_data_root(deeper)}"
    skipped = describe_skipped(listing)
    hint = f"; skipped {skipped}" if skipped else f"; formats read: {', '.join(listing.kind.suffixes)}"
    return f"{where}{hint}; correct path or convert the files"


def _deep_files(listing: Listing) -> Iterator[Path]:
    suffixes = listing.kind.suffixes
    for folder, names, files in islice(os.walk(listing.place), MOST_SEARCHED):
        names[:] = sorted(name for name in names if name[0] != "." and not is_system_folder(name))
        yield from (Path(folder, name) for name in files if name[0] != "." and name.lower().endswith(suffixes))


def _data_root(file: Path) -> Path:
    """Derive `path` from a file in its class folder."""
    root = file.parent.parent
    return root.parent if root.name in ("train", "test") else root


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of the numbers below `count`, evenly spaced, ascending."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))

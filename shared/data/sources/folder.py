"""Pictures in class folders: `root/<class>/<picture>`, or `root/{train,test}/<class>/<picture>`.

Classes are numbered in the order of their names. Devices agree on the numbers only where all have the same class
folders, so a class without a picture on a device needs an empty folder, unless `classes` names them all.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.data.classes import find_class_folders, is_system_folder, list_class_folders, normalise_class_names
from shared.data.name_text import show_name
from shared.data.sources.arrays import FLOAT_BYTES, Arrays, ReadPart, as_inputs, no_labels
from shared.data.sources.picture_file import GREY, Mode, decode, read_header
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_expansion, require_room

log = logging.getLogger(__name__)

SUFFIXES = (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
MOST_HEADERS = 1 << 14
"""Headers whose size is compared where only some pictures are read."""
MOST_SEARCHED, SHOWN_KINDS = 1000, 6
HIDDEN = "hidden files"
DISK_BLOCK = 4096
"""Smallest size of a file on disk, in bytes."""


@dataclass
class Listing:
    """Pictures of a split, and the entries that are skipped.

    Attributes:
        place: Folder of the split.
        pictures: Files, in the order of `labels`.
        labels: Class of each picture; `NO_LABEL` where no label is read.
        classes: Class names in label order.
        skipped: Number of skipped files and folders by reason.
        empty: Class folders without a picture.
    """

    place: Path
    pictures: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    classes: tuple[str, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)
    empty: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each kind of entry that the user may have expected to be read."""
        lines = [f"skipped {skipped}"] if (skipped := describe_skipped(self.skipped)) else []
        lines += [f"class folder {show_name(name)} holds no picture; if it is no class, move it" for name in self.empty]
        return lines


def read(spec: Data) -> Arrays:
    """Read one split of the folder: inputs of shape (N, channels, height, width) in [0, 1], labels of shape (N,).

    Where labels are not read, pictures may lie anywhere below the split's folder, and folder names do not matter. There
    are `spec.channels` channels; by default one if every picture of the split is grey, else three. Pictures are turned
    upright. Files of other types are skipped with a warning.

    Raises:
        ConfigError: Pillow or the folder is absent, or a picture is damaged or differs in size.
    """
    return read_part(spec).arrays


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read pictures evenly spread over the split, with at most `most` values in all; None for no limit.

    Raises:
        ConfigError: Pillow or the folder is absent, or a picture is damaged or differs in size.
    """
    listing = list_pictures(spec)
    for line in listing.notes():
        log.warning("%s: %s", listing.place, line)
    if not listing.pictures:
        raise ConfigError(explain_no_pictures(listing, spec))
    labels = np.array(listing.labels, dtype=np.int64)
    chosen, pixels = _decode(listing, spec, most)
    names = normalise_class_names(listing.classes) if spec.reads_labels else ()
    return ReadPart(Arrays(as_inputs(pixels), labels[chosen], classes=names), labels, tuple(listing.notes()))


def list_pictures(spec: Data) -> Listing:
    """List the pictures of a split.

    Raises:
        ConfigError: The folder is absent or cannot be listed, or a class has a name that cannot be used.
    """
    root = Path(spec.path)
    try:
        return _list_classes(root, spec) if spec.reads_labels else _list_unsorted(root, spec)
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error


def _list_classes(root: Path, spec: Data) -> Listing:
    place, classes = find_class_folders(root, spec)
    listing = Listing(place, classes=classes)
    for entry in os.scandir(place):
        if not entry.is_dir():
            listing.skipped[f"{_describe_kind(entry.name)} outside class folders"] += 1
        elif is_system_folder(entry.name) and entry.name not in classes:
            listing.skipped[f"system folder {entry.name}"] += 1
    folders = list_class_folders(place)  # without a class that only the other split has
    for number, name in enumerate(classes):
        paths = [path for folder in folders.get(name, ()) for path in _find_pictures(folder, listing.skipped)]
        listing.pictures += paths
        listing.labels += [number] * len(paths)
        if name in folders and not paths:
            listing.empty.append(name)
    return listing


def _list_unsorted(root: Path, spec: Data) -> Listing:
    """List a split's pictures in all subfolders, without classes."""
    place, _ = find_class_folders(root, msgspec.structs.replace(spec, classes=msgspec.UNSET))
    listing = Listing(place)
    for folder, names, _ in os.walk(place, onerror=_raise):
        names[:] = sorted(name for name in names if name[0] != "." and not is_system_folder(name))
        listing.pictures += _find_pictures(Path(folder), listing.skipped, skips_folders=False)
    listing.labels = no_labels(len(listing.pictures)).tolist()
    return listing


def _raise(error: OSError) -> None:
    raise error


def _find_pictures(folder: Path, skipped: Counter[str], *, skips_folders: bool = True) -> list[Path]:
    paths = []
    for entry in os.scandir(folder):
        if entry.is_dir():
            if skips_folders and entry.name[0] != "." and not is_system_folder(entry.name):
                skipped["folders in class folders"] += 1
        elif entry.name[0] != "." and entry.name.lower().endswith(SUFFIXES):
            paths.append(folder / entry.name)
        else:
            skipped[_describe_kind(entry.name)] += 1
    return sorted(paths)


def _describe_kind(name: str) -> str:
    if name.startswith("."):
        return HIDDEN
    suffix = Path(name).suffix.lower()
    return f"{show_name(suffix)} files" if suffix else "files without a suffix"


def describe_skipped(skipped: Counter[str]) -> str:
    """Format the number of skipped files by kind; empty if only hidden files were skipped."""
    kinds = [(kind, count) for kind, count in sorted(skipped.items()) if not kind.startswith(HIDDEN)]
    if not kinds:
        return ""
    more = f" and {len(kinds) - SHOWN_KINDS} kinds more" if len(kinds) > SHOWN_KINDS else ""
    return ", ".join(f"{kind}: {count}" for kind, count in kinds[:SHOWN_KINDS]) + f"{more}; formats read: {_formats()}"


def _formats() -> str:
    return ", ".join(SUFFIXES)


def explain_no_pictures(listing: Listing, spec: Data) -> str:
    """Explain why a split has no picture: the files that it has instead, and the remedy."""
    place = listing.place
    where = f"{place}: holds no picture" + (" in a folder of its class" if spec.reads_labels else "")
    deeper = next(_deep_pictures(place), None) if spec.reads_labels else None
    if deeper is not None and deeper.parent == place:
        return f"{where}: they lie in {place} itself; put each into a folder with the name of its class"
    if deeper is not None:
        return f"{where}: they lie deeper, in {deeper.parent}; set path to {_data_root(deeper)}"
    skipped = describe_skipped(listing.skipped)
    hint = f"; skipped {skipped}" if skipped else f"; formats read: {_formats()}"
    return f"{where}{hint}; correct path or convert the files"


def _deep_pictures(place: Path) -> Iterator[Path]:
    for folder, names, files in islice(os.walk(place), MOST_SEARCHED):
        names[:] = sorted(name for name in names if name[0] != "." and not is_system_folder(name))
        yield from (Path(folder, name) for name in files if name[0] != "." and name.lower().endswith(SUFFIXES))


def _data_root(picture: Path) -> Path:
    """Derive `path` from a picture in its class folder."""
    root = picture.parent.parent
    return root.parent if root.name in ("train", "test") else root


def _decode(listing: Listing, spec: Data, most: int | None) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Check all headers, then decode a selection; return indices and bytes, of shape (N, C, height, width)."""
    paths = listing.pictures
    looked = _spread(len(paths), len(paths) if most is None else MOST_HEADERS)
    (width, height), is_grey = _require_same_size([paths[at] for at in looked])
    mode: Mode = "L" if (spec.channels == 1 if spec.channels else is_grey) else "RGB"
    channels = 1 if mode == "L" else 3
    values = channels * width * height
    require_room((1 + FLOAT_BYTES) * len(paths) * values, listing.place)
    require_expansion(
        values * len(paths),
        sum(max(DISK_BLOCK, path.stat().st_size) for path in paths),
        listing.place,
        "make them smaller",
    )
    chosen = _spread(len(paths), len(paths) if most is None else max(1, most // values))
    array = np.empty((len(chosen), channels, height, width), dtype=np.uint8)
    for row, at in enumerate(chosen):
        pixels = decode(paths[at], mode)
        if pixels.shape[:2] != (height, width):
            raise ConfigError(f"{paths[at]}: its pixels do not match the size in its header; replace or remove it")
        array[row] = pixels if mode == "L" else pixels.transpose(2, 0, 1)
    return chosen, array


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of the numbers below `count`, evenly spaced, ascending."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _require_same_size(paths: Sequence[Path]) -> tuple[tuple[int, int], bool]:
    """Return the common width and height of all pictures, and whether all are grey.

    Raises:
        ConfigError: A picture has another size.
    """
    first = read_header(paths[0])
    size, is_grey = (first.width, first.height), True
    for path in paths:
        header = read_header(path)
        if (header.width, header.height) != size:
            shapes = f"{header.width}x{header.height}, not {size[0]}x{size[1]} as {paths[0].name}"
            raise ConfigError(f"{path}: is {shapes}; resize all pictures to one size")
        is_grey &= header.mode in GREY
    return size, is_grey

"""Pictures in class folders, or with a mask each; see `class_files` for the folders.

Pictures are turned upright, and resized where `size` is set. A mask is a picture whose pixel values are the classes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.classes import normalise_class_names
from shared.data.sources.arrays import FLOAT_BYTES, Arrays, Labels, ReadPart, as_inputs
from shared.data.sources.class_files import FileKind, Listing, is_unfinished, list_files, read_status, spread
from shared.data.sources.picture_file import GREY, Mode, decode, decode_mask, read_header
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_expansion, require_room

log = logging.getLogger(__name__)

PICTURES = FileKind(
    "picture",
    (
        *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
        *(".tif", ".tiff", ".webp"),
    ),
)
MOST_HEADERS = 1 << 14
"""Headers whose size is compared where only some pictures are read."""
DISK_BLOCK = 4096
"""Smallest size of a file on disk, in bytes."""
COLOURS = "RGB"
BLACK_AND_WHITE = (0, 255)
"""Pixel values of masks that only mark a place: they count as the classes 0 and 1."""


@dataclass(frozen=True)
class Layout:
    """Common format of a split's pictures: extents in pixels, and whether all are grey."""

    width: int
    height: int
    mode: Mode

    @property
    def channels(self) -> int:
        """Number of channels."""
        return 1 if self.mode == "L" else 3

    @property
    def values(self) -> int:
        """Values of one picture."""
        return self.channels * self.width * self.height


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read one split of the folder: inputs of shape (N, channels, height, width) in [0, 1], and classes or masks.

    Where labels are not read, pictures may lie anywhere below the split's folder, and folder names do not matter. There
    are `spec.channels` channels; by default one if every picture of the split is grey, else three. Pictures are turned
    upright. Files of other types are skipped with a warning.

    Args:
        most: Values in all of the pictures to read, evenly spread over the split; None for no limit.

    Raises:
        ConfigError: Pillow or the folder is absent, or a picture is damaged or differs in size.
    """
    return read_listing(list_files(spec, PICTURES), spec, most)


def read_listing(listing: Listing, spec: Data, most: int | None) -> ReadPart:
    """Read listed pictures; raise as `read_part`."""
    for line in listing.notes():
        log.warning("%s: %s", listing.place, line)
    notes = tuple(listing.notes())
    layout = _find_layout(listing, spec, most)
    all_labels = np.array(listing.labels, dtype=np.int64)
    listing.select(spread(len(listing.files), len(listing.files) if most is None else max(1, most // layout.values)))
    pixels, masks = _decode_all(listing, layout, spec)
    names = normalise_class_names(listing.classes) if spec.has_classes else ()
    labels: Labels = np.array(listing.labels, dtype=np.int64) if masks is None else masks
    identities = listing.identities() if spec.is_held_out_by_hash else None
    if (len(labels) < len(all_labels) and most is None) or masks is not None:  # unfinished files are left out
        all_labels = labels
    return ReadPart(Arrays(as_inputs(pixels), labels, None, names, identities), all_labels, notes)


def check_file(path: Path, listing: Listing, spec: Data) -> None:
    """Decode a picture, and its mask.

    Raises:
        ConfigError: It is damaged, or has no mask of its size.
    """
    header = read_header(path)
    layout = Layout(header.width, header.height, "L")
    decode(path, "L")
    if spec.masks and spec.is_labelled:
        _decode_mask(path, listing.place, layout, spec)


def _find_layout(listing: Listing, spec: Data, most: int | None) -> Layout:
    """Read headers, and check that all pictures fit in memory.

    All pictures are decoded one after the other, so their headers need no look before; a part of them may differ from
    the others, so many headers are read.
    """
    paths = listing.files
    looked = spread(len(paths), MOST_HEADERS) if most is not None else range(len(paths))
    (width, height), is_grey = _read_sizes([paths[at] for at in looked], spec, all_of_them=most is not None)
    if spec.size:
        height, width = spec.size
    layout = Layout(width, height, "L" if (spec.channels == 1 if spec.channels else is_grey) else "RGB")
    require_room((1 + FLOAT_BYTES) * len(paths) * layout.values, listing.place)
    if not spec.size:
        statuses = map(read_status, paths)
        stored = sum(max(DISK_BLOCK, status.st_size if status else 0) for status in statuses)
        require_expansion(layout.values * len(paths), stored, listing.place, "make them smaller")
    return layout


def _read_sizes(paths: Sequence[Path], spec: Data, *, all_of_them: bool) -> tuple[tuple[int, int], bool]:
    """Return the common width and height of pictures, and whether all are grey; by default of the first sound one.

    Raises:
        ConfigError: A picture has another size, and `size` is not set.
    """
    if spec.size and spec.channels:
        return (1, 1), False
    size, is_grey, first = None, True, paths[0]
    for path in paths:
        try:
            header = read_header(path)
        except ConfigError:
            if is_unfinished(path, spec):
                continue
            raise
        size, first = (size, first) if size else ((header.width, header.height), path)
        if not spec.size:
            _require_size(path, (header.width, header.height), size, first.name)
        is_grey &= header.mode in GREY
        if not all_of_them:
            break
    return size or (1, 1), is_grey


def _require_size(path: Path, size: tuple[int, int], common: tuple[int, int], first: str) -> None:
    """Refuse a picture of another width and height than the first one."""
    if size != common:
        shapes = f"{size[0]}x{size[1]}, not {common[0]}x{common[1]} as {first}"
        raise ConfigError(f"{path}: is {shapes}; resize all pictures to one size, or set data.size")


def _decode_all(listing: Listing, layout: Layout, spec: Data) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
    """Decode the listed pictures, of shape (N, C, height, width), and their masks; leave unfinished files out.

    Grey pictures before the first one in colour get three equal channels.
    """
    shape, mode = (layout.height, layout.width), layout.mode if spec.channels else None
    array = np.empty((len(listing.files), layout.channels, *shape), dtype=np.uint8)
    masks = np.empty((len(listing.files), *shape), dtype=np.uint8) if spec.masks and spec.is_labelled else None
    complete, first = list[int](), listing.files[0].name
    for row, path in enumerate(listing.files):
        try:
            pixels = decode(path, mode, spec.size or None)
            _require_size(path, pixels.shape[1::-1], (layout.width, layout.height), first)
            if masks is not None:
                masks[len(complete)] = _decode_mask(path, listing.place, layout, spec)
        except ConfigError:
            if is_unfinished(path, spec):
                continue
            raise
        if pixels.ndim > len(shape) and len(array[0]) == 1:
            require_room((len(COLOURS) + FLOAT_BYTES * len(COLOURS)) * array.size, listing.place)
            array = np.repeat(array, len(COLOURS), axis=1)
        array[len(complete)] = pixels if pixels.ndim == len(shape) else pixels.transpose(2, 0, 1)
        complete.append(row)
    if len(complete) < len(listing.files):
        listing.select(np.array(complete, dtype=np.int64))
    return array[: len(complete)], None if masks is None else _as_classes(masks[: len(complete)])


def _decode_mask(path: Path, place: Path, layout: Layout, spec: Data) -> NDArray[np.uint8]:
    mask_path = _find_mask(path.relative_to(place), place / str(spec.masks))
    width, height = read_header(path)[:2] if spec.size else (layout.width, layout.height)
    mask = decode_mask(mask_path)
    if mask.shape != (height, width):
        shapes = f"{mask.shape[1]}x{mask.shape[0]}, not {width}x{height} as {path.name}"
        raise ConfigError(f"{mask_path}: is {shapes}; give each picture a mask of its own size")
    return decode_mask(mask_path, spec.size) if spec.size else mask


def _find_mask(relative: Path, folder: Path) -> Path:
    """Find `masks/a/1.png` of `a/1.jpg`, or else `masks/1.png`."""
    names = [relative.with_suffix("")]
    names += [Path(*relative.parts[1:]).with_suffix("")] if len(relative.parts) > 1 else []
    for name in names:
        for suffix in PICTURES.suffixes:
            if (path := folder / f"{name}{suffix}").is_file():
                return path
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; correct data.masks")
    raise ConfigError(
        f"{folder}: has no mask of picture {relative}; add {names[-1]}.png to this folder, or remove the picture"
    )


def _as_classes(masks: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return pixel values as classes; masks of black and white alone have the classes 0 and 1."""
    values = np.flatnonzero(np.bincount(masks.reshape(-1), minlength=256))
    if values[-1:] == BLACK_AND_WHITE[1] and set(values.tolist()) <= set(BLACK_AND_WHITE):
        return (masks > 0).astype(np.int64)
    return masks.astype(np.int64)

"""Pictures in folders, one folder a class: `root/<class>/<picture>`, or `root/train/<class>` and `root/test/<class>`.

Classes are numbered in the order of their names. Devices agree on the numbers only where all have the same class
folders, so a class of which a device has no picture is an empty folder there, unless `classes` names them all.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.data.classes import as_told, find_class_folders
from shared.data.sources.arrays import FLOAT_BYTES, Arrays, as_inputs
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow goes by what is in a file, not by its name, and runs Ghostscript on what begins like PostScript."""
DAMAGE = (OSError, EOFError, ValueError, SyntaxError, LookupError, OverflowError, TypeError, struct.error, zlib.error)
"""What Pillow raises on damaged files."""
GREY = frozenset(("1", "L"))
EIGHT_BIT = GREY | frozenset(("CMYK", "HSV", "LA", "P", "PA", "RGB", "RGBA", "YCbCr"))


def read(spec: Data) -> Arrays:
    """Return one split of the folder: inputs of shape (N, channels, height, width) in [0, 1], labels of shape (N,).

    Where labels are not read, pictures may lie anywhere below the split's folder; what their folders are called says
    nothing. There is one channel where every picture of the split is grey, else three. Files of other types are passed
    over.

    Raises:
        ConfigError: Pillow or the folder is absent, or a picture is damaged or differs in size.
    """
    root = Path(spec.path)
    if not spec.reads_labels:
        return Arrays.unlabelled(as_inputs(_decode(_unsorted_pictures(root, spec))))
    place, classes = find_class_folders(root, spec)
    try:
        paths = [(path, number) for number, name in enumerate(classes) for path in _pictures(place / name)]
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error
    if not paths:
        raise ConfigError(f"{place}: holds no picture in a folder of its class; correct path")
    labels = np.array([number for _, number in paths], dtype=np.int64)
    return Arrays(as_inputs(_decode([path for path, _ in paths])), labels, classes=as_told(classes))


def _unsorted_pictures(root: Path, spec: Data) -> list[Path]:
    """Return a split's pictures, in whatever folders they lie."""
    place, _ = find_class_folders(root, msgspec.structs.replace(spec, classes=msgspec.UNSET))
    try:
        folders = [place, *(path for path in sorted(place.rglob("*")) if path.is_dir() and path.name[0] != ".")]
        paths = [path for folder in folders for path in _pictures(folder)]
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error
    if not paths:
        raise ConfigError(f"{place}: holds no picture; correct path")
    return paths


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []  # a class that only the other split has
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def _decode(paths: list[Path]) -> NDArray[Any]:
    """Return bytes of shape (N, channels, height, width), once all headers agree on the size."""
    with _open(paths[0]) as first:
        size = first.size
    grey = True
    for path in paths:
        with _open(path) as picture:
            if picture.size != size:
                shapes = f"{picture.size[0]}x{picture.size[1]}, not {size[0]}x{size[1]} as {paths[0].name}"
                raise ConfigError(f"{path}: is {shapes}; resize all pictures to one size")
            if picture.mode not in EIGHT_BIT:
                raise ConfigError(f"{path}: has pixels of mode {picture.mode}; convert it to 8 bits a channel")
            grey &= picture.mode in GREY
    planes = len(paths) * (1 if grey else 3)
    require_room((1 + FLOAT_BYTES) * planes * size[0] * size[1], paths[0].parent.parent)
    array = np.empty((len(paths), 1 if grey else 3, size[1], size[0]), dtype=np.uint8)
    for number, path in enumerate(paths):
        with _open(path) as picture:
            try:
                pixels = np.asarray(picture.convert("L" if grey else "RGB"))
            except DAMAGE as error:
                raise ConfigError(f"{path}: damaged picture ({error}); replace or remove it") from error
        array[number] = pixels if grey else pixels.transpose(2, 0, 1)
    return array


def _open(path: Path) -> Image:
    """Open a picture without decoding it."""
    try:
        from PIL import Image  # noqa: PLC0415 - only this source needs it
    except ImportError as error:
        raise ConfigError("source folder needs Pillow, which is absent: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `require_room` says what is too large
            return Image.open(path, formats=FORMATS)
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path}: no picture that Pillow knows ({error}); replace or remove it") from error

"""Pictures in folders, one folder a class: `root/<class>/<picture>`, or `root/train/<class>` and `root/test/<class>`.

Classes are numbered in the order of their names. Devices agree on the numbers only where all have the same class
folders, so a class of which a device has no picture is an empty folder there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.data.examples import Examples, as_inputs
from shared.data.spec import Data
from shared.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
GREY = frozenset(("1", "L"))
EIGHT_BIT = GREY | frozenset(("CMYK", "HSV", "LA", "P", "PA", "RGB", "RGBA", "YCbCr"))


def read(spec: Data) -> Examples:
    """Return one split of the folder: inputs of shape (N, channels, height, width) in [0, 1], labels of shape (N,).

    There is one channel where every picture of the split is grey, else three. Files of other types are passed over.

    Raises:
        ConfigError: Pillow or the folder is absent, or a picture is damaged or differs in size.
    """
    root = Path(spec.path)
    try:
        place, classes = _classes(root, spec.split)
        paths = [(path, number) for number, name in enumerate(classes) for path in _pictures(place / name)]
    except OSError as error:
        raise ConfigError(f"{root}: cannot be listed ({error}); correct path or the folder's permissions") from error
    if not paths:
        raise ConfigError(f"{place}: holds no picture in a folder of its class; correct path")
    labels = torch.tensor([number for _, number in paths], dtype=torch.int64)
    return Examples(as_inputs(_decode([path for path, _ in paths])), labels)


def _classes(root: Path, split: str) -> tuple[Path, list[str]]:
    """Return where the split's class folders are, and the classes of both splits, so that both number them alike."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; correct path")
    halves = [root / name for name in ("train", "test") if (root / name).is_dir()]
    if not halves and split == "test":
        raise ConfigError(f"{root}: has no test split; make folders train and test in it, or use holdout")
    if halves and root / split not in halves:
        raise ConfigError(f"{root / split}: no such folder; make it, beside {halves[0].name}")
    names = {each.name for half in halves or [root] for each in half.iterdir() if each.is_dir()}
    return (root / split if halves else root), sorted(name for name in names if not name.startswith("."))


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
    array = np.empty((len(paths), 1 if grey else 3, size[1], size[0]), dtype=np.uint8)
    for number, path in enumerate(paths):
        with _open(path) as picture:
            try:
                pixels = np.asarray(picture.convert("L" if grey else "RGB"))
            except (OSError, ValueError, SyntaxError) as error:
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
        return Image.open(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path}: no picture that Pillow knows ({error}); replace or remove it") from error

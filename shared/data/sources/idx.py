"""IDX files as MNIST and Fashion-MNIST publish them, gzipped or not.

The format, by Y. LeCun, C. Cortes and C. Burges (http://yann.lecun.com/exdb/mnist/): two zero bytes, a byte for the
type, a byte for the number of dimensions, each dimension as a big-endian uint32, then the numbers, big-endian, in C
order.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import FLOAT_BYTES, Arrays, ReadPart, as_inputs, no_labels
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_expansion, require_room

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
PREFIXES = {"train": "train", "test": "t10k"}
WORD = 4
"""Bytes of the magic number, and of each dimension."""
MAX_DIMENSIONS = 4
PICTURE_DIMENSIONS = 3
TABLE_DIMENSIONS = 2
MAX_DEFLATE_RATIO = 1032
"""Largest growth of a deflate stream, https://zlib.net/zlib_tech.html; a header that claims more is wrong."""
QMNIST_COLUMNS = {"series": 1, "writer": 2}
"""Columns of QMNIST's label table, by C. Yadav and L. Bottou, https://arxiv.org/abs/1905.10498; 0 is the class."""


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read one split of a folder: inputs of shape (N, 1, height, width), labels of shape (N,).

    Bytes are scaled to [0, 1]; pixels of other types stay unchanged.

    Args:
        most: Values in all of the first examples to read; None for no limit.

    Raises:
        ConfigError: A file is missing, damaged, or does not fit the others.
    """
    folder, prefix = Path(spec.path), PREFIXES[spec.split]
    images_path = _find_file(folder, f"{prefix}-images")
    shape = read_shape(images_path)
    if len(shape) != PICTURE_DIMENSIONS:
        raise ConfigError(f"{images_path}: has {len(shape)} dimensions, not 3 (count, height, width); replace the file")
    rows = shape[0] if most is None else max(1, most // (shape[1] * shape[2]))
    if not spec.reads_labels:
        if spec.client_column:
            raise ConfigError('client_column of idx files is found by their labels: take it out, or labels = "none"')
        return ReadPart(Arrays.from_inputs(as_inputs(parse(images_path, rows))[:, None]), no_labels(shape[0]))
    labels_path = _find_file(folder, f"{prefix}-labels")
    labels = parse(labels_path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ConfigError(f"{labels_path}: is not one row of integers; replace the file")
    if shape[0] != len(labels):
        raise ConfigError(f"{labels_path}: {len(labels)} labels for {shape[0]} images; take both from one data set")
    clients = _read_clients(folder, spec, labels) if spec.client_column else None
    inputs, numbers = as_inputs(parse(images_path, rows))[:, None], labels.astype(np.int64)
    return ReadPart(Arrays(inputs, numbers[:rows], clients[:rows] if clients else None), numbers)


def read_shape(path: Path) -> tuple[int, ...]:
    """Read the shape from an IDX file's header, checked against the file's size; raise as `parse`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            kind, shape = _read_header(file, path)
            _check_size(path, kind, shape)
            return shape
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); replace the file") from error


def parse(path: Path, rows: int | None = None) -> NDArray[Any]:
    """Read an IDX file's numbers, in native byte order; the size is checked before memory is allocated.

    Args:
        rows: Entries of the first dimension to read; None for all.

    Raises:
        ConfigError: The file is absent or damaged, or its header and its size disagree.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            kind, shape = _read_header(file, path)
            size = _check_size(path, kind, shape)
            require_room(size + FLOAT_BYTES * math.prod(shape), path)
            is_whole = rows is None or rows >= shape[0]
            shape = shape if is_whole else (rows or 0, *shape[1:])
            array = np.empty(math.prod(shape) * kind.itemsize, dtype=np.uint8)
            _fill(file, array.data, path, is_whole=is_whole)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); replace the file") from error
    except MemoryError as error:
        raise ConfigError(f"{path}: does not fit in this device's memory; give it a smaller file") from error
    return array.view(kind).reshape(shape).astype(kind.newbyteorder("="), copy=False)


def _find_file(folder: Path, stem: str) -> Path:
    found = sorted(folder.glob(f"{stem}[-.]idx*"))  # the plain file sorts before its .gz
    if not found:
        raise ConfigError(f"{folder}: has no file {stem}-idx*; set path to a folder with MNIST's file names")
    return found[0]


def _read_header(file: io.BufferedIOBase, path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.read(WORD)
    if len(magic) < WORD or magic[:2] != b"\0\0" or magic[2] not in TYPES:
        raise ConfigError(f"{path}: starts with {magic.hex() or 'nothing'}, so it is not an IDX file; replace the file")
    dimensions = magic[3]
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ConfigError(f"{path}: header claims {dimensions} dimensions, of 1 to {MAX_DIMENSIONS}; replace the file")
    sizes = file.read(WORD * dimensions)
    if len(sizes) < WORD * dimensions:
        raise ConfigError(f"{path}: ends within its header; replace the file")
    shape = struct.unpack(f">{dimensions}I", sizes)
    if 0 in shape:
        raise ConfigError(f"{path}: header claims a shape of {shape}, which holds nothing; replace the file")
    return np.dtype(TYPES[magic[2]]), shape


def _check_size(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Compute the size in bytes that the header claims, and check it against the file's size."""
    size = math.prod(shape) * kind.itemsize
    header, on_disk = WORD + WORD * len(shape), path.stat().st_size
    possible = on_disk * MAX_DEFLATE_RATIO if path.suffix == ".gz" else on_disk
    if header + size > possible:
        raise ConfigError(f"{path}: header claims {size} bytes of numbers, more than it can hold; replace the file")
    require_expansion(size, on_disk, path, "replace the file, or unpack it by gunzip")
    return size


def _fill(file: io.BufferedIOBase, buffer: memoryview, path: Path, *, is_whole: bool) -> None:
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled:])
        if not count:
            raise ConfigError(f"{path}: ends {len(buffer) - filled} bytes early; replace the file")
        filled += count
    if is_whole and file.read(1):
        raise ConfigError(f"{path}: continues after the {filled} bytes that its header claims; replace the file")


def _read_clients(folder: Path, spec: Data, labels: NDArray[Any]) -> tuple[str, ...]:
    """Read each digit's writer or series from QMNIST's table, whose first N rows are MNIST's in the same order."""
    column = QMNIST_COLUMNS.get(spec.client_column)
    if column is None:
        raise ConfigError(
            f"client_column {spec.client_column!r}: of idx files, give one of {', '.join(QMNIST_COLUMNS)}"
        )
    path = _find_file(folder, f"qmnist-{spec.split}-labels")
    table = parse(path)
    fits = table.ndim == TABLE_DIMENSIONS and table.shape[1] > column
    if not fits or not np.array_equal(table[: len(labels), 0], labels):
        raise ConfigError(f"{path}: is not the QMNIST table of these labels; replace it or remove client_column")
    return tuple(str(value) for value in table[: len(labels), column])

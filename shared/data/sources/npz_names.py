"""String labels in a numpy .npz file, read with the standard library.

An idle agent loads no numpy; `zipfile`, a third of a megabyte, is loaded only for such files.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from shared.data.name_text import normalise_name
from shared.data.sources.csv_lines import require_file
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASSES

MAGIC = b"\x93NUMPY"
MAX_HEADER, MAX_NAME_BYTES, CHUNK = 10_000, 1 << 16, 1 << 20
_TEXT = re.compile(r"([<>|=])([US])(\d+)")
DAMAGE = (*(OSError, EOFError, ValueError, KeyError, SyntaxError, RuntimeError, TypeError, struct.error), zlib.error)


def find_label_arrays(names: Collection[str]) -> tuple[str, ...]:
    """Select the label arrays of all splits from a file's array names."""
    if "y_train" in names or "y_test" in names:
        return tuple(name for name in ("y_train", "y_test") if name in names)
    return tuple(name for name in ("y", "label") if name in names)[:1]


def read_class_names(path: Path) -> set[str]:
    """Read the class names of all splits of a file; empty where its labels are not strings.

    Raises:
        ConfigError: The file cannot be read, or it has too many classes.
    """
    import zipfile  # noqa: PLC0415 - see the module docstring

    require_file(path)
    try:
        with zipfile.ZipFile(path) as file:
            arrays = [name.removesuffix(".npy") for name in file.namelist()]
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: is missing or no .npz file ({error}); correct path or replace it") from error
    return set[str]().union(*(read_array_names(path, name) for name in find_label_arrays(arrays)))


def read_array_names(path: Path, name: str) -> set[str]:
    """Read the class names of an array, normalised; empty where it does not hold strings.

    Raises:
        ConfigError: The file cannot be read, or it has too many classes.
    """
    import zipfile  # noqa: PLC0415 - see the module docstring

    names = set[str]()
    try:
        with zipfile.ZipFile(path) as file, file.open(name if name in file.namelist() else f"{name}.npy") as stream:
            for text in _read_strings(stream):
                names.add(normalise_name(text))
                if len(names) > MAX_CLASSES:
                    raise ConfigError(f"{path}: array {name} has over {MAX_CLASSES} classes; correct the labels")
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: array {name} cannot be read ({error}); replace the file") from error
    return names


class ArrayHeader(NamedTuple):
    """Header of an array: dtype in numpy's notation, and shape."""

    descr: str
    shape: tuple[int, ...]


def read_array_header(stream: IO[bytes]) -> ArrayHeader | None:
    """Read the header of an array; None where the stream does not start with one.

    The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

    Raises:
        ValueError: Or another of `DAMAGE`: the header is damaged.
    """
    magic = stream.read(8)
    if not magic.startswith(MAGIC):
        return None
    size = struct.unpack("<H", stream.read(2))[0] if magic[6] == 1 else struct.unpack("<I", stream.read(4))[0]
    if size > MAX_HEADER:
        raise ValueError(f"a header of {size} bytes")
    header = ast.literal_eval(stream.read(size).decode("latin-1"))
    shape = tuple(header["shape"])
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"a shape of {shape!r:.80}")
    return ArrayHeader(str(header["descr"]), shape)


def _read_strings(stream: IO[bytes]) -> Iterator[str]:
    """Yield the strings of an array, each at least once; nothing for other dtypes."""
    header = read_array_header(stream)
    described = _TEXT.fullmatch(header.descr) if header else None
    if header is None or described is None:
        return
    width = int(described[3]) * (4 if described[2] == "U" else 1)
    if not 0 < width <= MAX_NAME_BYTES:
        raise ValueError(f"names of {width} bytes")
    code = "utf-8" if described[2] == "S" else "utf-32-be" if described[1] == ">" else "utf-32-le"
    remaining = math.prod(header.shape) * width
    while remaining > 0:
        data = stream.read(min(remaining, CHUNK // width * width))
        if not data or len(data) % width:
            raise EOFError(f"it ends {remaining - len(data)} bytes early")
        remaining -= len(data)
        for entry in {data[at : at + width] for at in range(0, len(data), width)}:
            yield entry.decode(code).rstrip("\0")

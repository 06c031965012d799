"""String labels in a numpy .npz file, read by the standard library: an idle agent loads no numpy.

`zipfile`, a third of a megabyte, is loaded for such files alone.
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
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASSES

MAGIC = b"\x93NUMPY"
MAX_HEADER, MAX_NAME_BYTES, CHUNK = 10_000, 1 << 16, 1 << 20
_TEXT = re.compile(r"([<>|=])([US])(\d+)")
DAMAGE = (*(OSError, EOFError, ValueError, KeyError, SyntaxError, RuntimeError, TypeError, struct.error), zlib.error)


def find_label_arrays(names: Collection[str]) -> tuple[str, ...]:
    """Return the arrays of labels of all splits of a file that holds arrays of these names."""
    if "y_train" in names or "y_test" in names:
        return tuple(name for name in ("y_train", "y_test") if name in names)
    return tuple(name for name in ("y", "label") if name in names)[:1]


def names_in_file(path: Path) -> set[str]:
    """Return the class names of all splits of a file; none where its labels are no strings.

    Raises:
        ConfigError: As `names_in`.
    """
    import zipfile  # noqa: PLC0415 - see the file's beginning

    try:
        with zipfile.ZipFile(path) as file:
            arrays = [name.removesuffix(".npy") for name in file.namelist()]
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: is missing or no .npz file ({error}); correct path or replace it") from error
    return set[str]().union(*(names_in(path, name) for name in find_label_arrays(arrays)))


def names_in(path: Path, name: str) -> set[str]:
    """Return the class names of an array, as `normalise_name` returns them; none where it holds no strings.

    Raises:
        ConfigError: The file cannot be read, or it has too many classes.
    """
    import zipfile  # noqa: PLC0415 - see the file's beginning

    found = set[str]()
    try:
        with zipfile.ZipFile(path) as file, file.open(name if name in file.namelist() else f"{name}.npy") as stream:
            for text in _texts(stream):
                found.add(normalise_name(text))
                if len(found) > MAX_CLASSES:
                    raise ConfigError(f"{path}: array {name} has over {MAX_CLASSES} classes; correct the labels")
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: array {name} cannot be read ({error}); replace the file") from error
    return found


class ArrayHeader(NamedTuple):
    """What stands before an array's values: dtype as numpy writes it, and shape."""

    descr: str
    shape: tuple[int, ...]


def read_array_header(stream: IO[bytes]) -> ArrayHeader | None:
    """Return the header of an array; None where a stream has none.

    The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

    Raises:
        ValueError: Or another of `DAMAGE`: it is damaged.
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


def _texts(stream: IO[bytes]) -> Iterator[str]:
    """Yield the entries of an array of strings, each once in a while at least; none of any other array."""
    header = read_array_header(stream)
    described = _TEXT.fullmatch(header.descr) if header else None
    if header is None or described is None:
        return
    width = int(described[3]) * (4 if described[2] == "U" else 1)
    if not 0 < width <= MAX_NAME_BYTES:
        raise ValueError(f"names of {width} bytes")
    code = "utf-8" if described[2] == "S" else "utf-32-be" if described[1] == ">" else "utf-32-le"
    left = math.prod(header.shape) * width
    while left > 0:
        data = stream.read(min(left, CHUNK // width * width))
        if not data or len(data) % width:
            raise EOFError(f"it ends {left - len(data)} bytes early")
        left -= len(data)
        for entry in {data[at : at + width] for at in range(0, len(data), width)}:
            yield entry.decode(code).rstrip("\0")

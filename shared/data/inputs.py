"""Input preparation of a data set, read from file headers without numpy."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import msgspec

from shared.data.formats import Mel
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.inputs import BYTE_SCALE, MAX_EXTENTS, MAX_FEATURE_CHARS, MAX_FEATURES, Inputs

DIGITS = Inputs(scale=16.0, shape=(1, 8, 8))
"""scikit-learn's digits: a pixel counts the inked ones of 16."""
IDX_BYTES = 8
"""IDX type code of bytes."""
CHANNELS = (1, 3)
PICTURE, PICTURE_WITH_CHANNELS = 3, 4


def read_preparation(spec: Data) -> Inputs:
    """Determine how a device's examples are prepared; folders of pictures report no shape.

    Raises:
        ConfigError: The files cannot be read.
    """
    stored = _read_stored_inputs(spec)
    shape = stored.shape
    if spec.channels and len(shape) == PICTURE and shape[0] == 1:
        shape = (spec.channels, *shape[1:])
    return msgspec.structs.replace(stored, mean=spec.mean, std=spec.std, shape=shape)


def _read_stored_inputs(spec: Data) -> Inputs:
    readers: Mapping[str, Callable[[Data], Inputs]] = {
        "audio": _describe_features,
        "csv": _read_table_inputs,
        "digits": lambda _: DIGITS,
        "folder": _describe_pictures,
        "idx": _read_idx_inputs,
        "npz": _read_npz_inputs,
        "sqlite": _read_table_inputs,
    }
    read = readers.get(spec.source)
    return read(spec) if read else Inputs()


def _describe_pictures(spec: Data) -> Inputs:
    return Inputs(scale=BYTE_SCALE, shape=(spec.channels, *spec.size) if spec.size and spec.channels else ())


def _describe_features(spec: Data) -> Inputs:
    mel = spec.mel or Mel()
    return Inputs(scale=1.0, shape=(1, mel.bands, mel.frames))


def _read_table_inputs(spec: Data) -> Inputs:
    from shared.data.sources.columns import find_columns  # noqa: PLC0415 - for such files alone

    path, header = _read_header(spec)
    names = tuple(header[at] for at in find_columns(header, path, spec).features)
    shape = (len(names), spec.window.length) if spec.window else (len(names),)
    fits = len(names) <= MAX_FEATURES and sum(map(len, names)) <= MAX_FEATURE_CHARS
    return Inputs(scale=1.0, shape=shape, features=names if fits else ())


def _read_header(spec: Data) -> tuple[Path, list[str]]:
    from shared.data.sources.csv_lines import read_lines, split_paths  # noqa: PLC0415 - as above

    if spec.source == "csv":
        path, _ = split_paths(spec)
        return path, next(iter(read_lines(path, spec)), (0, []))[1]
    from shared.data.sources.sqlite_rows import find_table, open_database, read_header  # noqa: PLC0415 - sqlite3

    path, _ = split_paths(spec, ".sqlite")
    with open_database(path) as database:
        return path, read_header(database, find_table(database, path, spec))


def _read_idx_inputs(spec: Data) -> Inputs:
    stem = "train-images" if spec.split == "train" else "t10k-images"
    path = next(iter(sorted(Path(spec.path).glob(f"{stem}[-.]idx*"))), None)
    if path is None:
        return Inputs()
    try:
        import gzip  # noqa: PLC0415 - as above

        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            _, kind, dimensions = struct.unpack(">HBB", file.read(4))
            extents = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); replace the file") from error
    return Inputs(scale=BYTE_SCALE if kind == IDX_BYTES else 1.0, shape=_sendable_shape((1, *extents[1:])))


def _read_npz_inputs(spec: Data) -> Inputs:
    import zipfile  # noqa: PLC0415 - a third of a megabyte, for such files alone

    from shared.data.sources.csv_lines import require_file  # noqa: PLC0415 - as above
    from shared.data.sources.npz_names import DAMAGE  # noqa: PLC0415 - as above

    path = Path(spec.path)
    require_file(path)
    try:
        with zipfile.ZipFile(path) as file:
            arrays = {name.removesuffix(".npy"): name for name in file.namelist()}
            names = (f"x_{spec.split}", "x", "signal")
            member = next((arrays[name] for name in names if name in arrays), None)
            if member is None:
                return Inputs()
            with file.open(member) as stream:
                return _read_array_inputs(stream, is_signal=member.startswith("signal"))
    except (*DAMAGE, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); replace the file") from error


def _read_array_inputs(stream: IO[bytes], *, is_signal: bool) -> Inputs:
    from shared.data.sources.npz_names import read_array_header  # noqa: PLC0415 - as above

    header = read_array_header(stream)
    if header is None:
        return Inputs()
    is_bytes, shape = header.descr in ("|u1", "u1", "<u1", ">u1"), header.shape[1:]
    if is_signal:  # windows are cut out of it
        shape = ()
    elif is_bytes and len(header.shape) == PICTURE:
        shape = (1, *shape)
    elif is_bytes and len(header.shape) == PICTURE_WITH_CHANNELS and shape[2] in CHANNELS:
        shape = (shape[2], *shape[:2])
    return Inputs(scale=BYTE_SCALE if is_bytes else 1.0, shape=_sendable_shape(shape))


def _sendable_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that fits into a message; empty if it is too large or has a zero extent."""
    return shape if len(shape) <= MAX_EXTENTS and 0 < math.prod(shape) < 1 << 31 else ()

"""Arrays in a numpy .npz file; never unpickled.

Array names, the first set found: `x_train, y_train, x_test, y_test`; `x, y`; or the streams of a sensor, which
overlapping windows are cut from: `signal` (channels, T), `start` (N,), `label` (N,), `subject` (N,),
`test_subjects`.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from shared.data.sources.arrays import FLOAT_BYTES, Arrays, as_inputs, no_labels
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

CHANNELS = (1, 3, 4)
"""Of pictures: grey, colour, colour with opacity."""
INTEGERS, NUMBERS, NAMES = "iu", "biuf", "biuSU"
_KINDS = {INTEGERS: "integers", NUMBERS: "numbers", NAMES: "names or integers"}
"""Of dtypes, by numpy's letters; what to call them."""
DAMAGE = (
    *(OSError, EOFError, ValueError, KeyError, SyntaxError, OverflowError, RuntimeError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""What numpy and zipfile raise on damaged files."""


def read(spec: Data) -> Arrays:
    """Return one split of the file: inputs of shape (N, ...), labels of shape (N,).

    Bytes are pictures, (N, height, width) or (N, height, width, channels): they come as (N, channels, height, width) in
    [0, 1]. Other numbers stay as they are. Windows come as (N, channels, window), their clients are the subjects.

    Raises:
        ConfigError: The file is missing, damaged, pickled, or its arrays are not as expected.
    """
    path = Path(spec.path)
    try:
        if not zipfile.is_zipfile(path):
            raise ConfigError(f"{path}: is missing or no .npz file; write one with numpy.savez_compressed")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # numpy leaves a bad file open
            return _read(arrays, spec, path)
    except MemoryError as error:
        raise ConfigError(f"{path}: does not fit in this device's memory; give it a smaller file") from error
    except DAMAGE as error:
        raise ConfigError(f"{path}: cannot be read ({error}); replace the file") from error


def _read(arrays: NpzFile, spec: Data, path: Path) -> Arrays:
    names = set(arrays.files)
    inputs_name, labels_name = f"x_{spec.split}", f"y_{spec.split}"
    if inputs_name in names and (labels_name in names or not spec.reads_labels):
        return _plain(arrays, spec, path, (inputs_name, labels_name))
    if "x" in names and ("y" in names or not spec.reads_labels):
        if spec.split == "test":
            raise ConfigError(f"{path}: x and y have no test split; name arrays x_test and y_test, or use holdout")
        return _plain(arrays, spec, path, ("x", "y"))
    if {"signal", "start", "subject", "test_subjects"} <= names and ("label" in names or not spec.reads_labels):
        return _windows(arrays, spec, path)
    raise ConfigError(
        f"{path}: holds {', '.join(sorted(names)) or 'nothing'}; name arrays {inputs_name} and {labels_name}"
    )


def _plain(arrays: NpzFile, spec: Data, path: Path, names: tuple[str, str]) -> Arrays:
    inputs = _array(arrays, names[0], path, NUMBERS)
    if inputs.ndim == 1:
        raise ConfigError(f"{path}: {names[0]} has shape {inputs.shape}; save an array of shape (N, features)")
    if inputs.dtype == np.uint8:
        inputs = _pictures(inputs, path)
    labels = _labels(arrays, names[1], path) if spec.reads_labels else no_labels(len(inputs))
    clients = None
    if spec.client_column:
        ours = f"{spec.client_column}_{spec.split}"
        clients = _clients(arrays, ours if ours in arrays.files else spec.client_column, path)
    _require_alike(path, {names[0]: inputs, names[1]: labels, "clients": labels if clients is None else clients})
    return Arrays(as_inputs(inputs), labels, None if clients is None else tuple(clients.tolist()))


def _windows(arrays: NpzFile, spec: Data, path: Path) -> Arrays:
    """Cut windows out of the streams; the last one ends where the stream ends, which tells how long all are."""
    signal = _array(arrays, "signal", path, NUMBERS, dimensions=2)
    start = _array(arrays, "start", path, INTEGERS, dimensions=1)
    subject = _clients(arrays, "subject", path)
    clients = _clients(arrays, spec.client_column, path) if spec.client_column else subject
    labels = _labels(arrays, "label", path) if spec.reads_labels else no_labels(len(start))
    _require_alike(path, {"start": start, "subject": subject, "label": labels, "clients": clients})
    window = signal.shape[1] - int(start.max(initial=0))
    if window < 1 or int(start.min(initial=0)) < 0:
        raise ConfigError(f"{path}: start points outside signal, which has {signal.shape[1]} samples; correct it")
    ours = np.isin(subject, _clients(arrays, "test_subjects", path)) == (spec.split == "test")
    require_room(math.prod((len(signal), int(ours.sum()), window)) * (signal.itemsize + FLOAT_BYTES), path)
    cut = np.lib.stride_tricks.sliding_window_view(signal, window, axis=1)[:, start[ours]]  # (channels, N, window)
    return Arrays(as_inputs(cut.transpose(1, 0, 2)), labels[ours], tuple(clients[ours].tolist()))


def _array(arrays: NpzFile, name: str, path: Path, kinds: str, dimensions: int | None = None) -> NDArray[Any]:
    """Return an array whose dtype is of the kinds, and whose dimensions are as many as told, or at least one."""
    if name not in arrays.files:
        raise ConfigError(f"{path}: has no array {name!r}, only {', '.join(sorted(arrays.files))}; correct the name")
    _require_room_for(arrays, name, path)
    try:
        array = arrays[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        problem = f"{name} holds pickled objects, which are never loaded"
        raise ConfigError(f"{path}: {problem}; save it as numbers") from error
    if array.dtype.kind not in kinds or not array.ndim or array.ndim != (dimensions or array.ndim):
        wanted = f"{_KINDS[kinds]}, of {dimensions} dimensions" if dimensions else _KINDS[kinds]
        raise ConfigError(f"{path}: {name} is {array.dtype} of shape {array.shape}; save {wanted}")
    return array


def _require_room_for(arrays: NpzFile, name: str, path: Path) -> None:
    """Refuse an array for which there is no memory, by its header: few bytes of a zip may stand for many."""
    assert arrays.zip
    with arrays.zip.open(name if name in arrays.zip.namelist() else f"{name}.npy") as file:
        magic = file.read(npy.MAGIC_LEN)
        if not magic.startswith(npy.MAGIC_PREFIX):
            raise ConfigError(f"{path}: {name} is no array; write the file with numpy.savez_compressed")
        read_header = npy.read_array_header_1_0 if magic.endswith(b"\1\0") else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
    require_room(math.prod(shape) * (dtype.itemsize + FLOAT_BYTES), path)


def _labels(arrays: NpzFile, name: str, path: Path) -> NDArray[np.int64]:
    labels = _array(arrays, name, path, INTEGERS)
    if labels.size != len(labels):
        raise ConfigError(f"{path}: {name} has shape {labels.shape}; save one class number for each example")
    return labels.reshape(-1).astype(np.int64)


def _clients(arrays: NpzFile, name: str, path: Path) -> NDArray[np.str_]:
    return _array(arrays, name, path, NAMES, dimensions=1).astype(np.str_)


def _pictures(array: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return bytes as (N, channels, height, width); rows of bytes, (N, F), stay."""
    match array.shape:
        case (_, _):
            return array
        case (_, _, _):
            return array[:, None]
        case (_, _, _, channels) if channels in CHANNELS:
            return array.transpose(0, 3, 1, 2)
        case (_, channels, _, _) if channels in CHANNELS:
            return array
    raise ConfigError(f"{path}: bytes of shape {array.shape} are no pictures; save (N, height, width, channels)")


def _require_alike(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ConfigError(f"{path}: arrays differ in length: {told}; save one entry for each example")

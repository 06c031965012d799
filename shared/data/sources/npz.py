"""Arrays in a numpy .npz file; never unpickled.

Array names, first match: `x_train, y_train, x_test, y_test`; `x, y`; or the streams of a sensor, from which
overlapping windows are cut: `signal` (channels, T), `start` (N,), `label` (N,), `subject` (N,), `test_subjects`.

Several inputs are arrays `x_train.NAME` or `x.NAME`: each example's values, flattened, follow one another in
alphabetical order of the names; `shared.models.named_inputs` takes them apart.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from shared.data.classes import number_labels, order_names
from shared.data.name_text import normalise_name
from shared.data.sources.arrays import FLOAT_BYTES, Arrays, Labels, ReadPart, as_inputs, no_labels
from shared.data.sources.csv_lines import require_file
from shared.data.sources.npz_names import find_label_arrays, read_array_names
from shared.data.spec import EVALUATE_ON_DEVICES, Data
from shared.errors import ConfigError, describe_cause
from shared.protocol.messages import MAX_CLASSES
from shared.runtime.memory import require_expansion, require_room

CHANNELS = (1, 3, 4)
"""Of pictures: grey, colour, colour with opacity."""
INTEGERS, NUMBERS, NAMES, LABELS = "iu", "biuf", "biuSU", "iuSU"
_KINDS = {
    INTEGERS: "integers",
    NUMBERS: "numbers",
    NAMES: "names or integers",
    LABELS: "class names or integers from 0",
}
"""Groups of numpy's dtype letters, and their names in messages."""
CHUNK_BYTES = 1 << 18
"""Bytes to read at once, which stay in a processor's cache."""
DAMAGE = (
    *(OSError, EOFError, ValueError, KeyError, SyntaxError, OverflowError, RuntimeError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""Exceptions that numpy and zipfile raise on damaged files."""


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read one split of the file: inputs of shape (N, ...), labels of shape (N,).

    Bytes are pictures, (N, height, width) or (N, height, width, channels), returned as (N, channels, height, width) in
    [0, 1]. Other numbers keep their values. Windows have shape (N, channels, window), their clients are the subjects.
    Labels are numbers from 0, or strings, numbered as in a CSV file; with `targets` they are numbers of shape
    (N, outputs), or masks of shape (N, height, width).

    Args:
        most: Values in all of the first examples to read; None for no limit.

    Raises:
        ConfigError: The file is missing, damaged, pickled, or its arrays are not as expected.
    """
    path = Path(spec.path)
    require_file(path)
    try:
        with path.open("rb") as file, _open_archive(file, path) as arrays:
            return _read(_File(arrays, path, spec, {}), most)
    except MemoryError as error:
        raise ConfigError(f"{path}: does not fit in this device's memory; give it a smaller file") from error
    except DAMAGE as error:
        raise ConfigError(f"{path}: cannot be read ({describe_cause(error)}); correct path or replace it") from error


def _open_archive(file: IO[bytes], path: Path) -> NpzFile:
    try:
        return NpzFile(file, allow_pickle=False)
    except zipfile.BadZipFile as error:
        raise ConfigError(
            f"{path}: is not an .npz file, or is cut off; write one with numpy.savez_compressed"
        ) from error


class _File(NamedTuple):
    """An open file, its path, the selection to read from it, and the headers of its arrays read so far."""

    arrays: NpzFile
    path: Path
    spec: Data
    headers: dict[str, _Header]


class _Header(NamedTuple):
    """Header of an array, and where its values begin."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    begin: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _read(file: _File, most: int | None) -> ReadPart:
    spec, path, names = file.spec, file.path, set(file.arrays.files)
    labels_name = f"y_{spec.split}"
    split_inputs, inputs = (_find_inputs(names, prefix) for prefix in (f"x_{spec.split}", "x"))
    if split_inputs and (labels_name in names or not spec.reads_labels):
        return _read_split(file, (split_inputs, labels_name), most)
    if inputs and ("y" in names or not spec.reads_labels):
        if spec.split == "test":
            raise ConfigError(
                f"{path}: x and y have no test split; name arrays x_test and y_test, {EVALUATE_ON_DEVICES}"
            )
        return _read_split(file, (inputs, "y"), most)
    if {"signal", "start", "subject", "test_subjects"} <= names and ("label" in names or not spec.reads_labels):
        return _read_windows(file, most)
    raise ConfigError(
        f"{path}: holds {', '.join(sorted(names)) or 'nothing'}; name arrays x_{spec.split} and {labels_name}"
    )


def _find_inputs(names: Collection[str], prefix: str) -> tuple[str, ...]:
    """Return the array of the inputs, or those of several named ones in alphabetical order; empty if there is none."""
    return (prefix,) if prefix in names else tuple(sorted(name for name in names if name.startswith(f"{prefix}.")))


def _read_split(file: _File, names: tuple[tuple[str, ...], str], most: int | None) -> ReadPart:
    spec, path, inputs_names = file.spec, file.path, names[0]
    headers = {name: _check_header(file, name, NUMBERS) for name in inputs_names}
    header = headers[inputs_names[0]]
    if len(header.shape) == 1 and len(headers) == 1:
        raise ConfigError(f"{path}: {inputs_names[0]} has shape {header.shape}; save an array of shape (N, features)")
    labels, classes = _read_labels(file, names[1]) if spec.reads_labels else (no_labels(header.shape[0]), ())
    clients = None
    if spec.client_column:
        client_array = f"{spec.client_column}_{spec.split}"
        clients = _read_clients(file, client_array if client_array in file.arrays.files else spec.client_column)
    lengths = {name: each.shape[0] for name, each in headers.items()}
    lengths |= {"clients": len(clients)} if clients is not None else {}
    _require_equal_lengths(path, {**lengths, names[1]: len(labels)})
    values = sum(math.prod(each.shape[1:]) for each in headers.values())
    rows = header.shape[0] if most is None else min(header.shape[0], max(1, most // max(1, values)))
    inputs = [_read_inputs(file, name, rows) for name in inputs_names]
    packed = inputs[0] if len(inputs) == 1 else np.concatenate([part.reshape(rows, -1) for part in inputs], axis=1)
    row_clients = None if clients is None else tuple(clients[:rows].tolist())
    return ReadPart(Arrays(packed, labels[:rows], row_clients, classes), labels)


def _read_inputs(file: _File, name: str, rows: int) -> NDArray[np.float32]:
    inputs = _read_array(file, name, NUMBERS, rows=rows)
    return as_inputs(_put_channels_first(inputs, file.path) if inputs.dtype == np.uint8 else inputs)


def _read_windows(file: _File, most: int | None) -> ReadPart:
    """Cut windows out of the streams; the last one ends where the stream ends, which gives their length."""
    spec, path = file.spec, file.path
    start = _read_array(file, "start", INTEGERS, dimensions=1)
    subject = _read_clients(file, "subject")
    clients = _read_clients(file, spec.client_column) if spec.client_column else subject
    labels, classes = _read_labels(file, "label") if spec.reads_labels else (no_labels(len(start)), ())
    lengths = {"start": len(start), "subject": len(subject), "label": len(labels), "clients": len(clients)}
    _require_equal_lengths(path, lengths)
    signal = _read_array(file, "signal", NUMBERS, dimensions=2)
    window = signal.shape[1] - int(start.max(initial=0))
    if window < 1 or int(start.min(initial=0)) < 0:
        raise ConfigError(f"{path}: start points outside signal, which has {signal.shape[1]} samples; correct it")
    in_split = np.flatnonzero(np.isin(subject, _read_clients(file, "test_subjects")) == (spec.split == "test"))
    require_room(math.prod((len(signal), len(in_split), window)) * (signal.itemsize + FLOAT_BYTES), path)
    cut = in_split if most is None else in_split[: max(1, most // (len(signal) * window))]
    windows = np.lib.stride_tricks.sliding_window_view(signal, window, axis=1)[:, start[cut]]  # (channels, N, window)
    cut_clients = tuple(clients[cut].tolist())
    return ReadPart(Arrays(as_inputs(windows.transpose(1, 0, 2)), labels[cut], cut_clients, classes), labels[in_split])


def _check_header(file: _File, name: str, kinds: str, dimensions: int | None = None) -> _Header:
    """Read an array's header and require its dtype to be of `kinds`, with `dimensions` axes (default: at least one)."""
    arrays, path = file.arrays, file.path
    if name not in arrays.files:
        raise ConfigError(f"{path}: has no array {name!r}, only {', '.join(sorted(arrays.files))}; correct the name")
    if name not in file.headers:
        file.headers[name] = _read_header(file, name)
    header = file.headers[name]
    if header.dtype.hasobject:
        problem = f"{name} holds pickled objects, which are never loaded"
        raise ConfigError(f"{path}: {problem}; save it as {_KINDS[kinds]}, names by numpy.array(names, dtype=str)")
    if header.dtype.kind not in kinds or not header.shape or len(header.shape) != (dimensions or len(header.shape)):
        expected = f"{_KINDS[kinds]}, of {dimensions} dimensions" if dimensions else _KINDS[kinds]
        if kinds == LABELS and header.dtype.kind == "f":
            expected += ', or set data.targets = "values" to predict numbers'
        raise ConfigError(f"{path}: {name} is {header.dtype} of shape {header.shape}; save {expected}")
    return header


def _open_array(arrays: NpzFile, name: str) -> IO[bytes]:
    assert arrays.zip
    return arrays.zip.open(_member(arrays, name))


def _member(arrays: NpzFile, name: str) -> str:
    assert arrays.zip
    return name if name in arrays.zip.namelist() else f"{name}.npy"


def _read_header(file: _File, name: str) -> _Header:
    """Read an array's header; refuse one that does not fit in memory: a few bytes of a zip may expand to many."""
    arrays, path = file.arrays, file.path
    with _open_array(arrays, name) as stream:
        magic = stream.read(npy.MAGIC_LEN)
        if not magic.startswith(npy.MAGIC_PREFIX):
            raise ConfigError(f"{path}: {name} is not an array; write the file with numpy.savez_compressed")
        read_header = npy.read_array_header_1_0 if magic.endswith(b"\1\0") else npy.read_array_header_2_0
        header = _Header(*read_header(stream), stream.tell())
    count = header.size * header.dtype.itemsize
    require_room(count + header.size * FLOAT_BYTES, path)
    assert arrays.zip
    stored = arrays.zip.getinfo(_member(arrays, name)).compress_size
    require_expansion(count, stored, path, "replace the file, or write it with numpy.savez")
    return header


def _read_array(
    file: _File, name: str, kinds: str, *, dimensions: int | None = None, rows: int | None = None
) -> NDArray[Any]:
    """Read an array, or its first rows; the header is checked before memory is allocated."""
    header = _check_header(file, name, kinds, dimensions)
    shape = header.shape if header.is_fortran or rows is None else (min(rows, header.shape[0]), *header.shape[1:])
    array = np.empty(shape, header.dtype, order="F" if header.is_fortran else "C")
    values = array.reshape(-1, order="A").view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
    with _open_array(file.arrays, name) as stream:
        stream.read(header.begin)
        for begin in range(0, len(values), CHUNK_BYTES):
            chunk = values[begin : begin + CHUNK_BYTES]
            data = stream.read(len(chunk))
            if len(data) < len(chunk):
                raise EOFError(f"{name} is cut off")
            chunk[:] = np.frombuffer(data, np.uint8)
    return array[:rows]


def _read_targets(file: _File, name: str) -> Labels:
    """Read targets that are not classes: numbers of shape (N, outputs), or masks."""
    if file.spec.target_kind == "mask":
        return _read_array(file, name, INTEGERS, dimensions=3).astype(np.int64)
    values = _read_array(file, name, NUMBERS)
    if values.ndim > 2:  # noqa: PLR2004 - (N, outputs)
        raise ConfigError(f"{file.path}: {name} has shape {values.shape}; save targets of shape (N, outputs)")
    return values.reshape(len(values), -1).astype(np.float32)


def _read_labels(file: _File, name: str) -> tuple[Labels, tuple[str, ...]]:
    """Read the labels as numbers, and the class names where they are strings."""
    if file.spec.target_kind != "class":
        return _read_targets(file, name), ()
    header = _check_header(file, name, LABELS)
    if header.size != header.shape[0]:
        problem = f"{name} has shape {header.shape}; save one class number for each example"
        raise ConfigError(f"{file.path}: {problem}, of one-hot rows {name}.argmax(axis=1), or set targets")
    labels = _read_array(file, name, LABELS).reshape(-1)
    if labels.dtype.kind in INTEGERS:
        if labels.dtype.kind == "u" and labels.itemsize == np.int64().itemsize:  # the highest would become negative
            labels = np.minimum(labels, MAX_CLASSES)
        return labels.astype(np.int64, copy=False), ()
    texts, places = np.unique(labels, return_inverse=True)
    names = [normalise_name(text.decode() if isinstance(text, bytes) else str(text)) for text in texts]
    if not all(names):
        raise ConfigError(f"{file.path}: {name} holds an empty name; name the class of each example")
    others = (read_array_names(file.path, other) for other in find_label_arrays(file.arrays.files) if other != name)
    numbers = number_labels(set(names).union(*others), file.spec, file.path, f"array {name}")
    return np.array([numbers[text] for text in names], dtype=np.int64)[places.reshape(-1)], order_names(numbers)


def _read_clients(file: _File, name: str) -> NDArray[np.str_]:
    return _read_array(file, name, NAMES, dimensions=1).astype(np.str_)


def _put_channels_first(array: NDArray[Any], path: Path) -> NDArray[Any]:
    """Move the channels of byte pictures first, (N, channels, height, width); rows of bytes, (N, F), stay."""
    match array.shape:
        case (_, _):
            return array
        case (_, _, _):
            return array[:, None]
        case (_, _, _, channels) if channels in CHANNELS:
            return array.transpose(0, 3, 1, 2)
        case (_, channels, _, _) if channels in CHANNELS:
            return array
    raise ConfigError(f"{path}: bytes of shape {array.shape} are not pictures; save (N, height, width, channels)")


def _require_equal_lengths(path: Path, counts: Mapping[str, int]) -> None:
    if len(set(counts.values())) > 1:
        lengths = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ConfigError(f"{path}: arrays differ in length: {lengths}; save one entry for each example")

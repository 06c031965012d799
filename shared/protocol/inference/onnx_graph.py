"""Check that an ONNX graph references no external files, without the library `onnx`.

ONNX Runtime reads such a file from a path in the graph, relative to the working directory of the process that loads
the graph from memory. Our graphs have external parameters too, but all are passed in, so that no file is read.
Field numbers: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias, cast

from shared.errors import CorruptFile

MOST_DEPTH, MOST_FIELDS = 64, 1 << 20
"""Limits of the nesting and of the fields in all; no network has as many."""
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
FIXED = {FIXED_64: 8, FIXED_32: 4}
OWN_FORMAT = b"ORTM"
EXTERNAL = 1
NAME, EXTERNAL_DATA, DATA_LOCATION = 8, 13, 14
"""Field numbers of a TensorProto."""
Kind: TypeAlias = str
WITHIN: dict[Kind, dict[int, Kind]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""Messages that may contain a tensor, by the field of the enclosing message."""


Field: TypeAlias = "tuple[int, int | memoryview]"


def require_no_files(model: bytes, parameters: Collection[str], what: str) -> None:
    """Refuse a graph that would make ONNX Runtime read a file.

    Args:
        model: Serialized ModelProto, without its external data.
        parameters: Names of the parameters passed in at loading.

    Raises:
        CorruptFile: A tensor is stored in a file, or the bytes are not an ONNX model. ONNX Runtime also accepts its own
            format, which this check cannot parse.
    """
    try:
        _require_onnx(model)
        outside = next((name for name in _external_tensors(memoryview(model)) if name not in parameters), None)
    except (ValueError, IndexError) as error:
        raise CorruptFile(f"{what}: its graph is not an ONNX model ({error}); export it again") from error
    if outside is not None:
        name = outside.partition("\0")[0]
        raise CorruptFile(f"{what}: tensor {name!r} is stored in a file beside its graph, which is not read; embed it")


def _require_onnx(model: bytes) -> None:
    if model[4:8] == OWN_FORMAT:
        raise ValueError("it has ONNX Runtime's own format")


def _external_tensors(model: memoryview) -> Iterator[str]:
    """Yield the names of external tensors; those that cannot be passed in get a name that no parameter has."""
    pending: list[tuple[Kind, memoryview, int]] = [("model", model, 0)]
    count = 0
    while pending:
        kind, data, depth = pending.pop()
        if depth > MOST_DEPTH:
            raise ValueError("messages too deep")
        for number, value in _read_fields(data):
            count += 1
            if count > MOST_FIELDS:
                raise ValueError("too many fields")
            inner = WITHIN[kind].get(number)
            if inner is None or not isinstance(value, memoryview):
                continue
            if inner != "tensor":
                pending.append((inner, value, depth + 1))
            elif (name := _external_name(value)) is not None:
                yield name if (kind, depth) == ("graph", 1) else f"{name}\0 within {kind}"


def _external_name(tensor: memoryview) -> str | None:
    """Return a tensor's name if its values are external; else None."""
    name, is_outside = "", False
    for number, value in _read_fields(tensor):
        if number == NAME and isinstance(value, memoryview):
            name = bytes(value).decode(errors="replace")
        is_outside |= number == EXTERNAL_DATA or (number == DATA_LOCATION and value == EXTERNAL)
    return name if is_outside else None


def _read_fields(data: memoryview) -> Iterator[Field]:
    """Yield the fields of a Protocol Buffers message: integers, and the bytes of length-delimited fields."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind, value = tag & 7, cast("int | memoryview", 0)
        if kind == VARINT:
            value, at = _read_varint(data, at)
        elif kind == BYTES:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        elif kind in FIXED:
            value, at = data[at : at + FIXED[kind]], at + FIXED[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > len(data) or not tag >> 3:
            raise ValueError("it ends within a field, or a field has no number")
        yield tag >> 3, value


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
    raise ValueError("a number of over ten bytes")

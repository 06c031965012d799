"""Tensors of the Open Inference Protocol, version 2: as JSON, or as bytes behind it (the binary tensor extension).

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from device_agent.inference.http import BINARY_SIZE, DATATYPES
from shared.errors import WireError
from shared.protocol.release import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINARY_DATA, BINARY_OUTPUT = "binary_data", "binary_data_output"
NOT_SUPPORTED = ("classification", "shared_memory_region")


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class _Wanted(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Inference(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""
    outputs: list[_Wanted] = []
    parameters: dict[str, Any] = {}


_DECODER = msgspec.json.Decoder(_Inference)
_NUMBERS = msgspec.json.Decoder(list[float])
_NESTED = msgspec.json.Decoder(list[Any])


class Asked(NamedTuple):
    """A request for an inference.

    Attributes:
        inputs: Of shape (B, ...) and the model's dtype.
        id: What the application calls it; empty for nothing.
        is_binary: Whether the output goes back as bytes.
    """

    inputs: NDArray[Any]
    id: str
    is_binary: bool


def describe(spec: TensorSpec) -> dict[str, Any]:
    """Return a tensor as the metadata of a model have it."""
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": list(spec.shape)}


def read_inference(body: bytes, json_bytes: int | None, given: TensorSpec, wanted: TensorSpec, max_batch: int) -> Asked:
    """Read a request; nothing is taken for its tensors before their shape is known to be right.

    Args:
        body: Of the request.
        json_bytes: How many of it are JSON, as its header says; None for all.
        given: The model's input.
        wanted: The model's output.
        max_batch: Most examples.

    Raises:
        WireError: It is not what the model takes; the message says what that is.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        raise WireError(f"Inference-Header-Content-Length is {json_bytes}, and the body has {len(body)} bytes")
    split = len(body) if json_bytes is None else json_bytes
    try:
        asked = _DECODER.decode(memoryview(body)[:split])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"this is no inference request: {error}") from error
    if [one.name for one in asked.inputs] != [given.name]:
        names = [one.name[:40] for one in asked.inputs[:4]]
        raise WireError(f"inputs {names}: one is expected, {_expected(given, max_batch)}")
    [tensor] = asked.inputs
    shape = _require_shape(tensor, given, max_batch)
    is_binary = _is_binary(asked, wanted)
    if BINARY_SIZE in tensor.parameters:
        inputs = _from_bytes(memoryview(body)[split:], tensor, shape, given)
    elif split != len(body):
        raise WireError(f"{len(body) - split} bytes behind the JSON, and no input has {BINARY_SIZE!r}")
    else:
        inputs = _from_json(tensor, shape, given)
    return Asked(inputs, asked.id, is_binary)


def _expected(spec: TensorSpec, max_batch: int) -> str:
    shape = ", ".join(map(str, spec.shape[1:]))
    return f"{spec.name!r} with datatype {DATATYPES[spec.dtype]} and shape [n, {shape}], n from 1 to {max_batch}"


def _require_shape(tensor: _Tensor, spec: TensorSpec, max_batch: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and shape[1:] == tuple(spec.shape[1:]) and 1 <= shape[0] <= max_batch
    if not fits or tensor.datatype != DATATYPES[spec.dtype]:
        told = f"datatype {tensor.datatype[:20]} and shape {str(list(shape[:8]))[:80]}"
        raise WireError(f"input {tensor.name!r} has {told}; expected is {_expected(spec, max_batch)}")
    _require_supported(tensor.parameters)
    return shape


def _require_supported(parameters: Mapping[str, Any]) -> None:
    if odd := [one for one in NOT_SUPPORTED if one in parameters]:
        raise WireError(f"{odd[0]!r} is an extension that is not supported here")


def _is_binary(asked: _Inference, wanted: TensorSpec) -> bool:
    """Tell whether the output is wanted as bytes."""
    usual = asked.parameters.get(BINARY_OUTPUT, False)
    for one in asked.outputs:
        if one.name != wanted.name:
            raise WireError(f"there is no output {one.name[:40]!r}; there is {wanted.name!r}")
        _require_supported(one.parameters)
        usual = one.parameters.get(BINARY_DATA, usual)
    return usual is True


def _from_bytes(data: memoryview, tensor: _Tensor, shape: Sequence[int], spec: TensorSpec) -> NDArray[Any]:
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    size = math.prod(shape) * dtype.itemsize
    told = tensor.parameters[BINARY_SIZE]
    if told != size or data.nbytes != size:
        raise WireError(
            f"input {tensor.name!r} of shape {list(shape)} takes {size} bytes; it says {repr(told)[:20]}, "
            f"and {data.nbytes} are behind the JSON"
        )
    return np.require(np.frombuffer(data, dtype).reshape(shape), spec.dtype, ["C", "A"])


def _from_json(tensor: _Tensor, shape: Sequence[int], spec: TensorSpec) -> NDArray[Any]:
    raw, count = bytes(tensor.data), math.prod(shape)
    if raw.count(b",") + 1 != count:  # nested or not, there is one comma less than there are numbers
        raise WireError(f"input {tensor.name!r} of shape {list(shape)} takes {count} numbers as 'data', flat or nested")
    try:
        numbers = np.array(_NUMBERS.decode(raw))
    except msgspec.DecodeError:
        try:
            numbers = np.array(_NESTED.decode(raw))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"input {tensor.name!r}: its data are no array of numbers: {str(error)[:120]}") from error
    kind = np.dtype(spec.dtype).kind
    if numbers.dtype.kind not in "fiu" or numbers.size != count or numbers.shape not in ((count,), tuple(shape)):
        raise WireError(f"input {tensor.name!r}: its data are no array of {count} numbers, flat or of its shape")
    if kind != "f" and (numbers != np.trunc(numbers)).any():
        raise WireError(f"input {tensor.name!r} takes whole numbers")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and the model's output tells of it
        return numbers.astype(spec.dtype).reshape(shape)


def write_inference(
    outputs: NDArray[Any],
    spec: TensorSpec,
    served: tuple[str, int],
    asked: Asked,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, int]:
    """Return the body of an answer, and how many bytes of it are JSON: 0 where all are.

    Args:
        outputs: Of shape (B, ...).
        spec: The model's output.
        served: Name and version of the model.
        asked: What it answers.
        parameters: What else is said of the answer.
    """
    tensor: dict[str, Any] = {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": outputs.shape}
    data = b""
    if asked.is_binary:
        data = np.ascontiguousarray(outputs, np.dtype(spec.dtype).newbyteorder("<")).tobytes()
        tensor["parameters"] = {BINARY_SIZE: len(data)}
    else:
        tensor["data"] = outputs.ravel().tolist()
    told: dict[str, Any] = {"model_name": served[0], "model_version": str(served[1])}
    if asked.id:
        told["id"] = asked.id
    if parameters:
        told["parameters"] = parameters
    head = msgspec.json.encode(told | {"outputs": [tensor]})
    return head + data, len(head) if asked.is_binary else 0

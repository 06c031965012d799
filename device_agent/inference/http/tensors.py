"""Tensors of the Open Inference Protocol, as JSON or binary data.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from device_agent.inference.http import BINARY_SIZE, DATATYPES
from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINARY_DATA, BINARY_OUTPUT = "binary_data", "binary_data_output"
NOT_SUPPORTED = ("classification", "shared_memory_region")
CACHED_BYTES, CACHE_ENTRIES = 1024, 64
"""JSON before binary tensors is parsed once and cached, up to this size."""

_NUMBERS = msgspec.json.Decoder(list[float])
_NESTED = msgspec.json.Decoder(list[Any])


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class _OutputRequest(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Inference(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""
    outputs: list[_OutputRequest] = []
    parameters: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Inference)


class _RequestHead(NamedTuple):
    """Parsed JSON of a request.

    Attributes:
        is_behind: Whether the input follows the JSON as binary data.
        size: Announced size of that data in bytes, unchecked.
        data: Input values, if they are in the JSON.
        id: Request id of the application; empty for none.
        is_binary: Whether the output is returned as binary data.
    """

    shape: tuple[int, ...]
    is_behind: bool
    size: object
    data: msgspec.Raw
    id: str
    is_binary: bool


class InferenceRequest(NamedTuple):
    """A validated inference request.

    Attributes:
        inputs: Shape (B, ...), with the model's dtype.
        id: Request id of the application; empty for none.
        is_binary: Whether the output is returned as binary data.
    """

    inputs: NDArray[Any]
    id: str
    is_binary: bool


def describe_tensor(spec: TensorSpec) -> dict[str, Any]:
    """Return the metadata entry of a tensor."""
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": list(spec.shape)}


def read_inference(
    body: bytes, json_bytes: int | None, input_spec: TensorSpec, output_spec: TensorSpec, max_batch: int
) -> InferenceRequest:
    """Parse a request; memory for tensors is taken only once their shape is valid.

    Args:
        json_bytes: Length of the JSON in the body, from its header; None if all is JSON.

    Raises:
        WireError: The request does not fit the model; the message says what is expected.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        raise WireError(f"Inference-Header-Content-Length is {json_bytes}, but the body has {len(body)} bytes")
    split = len(body) if json_bytes is None else json_bytes
    read = _read_head_cached if split < len(body) and split <= CACHED_BYTES else _read_head
    head = read(body[:split], input_spec, output_spec, max_batch)
    if head.is_behind:
        inputs = _from_bytes(body, split, head, input_spec)
    elif split != len(body):
        raise WireError(f"{len(body) - split} bytes follow the JSON, but no input has {BINARY_SIZE!r}")
    else:
        inputs = _from_json(head, input_spec)
    return InferenceRequest(inputs, head.id, head.is_binary)


def _read_head(text: bytes, input_spec: TensorSpec, output_spec: TensorSpec, max_batch: int) -> _RequestHead:
    """Parse the JSON of a request; raise `WireError` if it does not fit the model."""
    try:
        request = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an inference request: {error}") from error
    if [tensor.name for tensor in request.inputs] != [input_spec.name]:
        names = [tensor.name[:40] for tensor in request.inputs[:4]]
        raise WireError(f"inputs {names}: expected exactly one, {_describe_expected(input_spec, max_batch)}")
    [tensor] = request.inputs
    shape = _require_shape(tensor, input_spec, max_batch)
    size, is_binary = tensor.parameters.get(BINARY_SIZE), _is_binary(request, output_spec)
    return _RequestHead(shape, BINARY_SIZE in tensor.parameters, size, tensor.data, request.id, is_binary)


_read_head_cached = lru_cache(maxsize=CACHE_ENTRIES)(_read_head)


def _describe_expected(spec: TensorSpec, max_batch: int) -> str:
    shape = ", ".join(map(str, spec.shape[1:]))
    return f"{spec.name!r} with datatype {DATATYPES[spec.dtype]} and shape [n, {shape}], n from 1 to {max_batch}"


def _require_shape(tensor: _Tensor, spec: TensorSpec, max_batch: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and shape[1:] == tuple(spec.shape[1:]) and 1 <= shape[0] <= max_batch
    if not fits or tensor.datatype != DATATYPES[spec.dtype]:
        actual = f"datatype {tensor.datatype[:20]} and shape {str(list(shape[:8]))[:80]}"
        raise WireError(f"input {tensor.name!r} has {actual}; expected {_describe_expected(spec, max_batch)}")
    _require_supported(tensor.parameters)
    return shape


def _require_supported(parameters: Mapping[str, Any]) -> None:
    if odd := [extension for extension in NOT_SUPPORTED if extension in parameters]:
        raise WireError(f"extension {odd[0]!r} is not supported")


def _is_binary(request: _Inference, output_spec: TensorSpec) -> bool:
    """Check the requested outputs; return True if binary data is requested."""
    usual = request.parameters.get(BINARY_OUTPUT, False)
    for output in request.outputs:
        if output.name != output_spec.name:
            raise WireError(f"unknown output {output.name[:40]!r}; the model has {output_spec.name!r}")
        _require_supported(output.parameters)
        usual = output.parameters.get(BINARY_DATA, usual)
    return usual is True


def _from_bytes(body: bytes, split: int, head: _RequestHead, spec: TensorSpec) -> NDArray[Any]:
    dtype, shape = _little_endian(spec.dtype), head.shape
    size, actual = math.prod(shape) * dtype.itemsize, len(body) - split
    if head.size != size or actual != size:
        raise WireError(
            f"input {spec.name!r} of shape {list(shape)} takes {size} bytes; announced are {repr(head.size)[:20]}, "
            f"and {actual} follow the JSON"
        )
    inputs = np.frombuffer(body, dtype, offset=split).reshape(shape)
    return inputs if inputs.flags.aligned and dtype.isnative else inputs.astype(spec.dtype)


@lru_cache(maxsize=len(DATATYPES))
def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _from_json(head: _RequestHead, spec: TensorSpec) -> NDArray[Any]:
    shape = head.shape
    raw, count = bytes(head.data), math.prod(shape)
    if raw.count(b",") + 1 != count:  # flat or nested, n numbers have n - 1 commas
        raise WireError(f"input {spec.name!r} of shape {list(shape)} takes {count} numbers as 'data', flat or nested")
    try:
        numbers = np.array(_NUMBERS.decode(raw))
    except msgspec.DecodeError:
        try:
            numbers = np.array(_NESTED.decode(raw))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"input {spec.name!r}: 'data' is not an array of numbers: {str(error)[:120]}") from error
    kind = np.dtype(spec.dtype).kind
    if numbers.dtype.kind not in "fiu" or numbers.size != count or numbers.shape not in ((count,), tuple(shape)):
        raise WireError(f"input {spec.name!r}: 'data' is not an array of {count} numbers, flat or of its shape")
    if kind != "f" and (numbers != np.trunc(numbers)).any():
        raise WireError(f"input {spec.name!r} takes integers")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which the model's output reveals
        return numbers.astype(spec.dtype).reshape(shape)


def write_inference(
    outputs: NDArray[Any],
    spec: TensorSpec,
    served: tuple[str, int],
    request: InferenceRequest,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, int]:
    """Return the body of a response and the length of its JSON; length 0 if all is JSON.

    Args:
        outputs: Shape (B, ...), converted to the dtype of `spec`.
        served: Name and version of the model.
        parameters: Further parameters of the response.
    """
    if not request.is_binary:
        return _encode(
            spec, served, request.id, {"shape": outputs.shape, "data": outputs.ravel().tolist()}, parameters
        ), 0
    data = outputs.astype(_little_endian(spec.dtype), copy=False).tobytes()
    if request.id or parameters:
        head = _encode(spec, served, request.id, _describe_binary(outputs.shape, len(data)), parameters)
    else:
        head = _encode_cached(spec, served, outputs.shape, len(data))
    return head + data, len(head)


def _describe_binary(shape: tuple[int, ...], size: int) -> dict[str, Any]:
    return {"shape": shape, "parameters": {BINARY_SIZE: size}}


@lru_cache(maxsize=CACHE_ENTRIES)
def _encode_cached(spec: TensorSpec, served: tuple[str, int], shape: tuple[int, ...], size: int) -> bytes:
    """Return the JSON before binary output; without request id and parameters it repeats."""
    return _encode(spec, served, "", _describe_binary(shape, size), None)


def _encode(
    spec: TensorSpec, served: tuple[str, int], id_: str, output: Mapping[str, Any], parameters: Mapping[str, Any] | None
) -> bytes:
    head: dict[str, Any] = {"model_name": served[0], "model_version": str(served[1])}
    if id_:
        head["id"] = id_
    if parameters:
        head["parameters"] = parameters
    about = {"name": spec.name, "datatype": DATATYPES[spec.dtype], **output}
    return msgspec.json.encode({**head, "outputs": [about]})

"""Tensors of the Open Inference Protocol, version 2: as JSON, or as bytes behind it (the binary tensor extension).

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
KNOWN_BYTES, KNOWN = 1024, 64
"""JSON up to this size that stood before tensors as bytes is not read again, where it was among the last ones."""

_NUMBERS = msgspec.json.Decoder(list[float])
_NESTED = msgspec.json.Decoder(list[Any])


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


class _Question(NamedTuple):
    """What the JSON of a request says.

    Attributes:
        is_behind: Whether its numbers stand behind the JSON.
        size: Of these, in bytes, as it says it.
        data: Its numbers, where they are in the JSON.
        id: What the application calls the request; empty for nothing.
        is_binary: Whether the output goes back as bytes.
    """

    shape: tuple[int, ...]
    is_behind: bool
    size: object
    data: msgspec.Raw
    id: str
    is_binary: bool


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
        json_bytes: How many of it are JSON, as its header says; None for all.

    Raises:
        WireError: It is not what the model takes; the message says what that is.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        raise WireError(f"Inference-Header-Content-Length is {json_bytes}, and the body has {len(body)} bytes")
    split = len(body) if json_bytes is None else json_bytes
    read = _read_known if split < len(body) and split <= KNOWN_BYTES else _read_question
    question = read(body[:split], given, wanted, max_batch)
    if question.is_behind:
        inputs = _from_bytes(body, split, question, given)
    elif split != len(body):
        raise WireError(f"{len(body) - split} bytes behind the JSON, and no input has {BINARY_SIZE!r}")
    else:
        inputs = _from_json(question, given)
    return Asked(inputs, question.id, question.is_binary)


def _read_question(text: bytes, given: TensorSpec, wanted: TensorSpec, max_batch: int) -> _Question:
    """Return what JSON says; raise `WireError` where it is not what the model takes."""
    try:
        asked = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"this is no inference request: {error}") from error
    if [one.name for one in asked.inputs] != [given.name]:
        names = [one.name[:40] for one in asked.inputs[:4]]
        raise WireError(f"inputs {names}: one is expected, {_expected(given, max_batch)}")
    [tensor] = asked.inputs
    shape = _require_shape(tensor, given, max_batch)
    told = tensor.parameters
    is_binary = _is_binary(asked, wanted)
    return _Question(shape, BINARY_SIZE in told, told.get(BINARY_SIZE), tensor.data, asked.id, is_binary)


_read_known = lru_cache(maxsize=KNOWN)(_read_question)


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


def _from_bytes(body: bytes, split: int, question: _Question, spec: TensorSpec) -> NDArray[Any]:
    dtype, shape = _little_endian(spec.dtype), question.shape
    size, given = math.prod(shape) * dtype.itemsize, len(body) - split
    if question.size != size or given != size:
        raise WireError(
            f"input {spec.name!r} of shape {list(shape)} takes {size} bytes; it says {repr(question.size)[:20]}, "
            f"and {given} are behind the JSON"
        )
    inputs = np.frombuffer(body, dtype, offset=split).reshape(shape)
    return inputs if inputs.flags.aligned and dtype.isnative else inputs.astype(spec.dtype)


@lru_cache(maxsize=len(DATATYPES))
def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _from_json(question: _Question, spec: TensorSpec) -> NDArray[Any]:
    shape = question.shape
    raw, count = bytes(question.data), math.prod(shape)
    if raw.count(b",") + 1 != count:  # nested or not, there is one comma less than there are numbers
        raise WireError(f"input {spec.name!r} of shape {list(shape)} takes {count} numbers as 'data', flat or nested")
    try:
        numbers = np.array(_NUMBERS.decode(raw))
    except msgspec.DecodeError:
        try:
            numbers = np.array(_NESTED.decode(raw))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"input {spec.name!r}: its data are no array of numbers: {str(error)[:120]}") from error
    kind = np.dtype(spec.dtype).kind
    if numbers.dtype.kind not in "fiu" or numbers.size != count or numbers.shape not in ((count,), tuple(shape)):
        raise WireError(f"input {spec.name!r}: its data are no array of {count} numbers, flat or of its shape")
    if kind != "f" and (numbers != np.trunc(numbers)).any():
        raise WireError(f"input {spec.name!r} takes whole numbers")
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
        served: Name and version of the model.
        parameters: What else is said of the answer.
    """
    if not asked.is_binary:
        return _encode(
            spec, served, asked.id, {"shape": outputs.shape, "data": outputs.ravel().tolist()}, parameters
        ), 0
    data = outputs.astype(_little_endian(spec.dtype), copy=False).tobytes()
    if asked.id or parameters:
        head = _encode(spec, served, asked.id, _behind(outputs.shape, len(data)), parameters)
    else:
        head = _encode_known(spec, served, outputs.shape, len(data))
    return head + data, len(head)


def _behind(shape: tuple[int, ...], size: int) -> dict[str, Any]:
    return {"shape": shape, "parameters": {BINARY_SIZE: size}}


@lru_cache(maxsize=KNOWN)
def _encode_known(spec: TensorSpec, served: tuple[str, int], shape: tuple[int, ...], size: int) -> bytes:
    """Return the JSON before a tensor as bytes: with nothing else to say, it is the same again and again."""
    return _encode(spec, served, "", _behind(shape, size), None)


def _encode(
    spec: TensorSpec, served: tuple[str, int], id_: str, output: Mapping[str, Any], parameters: Mapping[str, Any] | None
) -> bytes:
    told: dict[str, Any] = {"model_name": served[0], "model_version": str(served[1])}
    if id_:
        told["id"] = id_
    if parameters:
        told["parameters"] = parameters
    about = {"name": spec.name, "datatype": DATATYPES[spec.dtype], **output}
    return msgspec.json.encode({**told, "outputs": [about]})

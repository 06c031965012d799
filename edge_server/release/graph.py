"""ONNX graph of a network: export, weight binding and PyTorch parity check.

The traced copy holds random placeholders, so that the graph does not depend on training: two models of one
architecture have the same graph, byte for byte. `torch.onnx` exports with its TorchScript exporter, which needs only
the package `onnx`; the newer exporter also needs `onnxscript` and takes ten seconds. Constants are not folded and
layers not fused, so that each parameter remains a separate initializer under its name in the network.
"""

from __future__ import annotations

import copy
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.errors import ConfigError, first_line
from shared.protocol.inference.release import TensorSpec
from shared.registry import FAULTS
from shared.tensors.tree import Tree, tensor_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnxruntime import InferenceSession

OPSET = 17
"""Supported by ONNX Runtime 1.12 and later; boards run 1.17 or newer. torch's exporter uses IR version 8 with it."""
INPUT, FEATURES, OUTPUT, BATCH = "input", "features", "output", "batch"
TRACED_EXAMPLES = 2
"""With a batch of one, the exporter would treat the batch size as a constant."""
MAX_ERROR = 1e-5
"""Largest accepted difference from PyTorch's outputs, as a share of the largest."""
PLACEHOLDER_SEED = 0
EXTERNAL = 1
"""`TensorProto.EXTERNAL`."""


class ByteRange(NamedTuple):
    """Location of a parameter's bytes, in a file beside the graph."""

    file: str
    offset: int
    length: int


class TracedGraph(NamedTuple):
    """An exported graph with placeholders in place of the parameters.

    Attributes:
        proto: An `onnx.ModelProto`, untyped because `onnx` is optional.
        input: Its first dimension is the batch, -1.
        parameters: Names of the initializers that are parameters of the network, in the graph's order.
    """

    proto: Any
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]


def trace_graph(layers: nn.Module, example: Sequence[int], names: tuple[str, str], what: str) -> TracedGraph:
    """Trace layers in evaluation mode.

    Args:
        layers: Not modified. Tensors of non-floating types become constants of the graph.
        example: Shape of one input, without the batch.
        names: Input name and output name.
        what: Description of the network for error messages.

    Raises:
        ConfigError: ONNX or the exporter does not support an operator, or the layers do not accept the input.
        ModuleNotFoundError: The package `onnx` is not installed.
    """
    import onnx  # noqa: PLC0415 - an optional dependency; torch's error would not name the package

    traced = _copy_with_placeholders(layers)
    inputs = torch.zeros((TRACED_EXAMPLES, *example))
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _silence_stdout():
            warnings.simplefilter("ignore")  # the exporter warns that it is deprecated and that folding is off
            outputs = traced(inputs)
            torch.onnx.export(
                traced,
                (inputs,),
                buffer,  # type: ignore[arg-type]  # this exporter accepts any binary file
                dynamo=False,
                opset_version=OPSET,
                input_names=[names[0]],
                output_names=[names[1]],
                dynamic_axes={name: {0: BATCH} for name in names},
                do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE,  # otherwise BatchNorm would be fused
            )
    except FAULTS as error:
        raise ConfigError(f"{what} cannot be written as ONNX: {_describe_export_fault(error)}") from error
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"{what} cannot be written as ONNX: it returns a {type(outputs).__name__}, not one tensor")
    proto = onnx.load_model_from_string(buffer.getvalue())
    float_names = {name for name, leaf in layers.state_dict().items() if leaf.is_floating_point()}
    return TracedGraph(
        proto,
        TensorSpec(name=names[0], dtype="float32", shape=(-1, *example)),
        TensorSpec(name=names[1], dtype="float32", shape=(-1, *outputs.shape[1:])),
        tuple(initializer.name for initializer in proto.graph.initializer if initializer.name in float_names),
    )


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Discard writes to file descriptor 1: torch prints the whole graph when the export fails."""
    sys.stdout.flush()
    stdout_copy, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(sink)


def _describe_export_fault(error: BaseException) -> str:
    """Name the unsupported operator, or return the first line of the exporter's error."""
    text = str(error).strip() or type(error).__name__
    if match := re.search(r"operator '([^']+)'", text):
        return f"operator {match[1]} is not known in opset {OPSET}; replace it in the network"
    return text.partition("\n")[0]


def _copy_with_placeholders(layers: nn.Module) -> nn.Module:
    """Copy layers with random floating-point tensors; the exporter would merge equal ones."""
    traced = copy.deepcopy(layers).eval()
    generator = torch.Generator().manual_seed(PLACEHOLDER_SEED)
    with torch.no_grad():
        for leaf in traced.state_dict().values():
            if leaf.is_floating_point():
                leaf.copy_(torch.rand(leaf.shape, generator=generator) + 0.5)
    return traced


def embed_weights(graph: TracedGraph, tree: Tree) -> bytes:
    """Serialise a graph together with its parameters."""
    proto = copy.deepcopy(graph.proto)
    for initializer in _parameter_initializers(graph, proto):
        initializer.raw_data = bytes(tensor_bytes(tree[initializer.name]))
    return _serialise(proto)


def reference_weights(graph: TracedGraph, ranges: Mapping[str, ByteRange]) -> bytes:
    """Serialise a graph that references its parameters by byte range in a file, or binds them by name."""
    proto = copy.deepcopy(graph.proto)
    for initializer in _parameter_initializers(graph, proto):
        initializer.ClearField("raw_data")
        initializer.data_location = EXTERNAL
        byte_range = ranges[initializer.name]
        location = {"location": byte_range.file, "offset": str(byte_range.offset), "length": str(byte_range.length)}
        for key, value in location.items():
            entry = initializer.external_data.add()
            entry.key, entry.value = key, value
    return _serialise(proto)


def _parameter_initializers(graph: TracedGraph, proto: Any) -> list[Any]:
    names = set(graph.parameters)
    return [initializer for initializer in proto.graph.initializer if initializer.name in names]


def _serialise(proto: Any) -> bytes:
    proto.producer_version = ""  # holds torch's version; the bytes should depend on the graph only
    data = proto.SerializeToString(deterministic=True)
    assert isinstance(data, bytes)
    return data


def create_session(data: bytes, tree: Tree | None = None) -> InferenceSession:
    """Open a graph in ONNX Runtime, on one CPU thread.

    Args:
        tree: Parameters to bind by name; None if the graph contains them.

    Raises:
        ModuleNotFoundError: ONNX Runtime is not installed.
    """
    import onnxruntime  # noqa: PLC0415 - an optional dependency

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    if tree:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(leaf.contiguous().numpy()) for leaf in tree.values()]
        options.add_external_initializers(list(tree), values)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_session(session: InferenceSession, inputs: Tensor) -> NDArray[np.float32]:
    """Run a session on inputs of shape (B, ...); return float32 outputs of shape (B, ...)."""
    [outputs] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return outputs  # type: ignore[no-any-return]


def run_graph(data: bytes, inputs: Tensor, tree: Tree | None = None) -> NDArray[np.float32]:
    """Open a graph as `create_session` does and run it on float32 inputs of shape (B, ...)."""
    return run_session(create_session(data, tree), inputs)


def relative_error(outputs: NDArray[np.float32], expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; infinite for NaN or unequal shapes."""
    if outputs.shape != tuple(expected.shape):
        return math.inf
    largest = float(expected.abs().max())
    error = float((torch.from_numpy(outputs) - expected).abs().max())
    if error == 0:
        return 0.0
    return error / largest if largest and math.isfinite(error) else math.inf


def require_parity(data: bytes, probes: tuple[Tensor, Tensor], what: str, tree: Tree | None = None) -> float:
    """Check ONNX Runtime's outputs against PyTorch's, for all probes at once and for the first alone.

    Args:
        probes: Inputs of shape (N, ...) and PyTorch's outputs for them.
        what: Description of the network for error messages.
        tree: Parameters to bind by name; None if the graph contains them.

    Returns:
        The largest relative error.

    Raises:
        ConfigError: The error exceeds `MAX_ERROR`, or ONNX Runtime cannot run the graph.
    """
    inputs, expected = probes
    try:
        outputs = [run_graph(data, inputs[:count], tree) for count in (len(inputs), 1)]
    except ModuleNotFoundError:
        raise
    except Exception as error:  # errors of its C++ code share no base class
        raise ConfigError(f"{what}: ONNX Runtime cannot run its graph: {first_line(error)}") from error
    return require_equal_outputs(outputs, expected, what)


def require_equal_outputs(outputs: Sequence[NDArray[np.float32]], expected: Tensor, what: str) -> float:
    """Check outputs against PyTorch's; return the largest relative error.

    Args:
        outputs: Results for batches of the first probes, each of shape (B, ...).
        what: Description of the network for error messages.

    Raises:
        ConfigError: The error exceeds `MAX_ERROR`.
    """
    error = max(relative_error(batch, expected[: len(batch)]) for batch in outputs)
    if error > MAX_ERROR:
        raise ConfigError(
            f"{what}: the exported graph differs from PyTorch by {error:.1e} of the largest output; remove control "
            "flow that depends on input values or on the batch size"
        )
    return error

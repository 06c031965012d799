"""A network as an ONNX graph: its layers traced once, its parameters bound to it by their names.

What is traced holds made-up numbers, so that the graph says nothing of any training: two models of one architecture
have the same graph, byte for byte. `torch.onnx` writes it by its TorchScript exporter, which needs the package `onnx`
alone, where the newer one needs `onnxscript` too and takes ten seconds. Constants are not folded and layers not fused:
each parameter stays an initializer of its own, under the name that it has in the network.
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

from shared.errors import ConfigError
from shared.protocol.inference.release import TensorSpec
from shared.registry import FAULTS
from shared.tensors.tree import Tree, tensor_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnxruntime import InferenceSession

OPSET = 17
"""Read by ONNX Runtime 1.12 and later; boards may have 1.17 or newer. torch's exporter writes IR version 8 with it."""
INPUT, FEATURES, OUTPUT, BATCH = "input", "features", "output", "batch"
TRACED_EXAMPLES = 2
"""A batch of one would be taken for a constant."""
MOST_ERROR = 1e-5
"""Largest difference from what PyTorch computes, as a share of its largest output."""
PLACEHOLDER_SEED = 0
EXTERNAL = 1
"""`TensorProto.EXTERNAL`."""


class ByteRange(NamedTuple):
    """Where in a file a parameter's bytes lie.

    Attributes:
        file: Its name, in the folder of the graph.
        offset: Of the first byte.
        length: In bytes.
    """

    file: str
    offset: int
    length: int


class TracedGraph(NamedTuple):
    """A graph without parameters.

    Attributes:
        proto: `onnx.ModelProto`.
        input: What goes in; the first extent is the batch, -1.
        parameters: Names of the initializers that are parameters of the network, in the graph's order.
    """

    proto: Any
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[str, ...]


def trace_graph(layers: nn.Module, example: Sequence[int], names: tuple[str, str], what: str) -> TracedGraph:
    """Trace layers as they evaluate.

    Args:
        layers: With storage; they are not changed. Tensors that are no floating numbers become part of the graph.
        example: Shape of one input, without the batch.
        names: Of input and output.
        what: The network, for the error.

    Raises:
        ConfigError: There is an operator that ONNX or the exporter does not know, or the layers do not take the input.
        ModuleNotFoundError: The package `onnx` is not installed.
    """
    import onnx  # noqa: PLC0415 - of an extra; torch would name no package

    traced = _with_placeholders(layers)
    inputs = torch.zeros((TRACED_EXAMPLES, *example))
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _muted():
            warnings.simplefilter("ignore")  # that this exporter is not the newest, and of constants not folded
            outputs = traced(inputs)
            torch.onnx.export(
                traced,
                (inputs,),
                buffer,  # type: ignore[arg-type]  # this exporter writes into any file
                dynamo=False,
                opset_version=OPSET,
                input_names=[names[0]],
                output_names=[names[1]],
                dynamic_axes={name: {0: BATCH} for name in names},
                do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE,  # else BatchNorm would be fused away
            )
    except FAULTS as error:
        raise ConfigError(f"{what} cannot be written as ONNX: {_reason(error)}") from error
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
def _muted() -> Iterator[None]:
    """Keep what torch writes there itself off the standard output: where it gives up it prints the whole graph."""
    sys.stdout.flush()
    stdout_copy, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
        os.close(sink)


def _reason(error: BaseException) -> str:
    """Return why the exporter gives up: the operator that it does not know, or the first line of what it says."""
    text = str(error).strip() or type(error).__name__
    if match := re.search(r"operator '([^']+)'", text):
        return f"operator {match[1]} is not known in opset {OPSET}; replace it in the network"
    return text.partition("\n")[0]


def _with_placeholders(layers: nn.Module) -> nn.Module:
    """Return a copy that holds made-up floating numbers, no two tensors alike: equal ones would become one."""
    traced = copy.deepcopy(layers).eval()
    generator = torch.Generator().manual_seed(PLACEHOLDER_SEED)
    with torch.no_grad():
        for leaf in traced.state_dict().values():
            if leaf.is_floating_point():
                leaf.copy_(torch.rand(leaf.shape, generator=generator) + 0.5)
    return traced


def with_weights(graph: TracedGraph, tree: Tree) -> bytes:
    """Return a graph that holds its parameters.

    Args:
        graph: Without them; not changed.
    """
    proto = copy.deepcopy(graph.proto)
    for initializer in _parameters(graph, proto):
        initializer.raw_data = bytes(tensor_bytes(tree[initializer.name]))
    return _serialised(proto)


def without_weights(graph: TracedGraph, ranges: Mapping[str, ByteRange]) -> bytes:
    """Return a graph whose parameters lie in a file beside it, or are bound to it by their names.

    Args:
        ranges: Where each parameter lies.
    """
    proto = copy.deepcopy(graph.proto)
    for initializer in _parameters(graph, proto):
        initializer.ClearField("raw_data")
        initializer.data_location = EXTERNAL
        byte_range = ranges[initializer.name]
        location = {"location": byte_range.file, "offset": str(byte_range.offset), "length": str(byte_range.length)}
        for key, value in location.items():
            entry = initializer.external_data.add()
            entry.key, entry.value = key, value
    return _serialised(proto)


def _parameters(graph: TracedGraph, proto: Any) -> list[Any]:
    names = set(graph.parameters)
    return [initializer for initializer in proto.graph.initializer if initializer.name in names]


def _serialised(proto: Any) -> bytes:
    proto.producer_version = ""  # torch's: another version that writes the same graph gives the same bytes
    data = proto.SerializeToString(deterministic=True)
    assert isinstance(data, bytes)
    return data


def open_graph(data: bytes, tree: Tree | None = None) -> InferenceSession:
    """Return ONNX Runtime's session of a graph, on one thread of the CPU.

    Args:
        tree: What is bound to it by name; none where it holds its parameters.

    Raises:
        ModuleNotFoundError: ONNX Runtime is not installed.
    """
    import onnxruntime  # noqa: PLC0415 - of an extra

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors alone
    if tree:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(leaf.contiguous().numpy()) for leaf in tree.values()]
        options.add_external_initializers(list(tree), values)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_session(session: InferenceSession, inputs: Tensor) -> NDArray[np.float32]:
    """Return what a session computes of inputs, float32 of shape (B, ...)."""
    [outputs] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return outputs  # type: ignore[no-any-return]


def run_graph(data: bytes, inputs: Tensor, tree: Tree | None = None) -> NDArray[np.float32]:
    """Return what ONNX Runtime computes, float32 of shape (B, ...); raise as `open_graph`.

    Args:
        inputs: float32 of shape (B, ...).
        tree: What is bound to it by name; none where it holds its parameters.
    """
    return run_session(open_graph(data, tree), inputs)


def relative_error(outputs: NDArray[np.float32], expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected number; infinite where a shape differs or NaN.

    Args:
        outputs: What another program computed.
    """
    if outputs.shape != tuple(expected.shape):
        return math.inf
    largest = float(expected.abs().max())
    error = float((torch.from_numpy(outputs) - expected).abs().max())
    if error == 0:
        return 0.0
    return error / largest if largest and math.isfinite(error) else math.inf


def require_parity(data: bytes, probes: tuple[Tensor, Tensor], what: str, tree: Tree | None = None) -> float:
    """Return by how much ONNX Runtime differs from PyTorch, in batches of all probes and of one.

    Args:
        probes: Inputs of shape (N, ...) and what PyTorch makes of them.
        what: The network, for the error.
        tree: As `run_graph` takes it.

    Raises:
        ConfigError: It differs by more than `MOST_ERROR`.
    """
    inputs, expected = probes
    try:
        outputs = [run_graph(data, inputs[:count], tree) for count in (len(inputs), 1)]
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of its C++ code, by no common class
        problem = str(error).partition("\n")[0]
        raise ConfigError(f"{what}: ONNX Runtime does not run its graph: {problem}") from error
    return require_same(outputs, expected, what)


def require_same(outputs: Sequence[NDArray[np.float32]], expected: Tensor, what: str) -> float:
    """Return by how much outputs differ from PyTorch's, as a share of the largest.

    Args:
        outputs: Of batches of the first probes, each of shape (B, ...).
        what: The network, for the error.

    Raises:
        ConfigError: They differ by more than `MOST_ERROR`.
    """
    error = max(relative_error(batch, expected[: len(batch)]) for batch in outputs)
    if error > MOST_ERROR:
        raise ConfigError(
            f"{what}: what was exported computes something else, by {error:.1e} of the largest output; what a network "
            "decides by its input's values, or by the size of a batch, cannot be exported"
        )
    return error

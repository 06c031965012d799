"""A release made smaller: weights and activations of 8 bits, or weights that travel as 16-bit floats.

What that costs is measured on the server's own examples, and refused where accuracy drops by more than it may.
Quantization is ONNX Runtime's own, static and written as pairs of QuantizeLinear and DequantizeLinear around operators,
which every build of it runs: ranges of activations are those of examples that no accuracy is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_server.plan.data import test_data
from edge_server.release.graph import (
    INPUT,
    OUTPUT,
    TracedGraph,
    open_graph,
    relative_error,
    run_session,
    trace_graph,
    with_weights,
)
from edge_server.release.run_model import RunModel
from shared.data.load import load
from shared.errors import ConfigError
from shared.models.build import build_zeroed
from shared.protocol.inference.release import Kind, Reduction
from shared.runtime.clock import monotonic
from shared.tensors.tree import Tree

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

CALIBRATED_ON, CALIBRATION_SHARE = 256, 4
"""Most examples that ranges are taken from, of every so many."""
LEAST_EXAMPLES = 16
BATCH = 64
WARM_UP, TIMED = 5, 31
"""Runs of one example before it is timed, and of which the median counts."""
NO_WEIGHTS = ("_scale", "_zero_point")
"""What names of constants end with that belong to an operator's arithmetic, and stay in the graph."""


@dataclass(frozen=True)
class ServersExamples:
    """Examples of the server's own, in two parts.

    Attributes:
        calibration: Inputs that ranges are taken from, of shape (M, ...).
        inputs: Others, of shape (N, ...).
        labels: Of these, of shape (N,).
    """

    calibration: Tensor
    inputs: Tensor
    labels: Tensor


class Quantized(NamedTuple):
    """A network of 8 bits.

    Attributes:
        graph: Its graph, with its weights inside; `parameters` names them.
        tree: Its weights, by the names that they have there.
    """

    graph: TracedGraph
    tree: Tree


def servers_examples(run_model: RunModel) -> ServersExamples:
    """Return the test examples of a run's plan, in two parts that are drawn by one seed.

    Raises:
        ConfigError: There are none, or too few.
    """
    if not run_model.plan.data:
        raise ConfigError(f"{run_model.what}: what makes it smaller is measured on [data], and its plan has none")
    examples = load(test_data(run_model.plan))
    if len(examples) < LEAST_EXAMPLES:
        raise ConfigError(f"{run_model.what}: {len(examples)} examples are too few to measure on, of {LEAST_EXAMPLES}")
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    count = min(CALIBRATED_ON, len(examples) // CALIBRATION_SHARE)
    held_out = order[count:].sort().values
    return ServersExamples(examples.inputs[order[:count]], examples.inputs[held_out], examples.labels[held_out])


class _Calibration:
    """Gives batches to ONNX Runtime's quantizer, as its `CalibrationDataReader` does."""

    def __init__(self, inputs: Tensor) -> None:
        self._left: Iterator[Tensor] = iter(inputs.split(BATCH))

    def get_next(self) -> Mapping[str, NDArray[np.float32]] | None:
        """Return the next batch; None where there is none."""
        batch = next(self._left, None)
        return None if batch is None else {INPUT: batch.numpy()}


def quantize(run_model: RunModel, calibration: Tensor) -> Quantized:
    """Quantize a network to 8 bits.

    Args:
        calibration: Inputs that the ranges of activations are taken from, of shape (M, ...).

    Raises:
        ConfigError: It cannot be exported or quantized.
        ModuleNotFoundError: ONNX Runtime or the package `onnx` is not installed.
    """
    import onnx  # noqa: PLC0415 - of an extra
    from onnxruntime.quantization import QuantType, quantize_static  # noqa: PLC0415
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    traced = trace_graph(run_model.model.layers, run_model.example, (INPUT, OUTPUT), run_model.what)
    with TemporaryDirectory() as folder:
        original, prepared, out = (Path(folder) / f"{name}.onnx" for name in ("whole", "prepared", "int8"))
        original.write_bytes(with_weights(traced, run_model.tree))
        try:
            quant_pre_process(original, prepared, skip_symbolic_shape=True)
            quantize_static(
                *(prepared, out, _Calibration(calibration)),
                per_channel=True,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # of its own and of protobuf's, by no common class
            problem = str(error).partition("\n")[0]
            raise ConfigError(f"{run_model.what} cannot be quantized: {problem}") from error
        proto = onnx.load(out)
    tree = _take_weights(proto)
    return Quantized(TracedGraph(proto, traced.input, traced.output, tuple(tree)), tree)


def _take_weights(proto: Any) -> Tree:
    """Return a graph's weights and biases, and have each written there as raw bytes."""
    from onnx import TensorProto, numpy_helper  # noqa: PLC0415

    tree: Tree = {}
    for initializer in proto.graph.initializer:
        if initializer.data_type == TensorProto.INT64 or not initializer.dims or initializer.name.endswith(NO_WEIGHTS):
            continue
        array = numpy_helper.to_array(initializer).copy()
        initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
        tree[initializer.name] = torch.from_numpy(array)
    return tree


def halved(run_model: RunModel) -> tuple[RunModel, Tree]:
    """Return a model whose weights are rounded to 16 bits, and these weights as they travel.

    Raises:
        ConfigError: A weight is too large for 16 bits.
    """
    half = {name: leaf.half() if leaf.dtype == torch.float32 else leaf for name, leaf in run_model.tree.items()}
    if wrong := [name for name, leaf in half.items() if leaf.is_floating_point() and not leaf.isfinite().all()]:
        raise ConfigError(f"{run_model.what}: {wrong[0]} holds numbers too large for 16 bits; leave --float16 out")
    tree = {name: half[name].to(leaf.dtype) for name, leaf in run_model.tree.items()}
    model = build_zeroed(run_model.plan.model)
    model.layers.load_state_dict(tree)
    model.layers.eval()
    return replace(run_model, model=model, tree=tree), half


def compare(
    kind: Kind, graphs: Sequence[tuple[bytes, Tree | None]], examples: ServersExamples, sizes: tuple[int, int]
) -> Reduction:
    """Return what is told of a smaller release, as measured here by ONNX Runtime on one thread.

    Args:
        kind: `int8` or `float16`.
        graphs: The trained network and the smaller one, each with what is bound to it.
        sizes: Bytes of the parameters' files, likewise.
    """
    before, after = (open_graph(*graph) for graph in graphs)
    expected, reduced = (_outputs(session, examples.inputs) for session in (before, after))
    labels = examples.labels.numpy()
    accuracies = [float((outputs.argmax(1) == labels).mean()) for outputs in (expected, reduced)]
    times = _seconds((before, after), examples.inputs[:1]) if kind == "int8" else (None, None)
    return Reduction(
        kind=kind,
        accuracy_before=accuracies[0],
        accuracy=accuracies[1],
        examples=len(labels),
        calibrated_on=len(examples.calibration) if kind == "int8" else 0,
        error=relative_error(reduced, torch.from_numpy(expected)),
        bytes_before=sizes[0],
        bytes_after=sizes[1],
        seconds_before=times[0],
        seconds_after=times[1],
    )


def _outputs(session: InferenceSession, inputs: Tensor) -> NDArray[np.float32]:
    return np.concatenate([run_session(session, batch) for batch in inputs.split(BATCH)])


def _seconds(sessions: tuple[InferenceSession, InferenceSession], example: Tensor) -> tuple[float, float]:
    """Return the median time of one example with each of two sessions, which take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(WARM_UP + TIMED):
        for session, session_times in zip(sessions, times, strict=True):
            began = monotonic()
            run_session(session, example)
            if repetition >= WARM_UP:
                session_times.append(monotonic() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def require_accurate(reduction: Reduction, max_drop: float, what: str) -> None:
    """Refuse a smaller release that is less accurate by more than it may be.

    Args:
        max_drop: Largest drop of accuracy, as a share of all examples.
        what: The network, for the error.

    Raises:
        ConfigError: It is.
    """
    drop = reduction.accuracy_before - reduction.accuracy
    if drop > max_drop:
        raise ConfigError(
            f"{what}: as {reduction.kind} its accuracy on {reduction.examples} examples is {reduction.accuracy:.4f}, "
            f"{drop:.4f} less than {reduction.accuracy_before:.4f}, and --max-drop is {max_drop:g}; raise that, or release it "
            "as it is"
        )

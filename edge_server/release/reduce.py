"""Release size reduction: int8 quantization or float16 parameters.

The loss of accuracy is measured on the server's examples, and a release that loses too much is rejected. Quantization
is ONNX Runtime's static one in QDQ format (QuantizeLinear and DequantizeLinear around operators), which every build of
it runs. Activation ranges come from examples that are not used to measure accuracy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_server.plan.data import test_data
from edge_server.release.graph import (
    INPUT,
    OUTPUT,
    TracedGraph,
    create_session,
    embed_weights,
    relative_error,
    run_session,
    trace_graph,
)
from edge_server.release.run_model import RunModel
from shared.data.assigned import with_moments
from shared.data.load import load
from shared.errors import ConfigError, first_line
from shared.models.build import build_zeroed
from shared.models.leaves import load_leaves
from shared.objectives.release_metric import drop_of, find_objective
from shared.protocol.inference.release import Kind, Reduction, ReleaseTask
from shared.runtime.clock import monotonic
from shared.tensors.tree import Tree

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MAX_CALIBRATION_EXAMPLES, CALIBRATION_SHARE = 256, 4
"""At most 256 examples, and at most a quarter of all, calibrate activation ranges."""
MIN_EXAMPLES = 16
BATCH = 64
WARM_UP_RUNS, TIMED_RUNS = 5, 31
"""Untimed runs of one example, then the timed runs whose median is reported."""
QUANTIZATION_SUFFIXES = ("_scale", "_zero_point")
"""Suffixes of quantization constants, which stay in the graph."""


@dataclass(frozen=True)
class ServerExamples:
    """The server's test examples, split for calibration and measurement.

    Attributes:
        calibration: Inputs for activation ranges, of shape (M, ...).
        inputs: Inputs for measuring accuracy, of shape (N, ...).
        labels: Labels of `inputs`, of shape (N,).
    """

    calibration: Tensor
    inputs: Tensor
    labels: Tensor


class Quantized(NamedTuple):
    """An int8 network.

    Attributes:
        graph: Contains the weights; `graph.parameters` names them.
        tree: Weights by their names in the graph.
    """

    graph: TracedGraph
    tree: Tree


def load_server_examples(run_model: RunModel) -> ServerExamples:
    """Load the test examples of a run's plan and split them with a fixed seed.

    Raises:
        ConfigError: The plan has no test data, or fewer than `MIN_EXAMPLES`.
    """
    if not run_model.plan.data:
        raise ConfigError(f"{run_model.what}: --int8 and --float16 are measured on [data], which its plan lacks")
    prepared = run_model.preprocessing
    examples = load(with_moments(test_data(run_model.plan), prepared.mean or (), prepared.std or ()))
    if len(examples) < MIN_EXAMPLES:
        raise ConfigError(f"{run_model.what}: {len(examples)} test examples; at least {MIN_EXAMPLES} are needed")
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    count = min(MAX_CALIBRATION_EXAMPLES, len(examples) // CALIBRATION_SHARE)
    held_out = order[count:].sort().values
    return ServerExamples(examples.inputs[order[:count]], examples.inputs[held_out], examples.labels[held_out])


class _CalibrationReader:
    """Calibration batches with the interface of ONNX Runtime's `CalibrationDataReader`."""

    def __init__(self, inputs: Tensor) -> None:
        self._batches: Iterator[Tensor] = iter(inputs.split(BATCH))

    def get_next(self) -> Mapping[str, NDArray[np.float32]] | None:
        """Return the next batch, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {INPUT: batch.numpy()}


def quantize(run_model: RunModel, calibration: Tensor) -> Quantized:
    """Quantize a network to 8 bits.

    Args:
        calibration: Inputs for activation ranges, of shape (M, ...).

    Raises:
        ConfigError: The network cannot be exported or quantized.
        ModuleNotFoundError: ONNX Runtime or the package `onnx` is not installed.
    """
    import onnx  # noqa: PLC0415 - an optional dependency
    from onnxruntime.quantization import QuantType, quantize_static  # noqa: PLC0415
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    traced = trace_graph(run_model.model.layers, run_model.example, (INPUT, OUTPUT), run_model.what)
    with TemporaryDirectory() as folder:
        original, prepared, out = (Path(folder) / f"{name}.onnx" for name in ("whole", "prepared", "int8"))
        original.write_bytes(embed_weights(traced, run_model.tree))
        try:
            quant_pre_process(original, prepared, skip_symbolic_shape=True)
            quantize_static(
                *(prepared, out, _CalibrationReader(calibration)),
                per_channel=True,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # errors of onnxruntime and protobuf share no base class
            raise ConfigError(f"{run_model.what} cannot be quantized: {first_line(error)}") from error
        proto = onnx.load(out)
    tree = _extract_weights(proto)
    return Quantized(TracedGraph(proto, traced.input, traced.output, tuple(tree)), tree)


def _extract_weights(proto: Any) -> Tree:
    """Return a graph's weights and biases; rewrite them in the graph as raw bytes."""
    from onnx import TensorProto, numpy_helper  # noqa: PLC0415

    tree: Tree = {}
    for initializer in proto.graph.initializer:
        if (
            initializer.data_type == TensorProto.INT64
            or not initializer.dims
            or initializer.name.endswith(QUANTIZATION_SUFFIXES)
        ):
            continue
        array = numpy_helper.to_array(initializer).copy()
        initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
        tree[initializer.name] = torch.from_numpy(array)
    return tree


def to_float16(run_model: RunModel) -> tuple[RunModel, Tree]:
    """Return a model with weights rounded to float16, and its float16 weights.

    Raises:
        ConfigError: A weight exceeds float16's range.
    """
    half = {name: leaf.half() if leaf.dtype == torch.float32 else leaf for name, leaf in run_model.tree.items()}
    if wrong := [name for name, leaf in half.items() if leaf.is_floating_point() and not leaf.isfinite().all()]:
        raise ConfigError(f"{run_model.what}: {wrong[0]} has values beyond float16's range; leave --float16 out")
    tree = {name: half[name].to(leaf.dtype) for name, leaf in run_model.tree.items()}
    model = build_zeroed(run_model.plan.model)
    load_leaves(model.layers, tree)
    model.layers.eval()
    return replace(run_model, model=model, tree=tree), half


def measure_reduction(
    kind: Kind,
    graphs: Sequence[tuple[bytes, Tree | None]],
    examples: ServerExamples,
    sizes: tuple[int, int],
    task: ReleaseTask | msgspec.UnsetType = msgspec.UNSET,
) -> Reduction:
    """Measure accuracy or other metric, error, size and speed of a reduced network, with ONNX Runtime on one thread.

    Args:
        graphs: Trained network and reduced one, each with the parameters to bind.
        sizes: Bytes of their parameter files, in the same order.
        task: What the network was trained for.
    """
    before, after = (create_session(*graph) for graph in graphs)
    expected, reduced = (_run_batches(session, examples.inputs) for session in (before, after))
    labels = examples.labels.numpy()
    inputs = examples.inputs.numpy()
    values = [_measure(task, outputs, inputs, labels) for outputs in (expected, reduced)]
    metric = _metric_of(task)
    is_accuracy = metric is msgspec.UNSET
    times = _time_sessions((before, after), examples.inputs[:1]) if kind == "int8" else (None, None)
    return Reduction(
        kind=kind,
        accuracy_before=values[0] if is_accuracy else None,
        accuracy=values[1] if is_accuracy else None,
        metric=metric,
        value_before=msgspec.UNSET if is_accuracy or values[0] is None else values[0],
        value=msgspec.UNSET if is_accuracy or values[1] is None else values[1],
        examples=len(labels),
        calibrated_on=len(examples.calibration) if kind == "int8" else 0,
        error=relative_error(reduced, torch.from_numpy(expected)),
        bytes_before=sizes[0],
        bytes_after=sizes[1],
        seconds_before=times[0],
        seconds_after=times[1],
    )


def _metric_of(task: ReleaseTask | msgspec.UnsetType) -> str | msgspec.UnsetType:
    """Return the name of the metric that is measured; unset for the accuracy, empty if there is none."""
    if task is msgspec.UNSET:
        return msgspec.UNSET
    objective = find_objective(task)
    return objective.metric if objective else ""


def _measure(
    task: ReleaseTask | msgspec.UnsetType, outputs: NDArray[np.float32], inputs: NDArray[Any], labels: NDArray[Any]
) -> float | None:
    """Return the compared metric of outputs; None if the examples do not define it, or it is the user's own."""
    objective = find_objective(task)
    return objective.values(objective.sums(outputs, labels, inputs)).get(objective.metric) if objective else None


def _run_batches(session: InferenceSession, inputs: Tensor) -> NDArray[np.float32]:
    return np.concatenate([run_session(session, batch) for batch in inputs.split(BATCH)])


def _time_sessions(sessions: tuple[InferenceSession, InferenceSession], example: Tensor) -> tuple[float, float]:
    """Return the median seconds for one example in two sessions, run alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(WARM_UP_RUNS + TIMED_RUNS):
        for session, session_times in zip(sessions, times, strict=True):
            began = monotonic()
            run_session(session, example)
            if repetition >= WARM_UP_RUNS:
                session_times.append(monotonic() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def require_accurate(
    reduction: Reduction, max_drop: float, what: str, task: ReleaseTask | msgspec.UnsetType = msgspec.UNSET
) -> None:
    """Reject a reduced network that loses too much accuracy, or of another compared metric.

    Args:
        max_drop: Largest accepted drop of accuracy, as a share of all examples; of an error in the targets' unit, as a
            share of it.
        what: Description of the network for error messages.
        task: What the network was trained for.

    Raises:
        ConfigError: The drop exceeds `max_drop`.
    """
    if reduction.accuracy is None or reduction.accuracy_before is None:
        _require_metric(reduction, max_drop, what, task)
        return
    drop = reduction.accuracy_before - reduction.accuracy
    if drop > max_drop:
        raise ConfigError(
            f"{what}: as {reduction.kind} its accuracy on {reduction.examples} examples is {reduction.accuracy:.4f}, "
            f"{drop:.4f} less than {reduction.accuracy_before:.4f}; --max-drop is {max_drop:g}: raise it, or release "
            "the unreduced network"
        )


def _require_metric(reduction: Reduction, max_drop: float, what: str, task: ReleaseTask | msgspec.UnsetType) -> None:
    """Reject a reduced network whose compared metric is too much worse.

    Raises:
        ConfigError: It is, or the metric cannot be measured.
    """
    objective = find_objective(task)
    if objective is None or reduction.value is msgspec.UNSET or reduction.value_before is msgspec.UNSET:
        raise ConfigError(
            f"{what}: none of its metrics can be measured on the server's examples, so a reduced network cannot be "
            "compared; release the unreduced network, or add a built-in metric to task.metrics"
        )
    if drop_of(objective, reduction.value, reduction.value_before) > max_drop:
        raise ConfigError(
            f"{what}: as {reduction.kind} its {objective.metric} on {reduction.examples} examples is "
            f"{reduction.value:.4g}, and {reduction.value_before:.4g} before; --max-drop is {max_drop:g}: raise it, or "
            "release the unreduced network"
        )

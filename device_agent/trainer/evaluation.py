"""Evaluate a round's model with ONNX Runtime, on boards without torch.

The network is received as a graph once per run, the parameters with each task; they are bound by name. So neither torch
nor the package `onnx` is needed. Results equal those of `shared.models.evaluate.score` except for rounding, which may
flip an example whose two best classes are tied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.interface import Job
from shared.data.assigned import with_assignment
from shared.data.fingerprint import Fingerprint, fingerprint
from shared.data.sources.read import read_held_out
from shared.data.spec import Data
from shared.errors import ConfigError, CorruptFile, Superseded, WireError
from shared.objectives.array_losses import loss_sum
from shared.objectives.base import Objective, build_objective
from shared.objectives.metric_sums import HeldOutScore, MetricSums, build_score
from shared.protocol import evaluation_graph as graphs
from shared.protocol import payload as payloads
from shared.protocol.evaluation_graph import EvaluationGraph
from shared.protocol.inference.onnx_graph import require_no_files
from shared.protocol.messages import Blob, Update
from shared.protocol.objective import CLASS_KINDS, CLASSIFICATION_SPEC, NUMBER_KINDS
from shared.runtime.extras import install_command
from shared.transfer import to_file

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

HeldOut: TypeAlias = tuple[NDArray[np.float32], NDArray[Any]]
"""Inputs and targets, of shapes (N, ...)."""
Floats: TypeAlias = Mapping[str, NDArray[np.float32]]

BATCH_SIZE, BATCH_BYTES = 16, 4 << 20
"""Limits of a batch in examples and in input bytes; activations take some tens of times as much memory."""
REMEDY = f"install it ({install_command('infer')}), or take evaluation.runtime out of the plan"


class GraphTask(NamedTuple):
    """Job that evaluates by a graph.

    Attributes:
        measure_block: Measures the cost of a block.
        is_superseded: Returns True once the task is cancelled.
        threads: Threads of ONNX Runtime; 0 for one.
    """

    job: Job
    held_out: Callable[[Data], HeldOut]
    measure_block: Callable[[], AbstractContextManager[BlockCost]]
    is_superseded: Callable[[], bool]
    threads: int = 0


def evaluate_by_graph(task: GraphTask) -> Update:
    """Evaluate a task's parameters; return the update.

    Raises:
        Superseded: The task was cancelled.
        FieldFleetError: Graph, parameters or examples cannot be used, or ONNX Runtime is not installed.
    """
    job, score = task.job, HeldOutScore()
    objective = build_objective(job.task.objective or CLASSIFICATION_SPEC)
    with task.measure_block() as usage:
        if job.data.is_labelled or objective.reconstructs:
            inputs, labels = task.held_out(with_assignment(job.data, job.task.assignment))
            if len(labels):
                score = _evaluate(task, objective, inputs, labels)
    return Update(
        run=job.task.run,
        round=job.task.round,
        device=job.task.device,
        params=None,
        start=job.task.params.digest,
        metrics=dict(score.metrics),
        sums=dict(score.sums),
        cost=msgspec.structs.replace(usage.add_to(job.cost), bytes_up=0),
    )


def read_examples(data: Data) -> HeldOut:
    """Return a device's held-out examples, cached since they are few, until growing files change.

    Raises:
        ConfigError: The examples cannot be used.
    """
    return _read_examples(msgspec.msgpack.encode(data), fingerprint(data))


@lru_cache(maxsize=1)
def _read_examples(encoded: bytes, _: Fingerprint | None) -> HeldOut:
    held_out = read_held_out(msgspec.msgpack.decode(encoded, type=Data))
    return held_out.inputs, held_out.labels


def _evaluate(task: GraphTask, objective: Objective, inputs: NDArray[np.float32], labels: NDArray[Any]) -> HeldOutScore:
    job = task.job
    graph = graphs.decode(to_file.view(Path(job.graph)))
    require_fit(graph, objective, inputs, labels, job.data.path or job.data.source)
    session = open_session(graph, read_floats(Path(job.params), graph.parameters), task.threads)
    total, hits = MetricSums(objective), 0
    batch_size = max(1, min(BATCH_SIZE, BATCH_BYTES // inputs[0].nbytes))
    for begin in range(0, len(labels), batch_size):
        if task.is_superseded():
            raise Superseded("a newer task has arrived")
        batch, targets = inputs[begin : begin + batch_size], labels[begin : begin + batch_size]
        [outputs] = session.run([graph.output.name], {graph.input.name: batch})
        predictions, references = objective.operands(outputs, targets, batch)
        batch_loss = loss_sum(objective.spec, predictions, references)
        if batch_loss is not None:  # None of a loss of the user
            total.add_loss(batch_loss, len(references))
        if objective.kind == "classification":
            hits += int((outputs.argmax(1) == targets).sum())
        if objective.spec != CLASSIFICATION_SPEC:
            total.add(outputs, targets, batch)
    return build_score(
        examples=len(labels),
        loss=total.loss if total.counted else None,
        accuracy=hits / len(labels) if objective.kind == "classification" else None,
        metrics=total.values(),
        sums=total.lists(),
    )


def require_fit(
    graph: EvaluationGraph, objective: Objective, inputs: NDArray[np.float32], labels: NDArray[Any], place: str
) -> None:
    """Refuse examples of another shape than the network's input, or with more classes than it has outputs.

    Args:
        inputs: Float array of shape (N, ...).
        labels: Targets of shape (N, ...).
        place: Path or source of the examples, for the error message.

    Raises:
        ConfigError: The examples do not fit.
    """
    shape, expected, outputs = inputs.shape[1:], graph.input.shape[1:], graph.output.shape
    if shape != expected:
        raise ConfigError(
            f"{place}: model: the run's graph takes examples of shape {expected}, not {shape}; correct its options, "
            "or this device's [data]"
        )
    if objective.kind in CLASS_KINDS and (most := int(labels.max())) >= outputs[1]:
        raise ConfigError(f"{place}: model: {outputs[1]} outputs for labels up to {most}; correct this device's [data]")
    if objective.kind in NUMBER_KINDS and math.prod(outputs[1:]) != math.prod(labels.shape[1:]):
        raise ConfigError(
            f"{place}: model: the run's graph returns the shape {outputs[1:]} for an example, and the targets have the "
            f"shape {labels.shape[1:]}; correct this device's [data]"
        )


def read_floats(path: Path, names: tuple[str, ...]) -> Floats:
    """Return the parameters with the given names, as views of their file.

    Raises:
        WireError: A parameter is missing, has another type, or is not finite (which ONNX Runtime would accept).
    """
    received = payloads.unpack(to_file.view(path))
    if received.codec != "dense":
        raise WireError(f"payload of codec {received.codec!r}, expected dense", reason="codec")
    if missing := sorted(set(names) - received.blobs.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
    return {name: _as_floats(name, received.blobs[name]) for name in names}


def _as_floats(name: str, blob: Blob) -> NDArray[np.float32]:
    if blob.dtype != "f32":
        raise WireError(f"tensor {name!r} is {blob.dtype}, expected f32", reason="dtype")
    array = np.frombuffer(blob.data, dtype="<f4").reshape(blob.shape)
    if not np.isfinite(array).all():
        raise WireError(f"tensor {name!r} holds NaN or infinity", reason="not-finite")
    return array


def open_session(graph: EvaluationGraph, parameters: Floats, threads: int = 0) -> InferenceSession:
    """Open an ONNX Runtime session of a graph with its parameters.

    Args:
        threads: Threads within an operator; 0 for one.

    Raises:
        ConfigError: ONNX Runtime is not installed, or too old for the graph's operators.
        WireError: The parameters do not match the graph.
    """
    try:
        import onnxruntime  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise ConfigError(f'evaluation.runtime is "onnx", but ONNX Runtime is not installed: {REMEDY}') from error
    try:
        require_no_files(graph.onnx, parameters, "the run's graph")
    except CorruptFile as error:
        raise WireError(str(error)) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = max(1, threads), 1
    options.log_severity_level = 4  # errors are raised anyway
    options.enable_cpu_mem_arena = False  # it would hold the peak memory; sessions are short
    options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy every weight
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in parameters.values()]
    options.add_external_initializers(list(parameters), values)
    try:
        return onnxruntime.InferenceSession(graph.onnx, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its C++ exceptions have no common base class
        raise _explain_refusal(error, graph, onnxruntime.__version__) from error


def _explain_refusal(error: Exception, graph: EvaluationGraph, version: str) -> ConfigError | WireError:
    """Convert ONNX Runtime's error: an outdated installation, or a bad graph."""
    problem: Any = str(error).partition("\n")[0]
    if "opset" in problem or "IR version" in problem or "ir_version" in problem:
        return ConfigError(f"ONNX Runtime {version} cannot read a graph of opset {graph.opset} ({problem}); update it")
    return WireError(f"ONNX Runtime {version} refuses the run's graph with these parameters: {problem}")

"""A release made of a run's model: the graph of its architecture, its parameters, probes, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edge_server.journal.runs import versions
from edge_server.release.graph import (
    FEATURES,
    INPUT,
    OPSET,
    OUTPUT,
    ByteRange,
    require_parity,
    run_graph,
    trace_graph,
    without_weights,
)
from edge_server.release.reduce import compare, halved, quantize, require_accurate, servers_examples
from edge_server.release.run_model import RunModel, make_probes
from edge_server.release.store import StoredRelease, publish
from shared.errors import ConfigError
from shared.protocol.bounded import is_release_name
from shared.protocol.inference.release import (
    PARAMETERS,
    Kind,
    ParameterSpec,
    Reduction,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    SplitHalves,
    describe_class_fault,
    sha256_of,
)
from shared.protocol.topics import check_name
from shared.runtime.clock import utc_stamp
from shared.tensors import file
from shared.tensors.tree import State, Tree

MAX_DROP = 0.01
"""By how much less accurate a smaller release may be, as a share of the examples."""
HEADER_BYTES = 8
"""Of the length of a safetensors header, which stands before it."""


class _Parameters(NamedTuple):
    """The file of parameters, where each lies in it, and what is said of it."""

    data: bytes
    ranges: dict[str, ByteRange]
    tensors: tuple[ParameterSpec, ...]


class Smaller(NamedTuple):
    """What is to make a release smaller.

    Attributes:
        kind: `int8` or `float16`.
        max_drop: By how much less accurate that may make it.
    """

    kind: Kind
    max_drop: float = MAX_DROP


class _Made(NamedTuple):
    """The parts of a release that are made otherwise where it is made smaller.

    Attributes:
        graph: Of the whole network.
        parameters: The file that boards get.
        reduction: What made it smaller.
    """

    graph: ReleaseGraph
    ir_version: int
    parameters: _Parameters
    outputs: Tensor
    reduction: Reduction | None = None


def create_release(
    run_model: RunModel, data_dir: Path, name: str, cut: int | None = None, reduction: Smaller | None = None
) -> StoredRelease:
    """Make a release of a model and keep it.

    Args:
        data_dir: Folder of runs, in which releases lie too.
        name: What applications will call it.
        cut: Where to cut it for two graphs beside the whole one, as the model counts its cuts; 0 for where its run was
            cut, or else its first; None for no halves.
        reduction: What is to make it smaller; None for the network as it was trained.

    Raises:
        ConfigError: The name is none, the network cannot be exported or cut so, or nothing can be written; made
            smaller it is less accurate than it may be; it has more or fewer outputs than class names.
        Unwritable: The disk takes nothing more.
    """
    if not is_release_name(check_name(name, "release")):
        raise ConfigError(f"release {name!r}: end it with no '.', and do not call it as a device of Windows")
    _require_class_names(run_model)
    if reduction and cut is not None:
        raise ConfigError(f"{run_model.what}: halves are of the network as it was trained; leave out --{reduction.kind}")
    inputs, parts = make_probes(run_model.model.layers, run_model.example, run_model.what)[0], dict[str, bytes]()
    us = run_model, inputs, parts
    content = _MAKERS[reduction.kind](*us, reduction.max_drop) if reduction else _make_whole(*us)
    probe_tensors: Tree = {"inputs": inputs, "outputs": content.outputs}
    halves = None
    if cut is not None:
        halves, probe_tensors["features"] = _halves(run_model, content.parameters, cut, (inputs, content.outputs), parts)
    manifest = ReleaseManifest(
        name=name,
        version=0,
        created=utc_stamp(),
        model=run_model.plan.model,
        source=run_model.source,
        graph=content.graph,
        halves=halves,
        reduction=content.reduction,
        parameters=_part(content.parameters.data, parts),
        tensors=content.parameters.tensors,
        preprocessing=run_model.preprocessing,
        classes=run_model.classes,
        probes=_part(file.encode(State(probe_tensors)), parts),
        opset=OPSET,
        ir_version=content.ir_version,
        versions=versions() | {package: version(package) for package in ("onnx", "onnxruntime")},
    )
    return publish(data_dir, manifest, parts)


def _require_class_names(run_model: RunModel) -> None:
    """Refuse a network that has more or fewer outputs than its classes have names."""
    outputs = make_probes(run_model.model.layers, run_model.example, run_model.what)[1]
    if fault := describe_class_fault(run_model.classes, outputs.shape):
        raise ConfigError(
            f"{run_model.what}: {fault}: an output without a name, or a name without an output, is a wrong answer; set the "
            f"number of classes in model.options of the plan to {len(run_model.classes)}, or name the classes of all "
            "outputs in data.classes, and train again"
        )


def _make_whole(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes]) -> _Made:
    """Return the network as it was trained."""
    parameters = _encode(run_model.tree)
    with torch.no_grad():
        outputs = run_model.model.layers(inputs)
    graph, ir_version = _graph(run_model, parameters, run_model.model.layers, (INPUT, OUTPUT), (inputs, outputs), parts)
    return _Made(graph, ir_version, parameters, outputs)


def _make_halved(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _Made:
    """Return the network with weights that travel as 16 bits; its graph is that of the network as it was trained."""
    rounded, tree = halved(run_model)
    content, parameters = _make_whole(rounded, inputs, parts), _encode(tree)
    data, names = parts[content.graph.part.sha256], content.graph.parameters
    graphs = [(data, {name: model.tree[name] for name in names}) for model in (run_model, rounded)]
    sizes = len(content.parameters.data), len(parameters.data)
    reduction = compare("float16", graphs, servers_examples(run_model), sizes)
    require_accurate(reduction, max_drop, run_model.what)
    return content._replace(parameters=parameters, reduction=reduction)


def _make_quantized(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _Made:
    """Return the network with weights and activations of 8 bits."""
    examples, before = servers_examples(run_model), dict[str, bytes]()
    original = _make_whole(run_model, inputs, before)
    small = quantize(run_model, examples.calibration)
    parameters = _encode(small.tree)
    data = without_weights(small.graph, parameters.ranges)
    trained = {name: run_model.tree[name] for name in original.graph.parameters}
    graphs = [(before[original.graph.part.sha256], trained), (data, small.tree)]
    reduction = compare("int8", graphs, examples, (len(original.parameters.data), len(parameters.data)))
    require_accurate(reduction, max_drop, run_model.what)
    outputs = torch.from_numpy(run_graph(data, inputs, small.tree))
    part, traced = _part(data, parts), small.graph
    graph = ReleaseGraph(part=part, input=traced.input, output=traced.output, parameters=traced.parameters)
    return _Made(graph, traced.proto.ir_version, parameters, outputs, reduction)


_MAKERS: Mapping[Kind, Callable[[RunModel, Tensor, dict[str, bytes], float], _Made]] = {
    "float16": _make_halved,
    "int8": _make_quantized,
}


def _encode(tree: Tree) -> _Parameters:
    """Return the file of parameters; of one architecture each always lies at the same place of it."""
    data = file.encode(State(tree))
    begin = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "little")
    header = json.loads(data[HEADER_BYTES:begin])
    header.pop("__metadata__")
    ranges = {
        name: ByteRange(PARAMETERS, begin + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
    }
    tensors = tuple(
        ParameterSpec(
            name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]), sha256=sha256_of(_bytes_at(data, ranges[name]))
        )
        for name, entry in sorted(header.items())
    )
    return _Parameters(data, ranges, tensors)


def _bytes_at(data: bytes, byte_range: ByteRange) -> memoryview:
    return memoryview(data)[byte_range.offset : byte_range.offset + byte_range.length]


def _part(data: bytes, parts: dict[str, bytes]) -> ReleasePart:
    """Note some bytes as a part."""
    digest = sha256_of(data)
    parts[digest] = data
    return ReleasePart(sha256=digest, size=len(data))


def _graph(
    run_model: RunModel,
    parameters: _Parameters,
    layers: nn.Module,
    names: tuple[str, str],
    probes: tuple[Tensor, Tensor],
    parts: dict[str, bytes],
) -> tuple[ReleaseGraph, int]:
    """Return the graph of some layers that computes what they do, and the version of its format."""
    example: Sequence[int] = probes[0].shape[1:]
    traced = trace_graph(layers, example, names, run_model.what)
    data = without_weights(traced, parameters.ranges)
    require_parity(data, probes, run_model.what, {name: run_model.tree[name] for name in traced.parameters})
    graph = ReleaseGraph(
        part=_part(data, parts), input=traced.input, output=traced.output, parameters=traced.parameters
    )
    return graph, traced.proto.ir_version


def _halves(
    run_model: RunModel, parameters: _Parameters, cut: int, probes: tuple[Tensor, Tensor], parts: dict[str, bytes]
) -> tuple[SplitHalves, Tensor]:
    """Return the graphs below and above a cut, and what the probes are at it."""
    model, plan_cut = run_model.model, run_model.plan.algorithm.options.get("cut", 0)
    cut = cut or (plan_cut if isinstance(plan_cut, int) else 0) or next(iter(model.cuts), 0)
    below, above = model.below(cut).eval(), model.above(cut).eval()
    with torch.no_grad():
        features = below(probes[0])
    bottom, _ = _graph(run_model, parameters, below, (INPUT, FEATURES), (probes[0], features), parts)
    top, _ = _graph(run_model, parameters, above, (FEATURES, OUTPUT), (features, probes[1]), parts)
    return SplitHalves(cut=cut, bottom=bottom, top=top), features

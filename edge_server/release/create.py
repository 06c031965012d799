"""Create a release from a run's model: ONNX graph, parameters, probes and manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edge_server.journal.runs import read_versions
from edge_server.release.graph import (
    FEATURES,
    INPUT,
    OPSET,
    OUTPUT,
    ByteRange,
    reference_weights,
    require_parity,
    run_graph,
    trace_graph,
)
from edge_server.release.reduce import load_server_examples, measure_reduction, quantize, require_accurate, to_float16
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
"""Largest accepted drop of accuracy of a reduced release, as a share of the examples."""
HEADER_BYTES = 8
"""Size of the length field in front of a safetensors header."""


class _ParameterFile(NamedTuple):
    """A parameter file, the byte range of each parameter in it, and their manifest entries."""

    data: bytes
    ranges: dict[str, ByteRange]
    tensors: tuple[ParameterSpec, ...]


class ReductionOptions(NamedTuple):
    """Requested reduction of a release's size.

    Attributes:
        max_drop: Largest accepted drop of accuracy, as a share of the examples.
    """

    kind: Kind
    max_drop: float = MAX_DROP


class _NetworkParts(NamedTuple):
    """The parts of a release that depend on its reduction.

    Attributes:
        graph: Graph of the uncut network.
        outputs: Network outputs for the probes, of shape (B, ...).
    """

    graph: ReleaseGraph
    ir_version: int
    parameters: _ParameterFile
    outputs: Tensor
    reduction: Reduction | None = None


def create_release(
    run_model: RunModel, data_dir: Path, name: str, cut: int | None = None, reduction: ReductionOptions | None = None
) -> StoredRelease:
    """Create and publish a release of a run's model.

    Args:
        data_dir: Folder of runs; releases are stored in it too.
        name: Name by which applications request the model.
        cut: Index of the model's cut at which to export two halves as well; 0 for the cut of the run, or else the
            model's first; None for no halves.
        reduction: None to release the network as trained.

    Raises:
        ConfigError: The name is invalid, the network cannot be exported or cut there, the folder is not writable, the
            reduced network loses too much accuracy, or the number of outputs differs from that of class names.
        Unwritable: The disk is full.
    """
    if not is_release_name(check_name(name, "release")):
        raise ConfigError(f"release name {name!r} ends with '.' or is a reserved Windows name; choose another name")
    _require_class_names(run_model)
    if reduction and cut is not None:
        raise ConfigError(f"{run_model.what}: --halves needs the unreduced network; leave out --{reduction.kind}")
    inputs, parts = make_probes(run_model.model.layers, run_model.example, run_model.what)[0], dict[str, bytes]()
    content = _export_network(run_model, inputs, parts, reduction)
    probe_tensors: Tree = {"inputs": inputs, "outputs": content.outputs}
    halves = None
    if cut is not None:
        probes = inputs, content.outputs
        halves, probe_tensors["features"] = _export_halves(run_model, content.parameters, cut, probes, parts)
    manifest = ReleaseManifest(
        name=name,
        version=0,
        created=utc_stamp(),
        model=run_model.plan.model.spec,
        source=run_model.source,
        task=run_model.task,
        graph=content.graph,
        halves=halves,
        reduction=content.reduction,
        parameters=_add_part(content.parameters.data, parts),
        tensors=content.parameters.tensors,
        preprocessing=run_model.preprocessing,
        classes=run_model.classes,
        probes=_add_part(file.encode(State(probe_tensors)), parts),
        opset=OPSET,
        ir_version=content.ir_version,
        versions=read_versions() | {package: version(package) for package in ("onnx", "onnxruntime")},
    )
    return publish(data_dir, manifest, parts)


def _require_class_names(run_model: RunModel) -> None:
    """Reject a network whose number of outputs differs from its number of class names."""
    outputs = make_probes(run_model.model.layers, run_model.example, run_model.what)[1]
    if fault := describe_class_fault(run_model.classes, outputs.shape):
        raise ConfigError(
            f"{run_model.what}: {fault}; set the number of classes in model.options of the plan to "
            f"{len(run_model.classes)}, or name the classes of all outputs in data.classes, and train again"
        )


def _export_trained(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes]) -> _NetworkParts:
    """Export the network as trained."""
    parameters, layers = _encode_parameters(run_model.tree), run_model.model.layers
    with torch.no_grad():
        outputs = layers(inputs)
    graph, ir_version = _export_graph(run_model, parameters, layers, (INPUT, OUTPUT), (inputs, outputs), parts)
    return _NetworkParts(graph, ir_version, parameters, outputs)


def _export_float16(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _NetworkParts:
    """Export the network with float16 parameters; its graph equals that of the unreduced network."""
    rounded, tree = to_float16(run_model)
    content, parameters = _export_trained(rounded, inputs, parts), _encode_parameters(tree)
    data, names = parts[content.graph.part.sha256], content.graph.parameters
    graphs = [(data, {name: model.tree[name] for name in names}) for model in (run_model, rounded)]
    sizes = len(content.parameters.data), len(parameters.data)
    reduction = measure_reduction("float16", graphs, load_server_examples(run_model), sizes, run_model.task)
    require_accurate(reduction, max_drop, run_model.what, run_model.task)
    return content._replace(parameters=parameters, reduction=reduction)


def _export_int8(run_model: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _NetworkParts:
    """Export the network with 8-bit weights and activations."""
    examples, before = load_server_examples(run_model), dict[str, bytes]()
    original = _export_trained(run_model, inputs, before)
    small = quantize(run_model, examples.calibration)
    parameters = _encode_parameters(small.tree)
    data = reference_weights(small.graph, parameters.ranges)
    trained = {name: run_model.tree[name] for name in original.graph.parameters}
    graphs = [(before[original.graph.part.sha256], trained), (data, small.tree)]
    sizes = len(original.parameters.data), len(parameters.data)
    reduction = measure_reduction("int8", graphs, examples, sizes, run_model.task)
    require_accurate(reduction, max_drop, run_model.what, run_model.task)
    outputs = torch.from_numpy(run_graph(data, inputs, small.tree))
    part, traced = _add_part(data, parts), small.graph
    graph = ReleaseGraph(part=part, input=traced.input, output=traced.output, parameters=traced.parameters)
    return _NetworkParts(graph, traced.proto.ir_version, parameters, outputs, reduction)


def _export_network(
    run_model: RunModel, inputs: Tensor, parts: dict[str, bytes], reduction: ReductionOptions | None
) -> _NetworkParts:
    if reduction is None:
        return _export_trained(run_model, inputs, parts)
    export = _export_float16 if reduction.kind == "float16" else _export_int8
    return export(run_model, inputs, parts, reduction.max_drop)


def _encode_parameters(tree: Tree) -> _ParameterFile:
    """Encode parameters as a safetensors file; byte ranges depend on the architecture only."""
    data = file.encode(State(tree))
    begin = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "little")
    header = json.loads(data[HEADER_BYTES:begin])
    header.pop("__metadata__")
    offsets = {name: entry["data_offsets"] for name, entry in header.items()}
    ranges = {name: ByteRange(PARAMETERS, begin + start, stop - start) for name, (start, stop) in offsets.items()}
    tensors = tuple(
        ParameterSpec(
            name=name, dtype=item["dtype"], shape=tuple(item["shape"]), sha256=sha256_of(_bytes_at(data, ranges[name]))
        )
        for name, item in sorted(header.items())
    )
    return _ParameterFile(data, ranges, tensors)


def _bytes_at(data: bytes, byte_range: ByteRange) -> memoryview:
    return memoryview(data)[byte_range.offset : byte_range.offset + byte_range.length]


def _add_part(data: bytes, parts: dict[str, bytes]) -> ReleasePart:
    """Add content to the parts and return its digest and size."""
    digest = sha256_of(data)
    parts[digest] = data
    return ReleasePart(sha256=digest, size=len(data))


def _export_graph(
    run_model: RunModel,
    parameters: _ParameterFile,
    layers: nn.Module,
    names: tuple[str, str],
    probes: tuple[Tensor, Tensor],
    parts: dict[str, bytes],
) -> tuple[ReleaseGraph, int]:
    """Export layers as a graph verified against PyTorch; return it and its ONNX IR version."""
    example: Sequence[int] = probes[0].shape[1:]
    traced = trace_graph(layers, example, names, run_model.what)
    data = reference_weights(traced, parameters.ranges)
    require_parity(data, probes, run_model.what, {name: run_model.tree[name] for name in traced.parameters})
    graph = ReleaseGraph(
        part=_add_part(data, parts), input=traced.input, output=traced.output, parameters=traced.parameters
    )
    return graph, traced.proto.ir_version


def _export_halves(
    run_model: RunModel, parameters: _ParameterFile, cut: int, probes: tuple[Tensor, Tensor], parts: dict[str, bytes]
) -> tuple[SplitHalves, Tensor]:
    """Export the graphs below and above a cut; return them and the probes' features at the cut."""
    model, plan_cut = run_model.model, run_model.plan.algorithm.options.get("cut", 0)
    cut = cut or (plan_cut if isinstance(plan_cut, int) else 0) or next(iter(model.cut_places), 0)
    below, above = model.below(cut).eval(), model.above(cut).eval()
    with torch.no_grad():
        features = below(probes[0])
    bottom, _ = _export_graph(run_model, parameters, below, (INPUT, FEATURES), (probes[0], features), parts)
    top, _ = _export_graph(run_model, parameters, above, (FEATURES, OUTPUT), (features, probes[1]), parts)
    return SplitHalves(cut=cut, bottom=bottom, top=top), features

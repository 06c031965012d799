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
    found: RunModel, data_dir: Path, name: str, cut: int | None = None, smaller: Smaller | None = None
) -> StoredRelease:
    """Make a release of a model and keep it.

    Args:
        data_dir: Folder of runs, in which releases lie too.
        name: What applications will call it.
        cut: Where to cut it for two graphs beside the whole one, as the model counts its cuts; 0 for where its run was
            cut, or else its first; None for no halves.
        smaller: What is to make it smaller; None for the network as it was trained.

    Raises:
        ConfigError: The name is none, the network cannot be exported or cut so, or nothing can be written; made
            smaller it is less accurate than it may be; it has more or fewer outputs than class names.
        Unwritable: The disk takes nothing more.
    """
    if not is_release_name(check_name(name, "release")):
        raise ConfigError(f"release {name!r}: end it with no '.', and do not call it as a device of Windows")
    _require_class_names(found)
    if smaller and cut is not None:
        raise ConfigError(f"{found.what}: halves are of the network as it was trained; leave out --{smaller.kind}")
    inputs, parts = make_probes(found.model.layers, found.example, found.what)[0], dict[str, bytes]()
    us = found, inputs, parts
    made = _MAKERS[smaller.kind](*us, smaller.max_drop) if smaller else _make_whole(*us)
    shown: Tree = {"inputs": inputs, "outputs": made.outputs}
    halves = None
    if cut is not None:
        halves, shown["features"] = _halves(found, made.parameters, cut, (inputs, made.outputs), parts)
    manifest = ReleaseManifest(
        name=name,
        version=0,
        created=utc_stamp(),
        model=found.plan.model,
        source=found.source,
        graph=made.graph,
        halves=halves,
        reduction=made.reduction,
        parameters=_part(made.parameters.data, parts),
        tensors=made.parameters.tensors,
        preprocessing=found.preprocessing,
        classes=found.classes,
        probes=_part(file.encode(State(shown)), parts),
        opset=OPSET,
        ir_version=made.ir_version,
        versions=versions() | {one: version(one) for one in ("onnx", "onnxruntime")},
    )
    return publish(data_dir, manifest, parts)


def _require_class_names(found: RunModel) -> None:
    """Refuse a network that has more or fewer outputs than its classes have names."""
    outputs = make_probes(found.model.layers, found.example, found.what)[1]
    if fault := describe_class_fault(found.classes, outputs.shape):
        raise ConfigError(
            f"{found.what}: {fault}: an output without a name, or a name without an output, is a wrong answer; set the "
            f"number of classes in model.options of the plan to {len(found.classes)}, or name the classes of all "
            "outputs in data.classes, and train again"
        )


def _make_whole(found: RunModel, inputs: Tensor, parts: dict[str, bytes]) -> _Made:
    """Return the network as it was trained."""
    parameters = _encode(found.tree)
    with torch.no_grad():
        outputs = found.model.layers(inputs)
    graph, ir_version = _graph(found, parameters, found.model.layers, (INPUT, OUTPUT), (inputs, outputs), parts)
    return _Made(graph, ir_version, parameters, outputs)


def _make_halved(found: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _Made:
    """Return the network with weights that travel as 16 bits; its graph is that of the network as it was trained."""
    rounded, tree = halved(found)
    made, parameters = _make_whole(rounded, inputs, parts), _encode(tree)
    data, names = parts[made.graph.part.sha256], made.graph.parameters
    graphs = [(data, {name: one.tree[name] for name in names}) for one in (found, rounded)]
    sizes = len(made.parameters.data), len(parameters.data)
    told = compare("float16", graphs, servers_examples(found), sizes)
    require_accurate(told, max_drop, found.what)
    return made._replace(parameters=parameters, reduction=told)


def _make_quantized(found: RunModel, inputs: Tensor, parts: dict[str, bytes], max_drop: float) -> _Made:
    """Return the network with weights and activations of 8 bits."""
    examples, before = servers_examples(found), dict[str, bytes]()
    whole = _make_whole(found, inputs, before)
    small = quantize(found, examples.calibration)
    parameters = _encode(small.tree)
    data = without_weights(small.graph, parameters.ranges)
    trained = {name: found.tree[name] for name in whole.graph.parameters}
    graphs = [(before[whole.graph.part.sha256], trained), (data, small.tree)]
    told = compare("int8", graphs, examples, (len(whole.parameters.data), len(parameters.data)))
    require_accurate(told, max_drop, found.what)
    outputs = torch.from_numpy(run_graph(data, inputs, small.tree))
    part, traced = _part(data, parts), small.graph
    graph = ReleaseGraph(part=part, input=traced.input, output=traced.output, parameters=traced.parameters)
    return _Made(graph, traced.proto.ir_version, parameters, outputs, told)


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
        name: ByteRange(PARAMETERS, begin + one["data_offsets"][0], one["data_offsets"][1] - one["data_offsets"][0])
        for name, one in header.items()
    }
    tensors = tuple(
        ParameterSpec(
            name=name, dtype=one["dtype"], shape=tuple(one["shape"]), sha256=sha256_of(_bytes_at(data, ranges[name]))
        )
        for name, one in sorted(header.items())
    )
    return _Parameters(data, ranges, tensors)


def _bytes_at(data: bytes, place: ByteRange) -> memoryview:
    return memoryview(data)[place.offset : place.offset + place.length]


def _part(data: bytes, parts: dict[str, bytes]) -> ReleasePart:
    """Note some bytes as a part."""
    digest = sha256_of(data)
    parts[digest] = data
    return ReleasePart(sha256=digest, size=len(data))


def _graph(
    found: RunModel,
    parameters: _Parameters,
    layers: nn.Module,
    names: tuple[str, str],
    probes: tuple[Tensor, Tensor],
    parts: dict[str, bytes],
) -> tuple[ReleaseGraph, int]:
    """Return the graph of some layers that computes what they do, and the version of its format."""
    example: Sequence[int] = probes[0].shape[1:]
    traced = trace_graph(layers, example, names, found.what)
    data = without_weights(traced, parameters.ranges)
    require_parity(data, probes, found.what, {name: found.tree[name] for name in traced.parameters})
    graph = ReleaseGraph(
        part=_part(data, parts), input=traced.input, output=traced.output, parameters=traced.parameters
    )
    return graph, traced.proto.ir_version


def _halves(
    found: RunModel, parameters: _Parameters, cut: int, probes: tuple[Tensor, Tensor], parts: dict[str, bytes]
) -> tuple[SplitHalves, Tensor]:
    """Return the graphs below and above a cut, and what the probes are at it."""
    model, chosen = found.model, found.plan.algorithm.options.get("cut", 0)
    cut = cut or (chosen if isinstance(chosen, int) else 0) or next(iter(model.cuts), 0)
    below, above = model.below(cut).eval(), model.above(cut).eval()
    with torch.no_grad():
        features = below(probes[0])
    bottom, _ = _graph(found, parameters, below, (INPUT, FEATURES), (probes[0], features), parts)
    top, _ = _graph(found, parameters, above, (FEATURES, OUTPUT), (features, probes[1]), parts)
    return SplitHalves(cut=cut, bottom=bottom, top=top), features

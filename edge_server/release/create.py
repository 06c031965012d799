"""A release made of a run's model: the graph of its architecture, its parameters, probes, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    trace_graph,
    without_weights,
)
from edge_server.release.run_model import RunModel, make_probes
from edge_server.release.store import StoredRelease, publish
from shared.protocol.release import (
    PARAMETERS,
    ParameterSpec,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    SplitHalves,
    sha256_of,
)
from shared.protocol.topics import check_name
from shared.runtime.clock import utc_stamp
from shared.tensors import file
from shared.tensors.tree import State, Tree

HEADER_BYTES = 8
"""Of the length of a safetensors header, which stands before it."""


class _Parameters(NamedTuple):
    """The file of parameters, where each lies in it, and what is said of it."""

    data: bytes
    ranges: dict[str, ByteRange]
    tensors: tuple[ParameterSpec, ...]


def create_release(found: RunModel, data_dir: Path, name: str, cut: int | None = None) -> StoredRelease:
    """Make a release of a model and keep it.

    Args:
        found: The model.
        data_dir: Folder of runs, in which releases lie too.
        name: What applications will call it.
        cut: Where to cut it for two graphs beside the whole one, as the model counts its cuts; 0 for where its run was
            cut, or else its first; None for no halves.

    Raises:
        ConfigError: The name is none, the network cannot be exported or cut so, or nothing can be written.
        Unwritable: The disk takes nothing more.
    """
    check_name(name, "release")
    probes = make_probes(found.model.layers, found.example, found.what)
    parameters, parts = _encode(found.tree), dict[str, bytes]()
    whole, ir_version = _graph(found, parameters, found.model.layers, (INPUT, OUTPUT), probes, parts)
    shown: Tree = {"inputs": probes[0], "outputs": probes[1]}
    halves = None
    if cut is not None:
        halves, shown["features"] = _halves(found, parameters, cut, probes, parts)
    manifest = ReleaseManifest(
        name=name,
        version=0,
        created=utc_stamp(),
        model=found.plan.model,
        source=found.source,
        graph=whole,
        halves=halves,
        parameters=_part(parameters.data, parts),
        tensors=parameters.tensors,
        preprocessing=found.preprocessing,
        classes=found.classes,
        probes=_part(file.encode(State(shown)), parts),
        opset=OPSET,
        ir_version=ir_version,
        versions=versions() | {one: version(one) for one in ("onnx", "onnxruntime")},
    )
    return publish(data_dir, manifest, parts)


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

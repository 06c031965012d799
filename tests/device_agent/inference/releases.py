"""Releases on a board, as small as they may be, and an inference process in memory that serves them.

Light ones are bytes that no ONNX Runtime would read, for what looks at their files alone; linear ones are served by it:
one layer, written without torch, spoilt as a test needs it. Of the process in memory a test sees what is loaded and
what answers, and sets its figures.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from device_agent.inference.messages import Figures
from device_agent.inference.store import BoardStore
from shared.errors import ServingDied, ServingRefused
from shared.protocol.inference.release import (
    GRAPH,
    PARAMETERS,
    PROBES,
    ParameterSpec,
    Preprocessing,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    ReleaseSource,
    TensorSpec,
    sha256_of,
    write_manifest,
)
from shared.protocol.messages import Spec
from shared.protocol.update import NewVersion, UpdateTerms, advance, take_offer

FEATURES, CLASSES, PROBE_COUNT = 4, 2, 10
OPSET, IR_VERSION = 17, 8
EXTERNAL = 1
MOST_VERSIONS = 2


def _part(data: bytes) -> ReleasePart:
    return ReleasePart(sha256=sha256_of(data), size=len(data))


def _manifest(
    of: tuple[str, int],
    model: str,
    graph: ReleaseGraph,
    parameters: ReleasePart,
    probes: ReleasePart,
    tensors: tuple[ParameterSpec, ...] = (),
) -> ReleaseManifest:
    return ReleaseManifest(
        name=of[0],
        version=of[1],
        created="20260101T000000Z",
        model=Spec(name=model),
        source=ReleaseSource(run="run", round=of[1], plan="plan", algorithm=Spec(name="fedavg")),
        graph=graph,
        parameters=parameters,
        tensors=tensors,
        preprocessing=Preprocessing(),
        probes=probes,
        opset=OPSET,
        ir_version=IR_VERSION,
    )


def light_release(name: str, version: int, size: int = 100) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Return a manifest and its parts by their digests; all versions have the graph in common.

    Args:
        version: Of it; gives the parameters.
        size: Of the parameters in bytes.
    """
    content = {
        GRAPH: b"graph of " + name.encode(),
        PARAMETERS: f"{name} {version} ".encode().ljust(size, b"p"),
        PROBES: b"probes",
    }
    parts = {which: _part(data) for which, data in content.items()}
    graph = ReleaseGraph(
        part=parts[GRAPH],
        input=TensorSpec(name="input", dtype="float32", shape=(-1, 4)),
        output=TensorSpec(name="output", dtype="float32", shape=(-1, 2)),
        parameters=(),
    )
    manifest = _manifest((name, version), "mlp", graph, parts[PARAMETERS], parts[PROBES])
    return manifest, {parts[which].sha256: data for which, data in content.items()}


def offer_of(manifest: ReleaseManifest, deployment: str = "", attempt: int = 1, **terms: float) -> NewVersion:
    """Return the offer of a release.

    Args:
        deployment: Its name; empty for one that says the version.
        attempt: From 1.
        **terms: What it must keep to.
    """
    return NewVersion(
        version=manifest.version,
        release=sha256_of(write_manifest(manifest)),
        deployment=deployment or f"to-{manifest.version}",
        attempt=attempt,
        terms=UpdateTerms(**terms),
    )


def _graph(tensors: dict[str, np.ndarray], data: bytes, output: str) -> bytes:
    """Return y = x w + b, its parameters beside it in a file."""
    import onnx  # noqa: PLC0415 - light releases need none
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little")
    initializers = []
    for name, value in tensors.items():
        one = numpy_helper.from_array(value, name)
        one.ClearField("raw_data")
        one.data_location = EXTERNAL
        start, end = header[name]["data_offsets"]
        for key, told in (("location", PARAMETERS), ("offset", begin + start), ("length", end - start)):
            entry = one.external_data.add()
            entry.key, entry.value = key, str(told)
        initializers.append(one)
    features, classes = tensors["w"].shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["h"]), helper.make_node("Add", ["h", "b"], [output])],
        "linear",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", features])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", classes])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(onnx.ModelProto.SerializeToString(model, deterministic=True))


def linear_release(
    version: int, w: Any = None, *, output: str = "output", outputs: Any = None, name: str = "points"
) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Return a manifest and its parts by their digests.

    Args:
        w: Weights of shape (features, classes); None for some that tell two classes apart by the first feature.
        output: What its graph calls its output.
        outputs: Of the probes, shape (10, classes); None for those that it computes.
    """
    if w is None:
        w = np.zeros((FEATURES, CLASSES))
        w[0] = -1.0, 1.0
    tensors = {"b": np.full(np.shape(w)[1], version / 1024, np.float32), "w": np.asarray(w, np.float32)}
    data = save(tensors)
    inputs = np.random.default_rng(1).standard_normal((PROBE_COUNT, len(tensors["w"])), np.float32)
    with np.errstate(all="ignore"):
        expected = inputs @ tensors["w"] + tensors["b"] if outputs is None else np.asarray(outputs, np.float32)
    graph = _graph(tensors, data, output)
    probes = save({"inputs": inputs, "outputs": expected})
    specs = tuple(
        ParameterSpec(name=key, dtype="F32", shape=one.shape, sha256=sha256_of(one.tobytes()))
        for key, one in sorted(tensors.items())
    )
    whole = ReleaseGraph(
        part=_part(graph),
        input=TensorSpec(name="input", dtype="float32", shape=(-1, len(tensors["w"]))),
        output=TensorSpec(name=output, dtype="float32", shape=(-1, len(tensors["b"]))),
        parameters=("w", "b"),
    )
    manifest = _manifest((name, version), "linear", whole, _part(data), _part(probes), specs)
    return manifest, {sha256_of(one): one for one in (graph, data, probes)}


def put(folder: Path, made: tuple[ReleaseManifest, dict[str, bytes]], *, committed: bool = False) -> BoardStore:
    """Put a release on a board as one that was fetched, or that answers there; return the board's store.

    Args:
        committed: Whether it answers there.
    """
    manifest, parts = made
    store = BoardStore(folder, reserve_bytes=0)
    record = take_offer(store.record(manifest.name), offer_of(manifest), 0.0)
    store.write(record, write_manifest(manifest))
    for digest, data in parts.items():
        store.parts.add(digest, data)
    for event in ("fetched", "verified", "staged", "switched", "passed") if committed else ("fetched",):
        record = advance(record, event, 0.0)  # type: ignore[arg-type]
    store.write(record)
    return store


def damaged(made: tuple[ReleaseManifest, dict[str, bytes]], part: str) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Return a release with a part that is a byte short, and has that digest.

    Args:
        part: As its folder calls it: `graph`, `parameters` or `probes`.
    """
    manifest, parts = made
    was = manifest.graph.part if part == "graph" else getattr(manifest, part)
    data = parts[was.sha256][:-1]
    short = _part(data)
    change = {"graph": msgspec.structs.replace(manifest.graph, part=short)} if part == "graph" else {part: short}
    return msgspec.structs.replace(manifest, **change), {**parts, short.sha256: data}


@dataclass
class MemoryServing:
    """Serves names.

    Attributes:
        current: What answers, by name.
        refused: Versions that it cannot load.
        dying: How often it dies yet of what it is asked.
        asked: All that it was asked, in order.
    """

    starts: int = 1
    loaded: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    current: dict[str, int] = field(default_factory=dict)
    figures_of: dict[int, Figures] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    dying: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)

    def _hear(self, what: str, version: int) -> None:
        self.asked.append((what, version))
        if self.dying:
            self.dying -= 1
            self.starts += 1
            raise ServingDied("the inference process ended")

    async def load(self, name: str, version: int) -> None:
        self._hear("load", version)
        if version in self.refused:
            raise ServingRefused("it has no room for it")
        self.loaded[name].add(version)
        assert len(self.loaded[name]) <= MOST_VERSIONS

    async def switch(self, name: str, version: int) -> None:
        self._hear("switch", version)
        self._require(name, version)
        self.current[name] = version

    async def unload(self, name: str, version: int) -> None:
        self._hear("unload", version)
        self.loaded[name].discard(version)
        if self.current.get(name) == version:
            del self.current[name]

    async def figures(self, name: str, version: int) -> Figures:
        self._require(name, version)
        return self.figures_of.get(version, Figures(name, version))

    def _require(self, name: str, version: int) -> None:
        if version not in self.loaded[name]:
            raise ServingRefused(f"version {version} of {name} is not loaded")

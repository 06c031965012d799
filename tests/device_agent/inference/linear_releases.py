"""Releases that ONNX Runtime serves, of one linear layer: written without torch, spoilt as a test needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from device_agent.inference.store import BoardStore
from shared.protocol.inference.release import (
    PARAMETERS,
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
from shared.protocol.update import advance, take_offer
from tests.device_agent.inference.light_releases import offer_of

FEATURES, CLASSES, PROBES = 4, 2, 10
OPSET, IR_VERSION = 17, 8
EXTERNAL = 1


def _graph(tensors: dict[str, np.ndarray], data: bytes, output: str) -> bytes:
    """Return y = x w + b, its parameters beside it in a file."""
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
        version: Of it.
        w: Weights of shape (features, classes); None for some that tell two classes apart by the first feature.
        output: What its graph calls its output.
        outputs: Of the probes, shape (10, classes); None for those that it computes.
        name: Of the release.
    """
    if w is None:
        w = np.zeros((FEATURES, CLASSES))
        w[0] = -1.0, 1.0
    tensors = {"b": np.full(np.shape(w)[1], version / 1024, np.float32), "w": np.asarray(w, np.float32)}
    data = save(tensors)
    inputs = np.random.default_rng(1).standard_normal((PROBES, len(tensors["w"])), np.float32)
    with np.errstate(all="ignore"):
        expected = inputs @ tensors["w"] + tensors["b"] if outputs is None else np.asarray(outputs, np.float32)
    graph = _graph(tensors, data, output)
    probes = save({"inputs": inputs, "outputs": expected})
    specs = tuple(
        ParameterSpec(name=key, dtype="F32", shape=one.shape, sha256=sha256_of(one.tobytes()))
        for key, one in sorted(tensors.items())
    )
    manifest = ReleaseManifest(
        name=name,
        version=version,
        created="20260101T000000Z",
        model=Spec(name="linear"),
        source=ReleaseSource(run="run", round=version, plan="plan", algorithm=Spec(name="fedavg")),
        graph=ReleaseGraph(
            part=ReleasePart(sha256=sha256_of(graph), size=len(graph)),
            input=TensorSpec(name="input", dtype="float32", shape=(-1, len(tensors["w"]))),
            output=TensorSpec(name=output, dtype="float32", shape=(-1, len(tensors["b"]))),
            parameters=("w", "b"),
        ),
        parameters=ReleasePart(sha256=sha256_of(data), size=len(data)),
        tensors=specs,
        preprocessing=Preprocessing(),
        probes=ReleasePart(sha256=sha256_of(probes), size=len(probes)),
        opset=OPSET,
        ir_version=IR_VERSION,
    )
    return manifest, {sha256_of(one): one for one in (graph, data, probes)}


def put(folder: Path, made: tuple[ReleaseManifest, dict[str, bytes]], *, committed: bool = False) -> BoardStore:
    """Put a release on a board as one that was fetched, or that answers there; return the board's store.

    Args:
        folder: The board's.
        made: The release.
        committed: Whether it answers there.
    """
    manifest, parts = made
    store = BoardStore(folder, reserve_bytes=0)
    record = take_offer(store.record(manifest.name), offer_of(manifest), 0.0)
    store.write(record, write_manifest(manifest))
    for digest, data in parts.items():
        store.add(digest, data)
    for event in ("fetched", "verified", "staged", "switched", "passed") if committed else ("fetched",):
        record = advance(record, event, 0.0)  # type: ignore[arg-type]
    store.write(record)
    return store


def damaged(made: tuple[ReleaseManifest, dict[str, bytes]], part: str) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Return a release with a part that is a byte short, and has that digest.

    Args:
        made: The release.
        part: As its folder calls it: `graph`, `parameters` or `probes`.
    """
    manifest, parts = made
    was = manifest.graph.part if part == "graph" else getattr(manifest, part)
    data = parts[was.sha256][:-1]
    short = ReleasePart(sha256=sha256_of(data), size=len(data))
    change = {"graph": msgspec.structs.replace(manifest.graph, part=short)} if part == "graph" else {part: short}
    return msgspec.structs.replace(manifest, **change), {**parts, short.sha256: data}

"""Runs whose models are exported, of any network; releases of them, with halves, or changed after they were made.

A run is a journal and checkpoints, written as a server writes them. The lower half of a release is opened by ONNX
Runtime, as an application's board runs it. Of a changed release every digest holds, and only a look finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.numpy import load, load_file, save

from device_agent.inference.collaborative.interface import Half
from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Origin, SqliteStore
from edge_server.journal.records import RoundClosed, RunClosed, RunOpened
from edge_server.journal.runs import FOLDER, StoredRun, find_run
from edge_server.plan.plan import Plan
from edge_server.plan.sections import Chosen
from edge_server.release.create import create_release
from edge_server.release.run_model import read_model
from edge_server.release.store import StoredRelease, publish
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.inference.release import ReleasePart, sha256_of
from shared.protocol.messages import LOSSLESS, Spec
from shared.tensors import feature_codec
from shared.tensors.tree import State, Tree

RUN = "tiny-20260101T000000Z-aaaa"
TINY = {
    "alexnet": {"width": 0.1, "hidden": 16},
    "cnn": {"width": 2, "hidden": 8},
    "cnn1d": {"width": 2, "hidden": 8},
    "mlp": {"hidden": 4},
    "mobilenet_v3_small": {"side": 32, "width": 0.1, "classes": 10},
    "resnet20": {"width": 2},
    "unet": {"side": 16, "width": 4, "depth": 2},
    "vgg13": {"width": 0.05},
    "vgg16": {"width": 0.05},
    "vgg19": {"width": 0.05},
}
"""Options that make built-in networks small."""
ACCURACIES = {1: 0.5, 2: 0.875, 3: 0.75}


def trained(model: Spec, seed: int) -> Tree:
    """Return leaves as training might leave them: no two alike, variances above zero."""
    generator = torch.Generator().manual_seed(seed)
    tree = build_initial(model, seed).tree()
    for name, leaf in tree.items():
        if name.endswith("running_var"):
            leaf.copy_(torch.rand(leaf.shape, generator=generator) + 0.5)
        elif leaf.is_floating_point():
            leaf.add_(torch.randn(leaf.shape, generator=generator), alpha=0.1)
    return tree


def leave_run(
    folder: Path, name: str, *, run: str = RUN, seed: int = 1, more: Tree | None = None, **sections: object
) -> StoredRun:
    """Leave a finished run of three rounds, of which the second was the most accurate.

    Args:
        name: The network, made small by `TINY`.
        more: Leaves of the server's state beside these, or in their place.
    """
    model = Chosen(name=name, options=TINY.get(name, {}))
    plan = Plan(**{"name": "tiny", "rounds": 3, "algorithm": Chosen(name="fedavg"), "model": model, **sections})
    store = SqliteStore(folder / run, durable=False)
    store.append(RunOpened(run=run, plan=plan, started=run[5:21]))
    for number, accuracy in ACCURACIES.items():
        tree = {**trained(plan.model, seed + number), **(more or {})}
        origin = Origin(run, number, 0)
        checkpoints.save(folder / run / FOLDER, number, State(tree), durable=False, origin=origin, best=2)
        store.append(RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=1.0, accuracy=accuracy))
    store.append(RunClosed(outcome="finished"))
    store.close()
    return find_run(folder, run)


def release_with_halves(folder: Path, network: str = "mlp", *, cut: int = 0, name: str = "digits", seed: int = 1):
    """Return a release of a tiny network, cut where the network has its first cut unless told.

    Args:
        cut: As the network counts its cuts.
    """
    run = leave_run(folder, network, run=f"{name}-20260101T00000{seed}Z-aaaa", seed=seed)
    return create_release(read_model(run), folder, name, cut)


@dataclass
class LowerHalf:
    """A release as a device serves it, with the probes that tell what its outputs are to be."""

    half: Half
    session: Any
    inputs: np.ndarray
    outputs: np.ndarray
    feature_shape: tuple[int, ...]

    @classmethod
    def of(cls, stored: StoredRelease) -> LowerHalf:
        """Open the lower half of a release."""
        import onnxruntime  # noqa: PLC0415 - most who leave runs need none

        manifest = stored.manifest
        graph = manifest.halves.bottom
        parameters = load_file(stored.path(manifest.parameters.sha256))
        bound = [onnxruntime.OrtValue.ortvalue_from_numpy(parameters[one]) for one in graph.parameters]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        if bound:
            options.add_external_initializers(list(graph.parameters), bound)
        data = stored.path(graph.part.sha256).read_bytes()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        probes = load_file(stored.path(manifest.probes.sha256))
        half = Half(manifest.name, manifest.version, bytes.fromhex(manifest.parameters.sha256))
        return cls(half, session, probes["inputs"], probes["outputs"], tuple(graph.output.shape))

    def features(self, count: int = 1, codec: Spec = LOSSLESS) -> list[memoryview]:
        """Return the payload of the first probes' features."""
        [found] = self.session.run(["features"], {"input": self.inputs[:count]})
        return payload.pack(feature_codec.encode_features("features", found, codec))

    def error(self, outputs: bytes, count: int = 1) -> float:
        """Return how far outputs are from PyTorch's, as a share of the largest."""
        found = payload.unpack(memoryview(outputs)).blobs["output"]
        values = np.frombuffer(found.data, "<f4").reshape(found.shape)
        expected = self.outputs[:count]
        assert values.shape == expected.shape
        return float(np.abs(values - expected).max() / np.abs(expected).max())


HEAD_BYTES = 8


def publish_changed(
    data_dir: Path,
    stored: StoredRelease,
    parameters: Callable[[np.ndarray], None],
    probes: Callable[[np.ndarray], np.ndarray] = lambda outputs: outputs,
) -> StoredRelease:
    """Keep a release that differs from another one in its parameters; return it.

    Args:
        parameters: Changes each tensor of 32-bit floats in its place.
        probes: Returns what the outputs of the probes are then.
    """
    manifest = stored.manifest
    parts = {part.sha256: stored.path(part.sha256).read_bytes() for part in manifest.parts.values()}
    data = bytearray(parts[manifest.parameters.sha256])
    begin = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "little")
    header = json.loads(data[HEAD_BYTES:begin])
    specs = []
    for spec in manifest.tensors:
        first, last = (begin + offset for offset in header[spec.name]["data_offsets"])
        if spec.dtype == "F32":
            parameters(np.frombuffer(memoryview(data)[first:last], np.float32).reshape(spec.shape))
        specs.append(msgspec.structs.replace(spec, sha256=sha256_of(bytes(data[first:last]))))
    shown = load(parts[manifest.probes.sha256])
    shown["outputs"] = np.ascontiguousarray(probes(shown["outputs"]))
    changed = {"parameters": bytes(data), "probes": save(shown)}
    parts |= {sha256_of(one): one for one in changed.values()}
    told = {name: ReleasePart(sha256=sha256_of(one), size=len(one)) for name, one in changed.items()}
    draft = msgspec.structs.replace(manifest, tensors=tuple(specs), **told)
    return publish(data_dir, draft, {part.sha256: parts[part.sha256] for part in draft.parts.values()})

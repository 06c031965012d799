"""Releases with halves, and a device's own: the lower half by ONNX Runtime, as an application's board runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from safetensors.numpy import load_file

from device_agent.inference.collaborative.interface import Half
from edge_server.release.create import create_release
from edge_server.release.run_model import read_model
from edge_server.release.store import StoredRelease
from shared.protocol import payload
from shared.protocol.messages import LOSSLESS, Spec
from shared.tensors import feature_codec
from tests.edge_server.release.runs import leave_run


def release_with_halves(folder: Path, network: str = "mlp", *, cut: int = 0, name: str = "digits", seed: int = 1):
    """Return a release of a tiny network, cut where the network has its first cut unless told.

    Args:
        folder: Of runs.
        network: Its name.
        cut: As the network counts its cuts.
        name: Of the release.
        seed: Of its parameters.
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
        return payload.pack(feature_codec.encode("features", found, codec))

    def error(self, outputs: bytes, count: int = 1) -> float:
        """Return how far outputs are from PyTorch's, as a share of the largest."""
        found = payload.unpack(memoryview(outputs)).blobs["output"]
        values = np.frombuffer(found.data, "<f4").reshape(found.shape)
        expected = self.outputs[:count]
        assert values.shape == expected.shape
        return float(np.abs(values - expected).max() / np.abs(expected).max())

"""Releases whose parameters were changed after they were made, so that every digest holds and only a look finds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load, save

from edge_server.release.store import StoredRelease, publish
from shared.protocol.inference.release import ReleasePart, sha256_of

HEAD_BYTES = 8


def publish_changed(
    data_dir: Path,
    stored: StoredRelease,
    parameters: Callable[[np.ndarray], None],
    probes: Callable[[np.ndarray], np.ndarray] = lambda outputs: outputs,
) -> StoredRelease:
    """Keep a release that differs from another one in its parameters; return it.

    Args:
        data_dir: Folder of runs.
        stored: The other one.
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

"""Releases as small as they may be, of bytes that no ONNX Runtime would read: for what looks at their files alone."""

from __future__ import annotations

from shared.protocol.inference.release import (
    GRAPH,
    PARAMETERS,
    PROBES,
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
from shared.protocol.update import NewVersion, UpdateTerms


def light_release(name: str, version: int, size: int = 100) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Return a manifest and its parts by their digests; all versions have the graph in common.

    Args:
        name: Of the release.
        version: Of it; gives the parameters.
        size: Of the parameters in bytes.
    """
    content = {
        GRAPH: b"graph of " + name.encode(),
        PARAMETERS: f"{name} {version} ".encode().ljust(size, b"p"),
        PROBES: b"probes",
    }
    parts = {which: ReleasePart(sha256=sha256_of(data), size=len(data)) for which, data in content.items()}
    manifest = ReleaseManifest(
        name=name,
        version=version,
        created="20260101T000000Z",
        model=Spec(name="mlp"),
        source=ReleaseSource(run="run", round=version, plan="plan", algorithm=Spec(name="fedavg")),
        graph=ReleaseGraph(
            part=parts[GRAPH],
            input=TensorSpec(name="input", dtype="float32", shape=(-1, 4)),
            output=TensorSpec(name="output", dtype="float32", shape=(-1, 2)),
            parameters=(),
        ),
        parameters=parts[PARAMETERS],
        tensors=(),
        preprocessing=Preprocessing(),
        probes=parts[PROBES],
        opset=17,
        ir_version=8,
    )
    return manifest, {parts[which].sha256: data for which, data in content.items()}


def offer_of(manifest: ReleaseManifest, deployment: str = "", attempt: int = 1, **terms: float) -> NewVersion:
    """Return the offer of a release.

    Args:
        manifest: Of the release.
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

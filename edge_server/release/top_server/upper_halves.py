"""LRU cache of ONNX Runtime sessions for the server's parts of split releases.

Torch is not imported: without it, the service starts in a second and takes a fifth of the memory. A half is bound by
name to its own parameters only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from safetensors import safe_open

from edge_server.release.store import StoredRelease, find_release, verify
from shared.errors import ConfigError, CorruptFile, WireError, first_line
from shared.protocol import payload
from shared.protocol.inference.collaborative import MAX_OUTPUT_BYTES, TopRequest
from shared.protocol.inference.onnx_graph import require_no_files
from shared.protocol.inference.release import ReleaseGraph
from shared.protocol.messages import LOSSLESS
from shared.runtime.bounded_run import bounded_run
from shared.tensors import feature_codec

log = logging.getLogger(__name__)

MAX_KNOWN = 64
"""Limit of cached manifests."""
VALUE_BYTES = 4
ERROR_LOG_LEVEL = 3
"""Severity level of ONNX Runtime's logger."""


class _OpenHalf(NamedTuple):
    """A session with its bound parameters, which must outlive it."""

    graph: ReleaseGraph
    session: Any
    bound: list[Any]


@dataclass
class UpperHalves:
    """The upper halves of a site's releases.

    Attributes:
        data_dir: Folder of runs; releases are stored in it too.
        threads: ONNX Runtime threads for a request; requests run one at a time.
        most_open: Limit of open sessions; the least recently used one is closed.
        most_bytes: Size limit of a request's features, decoded to float32.
    """

    data_dir: Path
    threads: int
    most_open: int
    most_bytes: int

    def __post_init__(self) -> None:
        """Create empty caches."""
        self._releases: OrderedDict[tuple[str, int], StoredRelease] = OrderedDict()
        self._halves: OrderedDict[tuple[str, int], _OpenHalf] = OrderedDict()

    def require_release(self, request: TopRequest) -> None:
        """Reject a request for which no half exists; may read a manifest from disk.

        Raises:
            WireError: The release does not exist or has no halves, or the device's half has different parameters.
        """
        key = request.name, request.version
        if key not in self._releases:
            self._releases[key] = self._find(request)
        self._releases.move_to_end(key)
        if len(self._releases) > MAX_KNOWN:
            self._releases.popitem(last=False)
        manifest = self._releases[key].manifest
        if manifest.parameters.sha256 != request.parameters.hex():
            raise WireError(
                f"release {manifest.reference}: parameters of server and device differ", reason="other-release"
            )

    def _find(self, request: TopRequest) -> StoredRelease:
        reference = f"{request.name}/{request.version}"
        try:
            release = find_release(self.data_dir, reference)
        except (ConfigError, CorruptFile, OSError) as error:
            log.debug("%s", error)
            raise WireError(f"no usable release {reference} on the server", reason="unknown-release") from error
        if release.manifest.halves is None:
            raise WireError(
                f"release {reference} has no halves: create it again with `edge-server release create --halves`",
                reason="unknown-release",
            )
        return release

    def run(self, request: TopRequest, data: memoryview) -> bytes:
        """Run the upper half on a request's features and return the encoded outputs; blocks.

        Args:
            request: A request that passed `require_release`.
            data: Encoded features of the request.

        Raises:
            WireError: The features are damaged or of the wrong shape, the outputs are not finite or too large, or the
                half cannot be opened or run.
        """
        half = self._open_half(request)
        features = feature_codec.decode_features(payload.unpack(data), half.graph.input, self.most_bytes // VALUE_BYTES)
        name = half.graph.output.name
        try:
            what = f"upper half of release {request.name}/{request.version}"
            [outputs] = bounded_run(half.session, [name], {half.graph.input.name: features}, what)
        except Exception as error:
            raise WireError(f"ONNX Runtime cannot run the upper half: {first_line(error)}", reason="failed") from error
        if not np.isfinite(outputs).all():
            raise WireError("the outputs are not finite numbers", reason="not-finite")
        if outputs.nbytes + payload.ALIGN > MAX_OUTPUT_BYTES // 2:
            raise WireError(f"outputs of {outputs.nbytes} bytes: ask for fewer examples at once", reason="oversized")
        return b"".join(payload.pack(feature_codec.encode_features(name, outputs, LOSSLESS)))

    def _open_half(self, request: TopRequest) -> _OpenHalf:
        key = request.name, request.version
        if key not in self._halves:
            try:
                self._halves[key] = self._load(self._releases.get(key) or self._find(request))
            except (ConfigError, CorruptFile, OSError) as error:
                self._releases.pop(key, None)
                name, version = key
                log.warning("release %s/%d cannot be served: %s", name, version, error)
                raise WireError(f"release {name}/{version} cannot be served", reason="unknown-release") from error
            if len(self._halves) > self.most_open:
                self._halves.popitem(last=False)
        self._halves.move_to_end(key)
        return self._halves[key]

    def _load(self, stored: StoredRelease) -> _OpenHalf:
        """Verify a release's parts and open its upper half.

        Raises:
            CorruptFile: A part is damaged, or ONNX Runtime rejects the graph.
        """
        verify(stored)
        manifest = stored.manifest
        assert manifest.halves
        graph = manifest.halves.top
        with safe_open(stored.path(manifest.parameters.sha256), framework="numpy") as parameters:
            arrays = [parameters.get_tensor(name) for name in graph.parameters]
        bound = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = ERROR_LOG_LEVEL
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads must not spin
        if bound:
            options.add_external_initializers(list(graph.parameters), bound)
        try:
            data = stored.path(graph.part.sha256).read_bytes()
            require_no_files(data, graph.parameters, f"release {manifest.reference}")
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except (OSError, CorruptFile):
            raise
        except Exception as error:  # errors of its C++ code share no base class
            raise CorruptFile(
                f"release {manifest.reference}: ONNX Runtime cannot open its upper half: {first_line(error)}"
            ) from error
        log.info("serving the upper half of %s, cut %d", manifest.reference, manifest.halves.cut)
        return _OpenHalf(graph, session, [*bound, *arrays])

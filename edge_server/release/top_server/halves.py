"""Upper halves of releases by ONNX Runtime: each opened when it is first asked for, a few of them at a time.

No torch: a process that only serves starts in a second and takes a fifth of the memory. A half is bound to its
parameters by name, and only to those that it has.
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
from shared.errors import ConfigError, CorruptFile, WireError
from shared.protocol import payload
from shared.protocol.inference.collaborative import MAX_OUTPUT_BYTES, TopRequest
from shared.protocol.inference.onnx_graph import require_no_files
from shared.protocol.inference.release import ReleaseGraph
from shared.protocol.messages import LOSSLESS
from shared.runtime.bounded_run import bounded_run
from shared.tensors import feature_codec

log = logging.getLogger(__name__)

MOST_KNOWN = 64
"""Releases of which it is remembered what they are."""
VALUE_BYTES = 4
ERRORS_ALONE = 3
"""Level of ONNX Runtime's own log."""


class _OpenHalf(NamedTuple):
    """A session, and what it is bound to, which must live as long."""

    graph: ReleaseGraph
    session: Any
    bound: list[Any]


@dataclass
class Halves:
    """The upper halves of a site's releases.

    Attributes:
        data_dir: Folder of runs, in which releases lie too.
        threads: Of ONNX Runtime, for one request; it works on one at a time.
        most_open: Sessions that are kept; the one that was asked longest ago makes way.
        most_bytes: Of the features of a request, as float32 numbers.
    """

    data_dir: Path
    threads: int
    most_open: int
    most_bytes: int

    def __post_init__(self) -> None:
        """Begin with nothing open."""
        self._known: OrderedDict[tuple[str, int], StoredRelease] = OrderedDict()
        self._open: OrderedDict[tuple[str, int], _OpenHalf] = OrderedDict()

    def require(self, request: TopRequest) -> None:
        """Refuse a request that no half here can serve; it may read a manifest from the disk.

        Raises:
            WireError: There is no such release, it has no halves, or the device's half has other parameters.
        """
        key = request.name, request.version
        if key not in self._known:
            self._known[key] = self._find(request)
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        manifest = self._known[key].manifest
        if manifest.parameters.sha256 != request.parameters.hex():
            raise WireError(
                f"release {manifest.reference} has other parameters here than on the device", reason="other-release"
            )

    def _find(self, request: TopRequest) -> StoredRelease:
        reference = f"{request.name}/{request.version}"
        try:
            release = find_release(self.data_dir, reference)
        except (ConfigError, CorruptFile, OSError) as error:
            log.debug("%s", error)
            raise WireError(f"no release {reference} here that can be served", reason="unknown-release") from error
        if release.manifest.halves is None:
            raise WireError(
                f"release {reference} has no halves: `edge-server release create --halves` makes one that has",
                reason="unknown-release",
            )
        return release

    def run(self, request: TopRequest, data: memoryview) -> bytes:
        """Return the outputs of a request that was `require`d, as a payload in one piece; blocks.

        Args:
            data: The payload of its features.

        Raises:
            WireError: The features are damaged or not what the half takes, its outputs are no finite numbers or too
                many, or it cannot be opened or run.
        """
        half = self._opened(request)
        features = feature_codec.decode(payload.unpack(data), half.graph.input, self.most_bytes // VALUE_BYTES)
        name = half.graph.output.name
        try:
            what = f"upper half of release {request.name}/{request.version}"
            [outputs] = bounded_run(half.session, [name], {half.graph.input.name: features}, what)
        except Exception as error:
            problem = str(error).partition("\n")[0]
            raise WireError(f"ONNX Runtime does not run it: {problem}", reason="failed") from error
        if not np.isfinite(outputs).all():
            raise WireError("the outputs are no finite numbers", reason="not-finite")
        if outputs.nbytes + payload.ALIGN > MAX_OUTPUT_BYTES // 2:
            raise WireError(f"outputs of {outputs.nbytes} bytes: ask for fewer examples at once", reason="oversized")
        return b"".join(payload.pack(feature_codec.encode(name, outputs, LOSSLESS)))

    def _opened(self, request: TopRequest) -> _OpenHalf:
        key = request.name, request.version
        if key not in self._open:
            try:
                self._open[key] = self._load(self._known.get(key) or self._find(request))
            except (ConfigError, CorruptFile, OSError) as error:
                self._known.pop(key, None)
                log.warning("release %s/%d cannot be served: %s", *key, error)
                raise WireError(f"release {key[0]}/{key[1]} cannot be served", reason="unknown-release") from error
            if len(self._open) > self.most_open:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        return self._open[key]

    def _load(self, stored: StoredRelease) -> _OpenHalf:
        """Return the upper half of a release, whose parts are checked by their digests.

        Raises:
            CorruptFile: A part is damaged, or ONNX Runtime does not take the graph.
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
        options.log_severity_level = ERRORS_ALONE
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # between requests nothing is computed
        if bound:
            options.add_external_initializers(list(graph.parameters), bound)
        try:
            data = stored.path(graph.part.sha256).read_bytes()
            require_no_files(data, graph.parameters, f"release {manifest.reference}")
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except (OSError, CorruptFile):
            raise
        except Exception as error:  # of its C++ code, by no common class
            problem = str(error).partition("\n")[0]
            raise CorruptFile(f"release {manifest.reference}: ONNX Runtime does not open its top: {problem}") from error
        log.info("serves the upper half of %s, cut %d", manifest.reference, manifest.halves.cut)
        return _OpenHalf(graph, session, [*bound, *arrays])

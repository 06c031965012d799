"""Registry of served models: loaded versions, the active version, and statistics.

A request picks its version once, at its start, and finishes on it even if another version is activated meanwhile.
A switch is a single assignment.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from device_agent.inference.messages import Figures, compute_percentiles
from device_agent.inference.session import OpenModel
from shared.errors import InferenceRefused, ServingRefused, first_line
from shared.protocol.inference.release import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from device_agent.inference.collaborative.cut_model import CutAnswer, CutModel

MAX_SAMPLES = 1024
CUT_FIGURES, CUT_SECONDS = ("answered", "refused", "bytes_up", "bytes_down"), ("device_s", "link_s", "server_s")
NOT_FINITE = "not-finite"
MODEL_FAULTS = (NOT_FINITE, "failed")
"""Reasons of a refusal that count against the model, not the link to the server."""
MAX_VERSIONS = 2
"""Versions of a model loaded at once: each takes twice the memory of its weights."""


@dataclass
class ServedVersion:
    """A loaded version of a model and its request statistics.

    Attributes:
        requests: Requests received, failed ones included.
        errors: Requests that the model failed.
        non_finite: Errors with NaN or infinite outputs.
        seconds: Durations of the latest requests: ONNX Runtime's time alone, or the device's part of a split model.
        cut: Runs the upper half on the server; None if `model` is the whole network.
    """

    model: OpenModel
    requests: int = 0
    errors: int = 0
    non_finite: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    cut: CutModel | None = None

    @property
    def output(self) -> TensorSpec:
        """Output tensor that applications receive."""
        return self.cut.output if self.cut else self.model.output

    def run(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the outputs for a batch.

        Args:
            inputs: Shape (B, ...), with the input's dtype.

        Raises:
            ServingRefused: The model failed on valid inputs.
            ValueError: Inputs and outputs hold NaN or infinite values.
        """
        self.requests += 1
        began = time.perf_counter()
        try:
            outputs = self.model.run(inputs)
        except ServingRefused:
            self.errors += 1
            raise
        except Exception as error:  # errors of ONNX Runtime's C++ code have no common class
            self.errors += 1
            raise ServingRefused(f"the model failed: {first_line(error)}") from error
        self.seconds.append(time.perf_counter() - began)
        if False in np.isfinite(outputs).tobytes():  # three times as fast as `.all()` on few outputs
            if not np.isfinite(inputs).all():
                raise ValueError("the input contains NaN or infinite numbers")
            self.errors += 1
            self.non_finite += 1
            raise ServingRefused("the model's output contains NaN or infinite numbers")
        return outputs

    async def run_cut(self, cut: CutModel, inputs: NDArray[Any]) -> CutAnswer:
        """Return the outputs of a split model for a batch.

        An unreachable server does not count as an error of the model.

        Args:
            inputs: Shape (B, ...), with the input's dtype.

        Raises:
            Unreachable: See `CutModel`.
            InferenceRefused: See `CutModel`.
        """
        self.requests += 1
        try:
            answer = await cut(inputs)
        except InferenceRefused as error:
            if error.reason in MODEL_FAULTS and np.isfinite(inputs).all():
                self.errors += 1
                self.non_finite += error.reason == NOT_FINITE
            raise
        self.seconds.append(answer.parts.device_s)
        return answer

    def figures(self) -> Figures:
        """Return the statistics of this version."""
        name, version = self.model.manifest.name, self.model.manifest.version
        p50, p95, p99 = compute_percentiles(self.seconds, (0.5, 0.95, 0.99))
        return Figures(name, version, self.requests, self.errors, self.non_finite, p50_s=p50, p95_s=p95, p99_s=p99)


def describe_statistics(served: ServedVersion) -> dict[str, Any]:
    """Return a version's statistics in the layout of Triton's statistics extension, plus the parts of a split model."""
    figures, cut = served.figures(), served.cut
    about: dict[str, Any] = {name: getattr(figures, name) for name in ("errors", "p50_s", "p95_s", "p99_s")}
    if served.model.own_model:
        about["own_model"] = served.model.own_model
    if cut:
        parts: dict[str, Any] = {name: getattr(cut.figures, name) for name in CUT_FIGURES}
        for name in CUT_SECONDS:
            p50, p95, p99 = compute_percentiles(
                [getattr(request, name) for request in cut.figures.recent], (0.5, 0.95, 0.99)
            )
            parts[name] = {"p50": p50, "p95": p95, "p99": p99}
        about["cut"] = parts
    return {
        "name": figures.name,
        "version": str(figures.version),
        "inference_count": figures.requests - figures.errors,
        "parameters": about,
    }


class ServedModels:
    """Loaded versions of all models."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, ServedVersion]] = {}
        self._current: dict[str, ServedVersion] = {}

    def names(self) -> list[str]:
        """Return the models that have an active version, sorted."""
        return sorted(self._current)

    def versions(self, name: str) -> list[int]:
        """Return the loaded versions of a model, sorted."""
        return sorted(self._versions.get(name, {}))

    def find(self, name: str, version: int = 0) -> ServedVersion | None:
        """Return a loaded version, 0 for the active one; None if it is not loaded."""
        return self._versions.get(name, {}).get(version) if version else self._current.get(name)

    def require_room(self, name: str, version: int) -> None:
        """Refuse a version beyond `MAX_VERSIONS`.

        Raises:
            ServingRefused: Two other versions of the model are loaded.
        """
        others = [other for other in self.versions(name) if other != version]
        if len(others) >= MAX_VERSIONS:
            raise ServingRefused(f"versions {others} of {name!r} are loaded, the limit is {MAX_VERSIONS}: unload one")

    def add(self, model: OpenModel, cut: CutModel | None = None) -> None:
        """Add a version without activating it; a reload of the active version takes its place."""
        manifest = model.manifest
        self.require_room(manifest.name, manifest.version)
        served = ServedVersion(model, cut=cut)
        self._versions.setdefault(manifest.name, {})[manifest.version] = served
        answering = self._current.get(manifest.name)
        if answering and answering.model.manifest.version == manifest.version:
            self._current[manifest.name] = served

    def switch(self, name: str, version: int) -> None:
        """Activate a version: it answers requests that name no version.

        Raises:
            ServingRefused: It is not loaded.
        """
        self._current[name] = self._require(name, version)

    def unload(self, name: str, version: int) -> None:
        """Remove a version; its running requests finish."""
        removed = self._versions.get(name, {}).pop(version, None)
        if removed and self._current.get(name) is removed:
            del self._current[name]

    def figures(self, name: str, version: int) -> Figures:
        """Return a version's statistics.

        Raises:
            ServingRefused: It is not loaded.
        """
        return self._require(name, version).figures()

    def _require(self, name: str, version: int) -> ServedVersion:
        served = self._versions.get(name, {}).get(version)
        if served is None:
            raise ServingRefused(f"version {version} of {name!r} is not loaded")
        return served

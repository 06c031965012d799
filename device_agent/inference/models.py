"""Models that are served: versions by name, which one answers, and how each does.

A request takes its version once, at its begin, and is answered by it whatever is switched meanwhile. A switch is one
assignment.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from device_agent.inference.messages import Figures, percentiles
from device_agent.inference.session import OpenModel
from shared.errors import InferenceRefused, ServingRefused
from shared.protocol.inference.release import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from device_agent.inference.collaborative.cut_model import CutAnswer, CutModel

KEPT_SECONDS = 1024
CUT_FIGURES, CUT_SECONDS = ("answered", "refused", "bytes_up", "bytes_down"), ("device_s", "link_s", "server_s")
NOT_FINITE = "not-finite"
OF_THE_MODEL = (NOT_FINITE, "failed")
"""Reasons of a refusal that tell of the model, not of the way to the server."""
MOST_VERSIONS = 2
"""Of a model at once: each takes twice the memory of its weights."""


@dataclass
class ServedVersion:
    """A version of a model, and how it does.

    Attributes:
        requests: That it was given.
        errors: Of them, those that it failed.
        non_finite: Of the errors, those with an output that is no number.
        seconds: Of the last requests, ONNX Runtime's alone; of a network that is cut, all that was done here.
        cut: Has the server compute the upper half; None where `model` is the whole network.
    """

    model: OpenModel
    requests: int = 0
    errors: int = 0
    non_finite: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SECONDS))
    cut: CutModel | None = None

    @property
    def output(self) -> TensorSpec:
        """What an application is given."""
        return self.cut.output if self.cut else self.model.output

    def run(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the outputs for a batch.

        Args:
            inputs: Of shape (B, ...) and the input's dtype.

        Raises:
            ServingRefused: The model failed; the inputs were not to blame.
            ValueError: An input is NaN or infinite, and so is an output.
        """
        self.requests += 1
        began = time.perf_counter()
        try:
            outputs = self.model.run(inputs)
        except ServingRefused:
            self.errors += 1
            raise
        except Exception as error:  # of ONNX Runtime's C++ code, by no common class
            self.errors += 1
            problem = str(error).strip().partition("\n")[0]
            raise ServingRefused(f"the model failed: {problem or type(error).__name__}") from error
        self.seconds.append(time.perf_counter() - began)
        if False in np.isfinite(outputs).tobytes():  # a third of the time of `.all()` where outputs are few
            if not np.isfinite(inputs).all():
                raise ValueError("the input holds numbers that are NaN or infinite")
            self.errors += 1
            self.non_finite += 1
            raise ServingRefused("the model's output is no number: NaN or infinite")
        return outputs

    async def run_cut(self, cut: CutModel, inputs: NDArray[Any]) -> CutAnswer:
        """Return what the network makes of a batch, of which the server computes the upper half.

        That the server cannot be had is no fault of the model, which is judged by its errors.

        Args:
            inputs: Of shape (B, ...) and the input's dtype.

        Raises:
            Unreachable: As `CutModel`.
            InferenceRefused: Likewise.
        """
        self.requests += 1
        try:
            answer = await cut(inputs)
        except InferenceRefused as error:
            if error.reason in OF_THE_MODEL and np.isfinite(inputs).all():
                self.errors += 1
                self.non_finite += error.reason == NOT_FINITE
            raise
        self.seconds.append(answer.parts.device_s)
        return answer

    def figures(self) -> Figures:
        """Return how it does."""
        told = self.model.manifest
        p50, p95, p99 = percentiles(self.seconds, (0.5, 0.95, 0.99))
        return Figures(
            told.name, told.version, self.requests, self.errors, self.non_finite, p50_s=p50, p95_s=p95, p99_s=p99
        )


def statistics(served: ServedVersion) -> dict[str, Any]:
    """Return how a version does, as Triton's statistics extension names it; of a network that is cut, part by part."""
    figures, cut = served.figures(), served.cut
    about: dict[str, Any] = {name: getattr(figures, name) for name in ("errors", "p50_s", "p95_s", "p99_s")}
    if served.model.own:
        about["own_model"] = served.model.own
    if cut:
        parts: dict[str, Any] = {name: getattr(cut.figures, name) for name in CUT_FIGURES}
        for name in CUT_SECONDS:
            p50, p95, p99 = percentiles([getattr(one, name) for one in cut.figures.recent], (0.5, 0.95, 0.99))
            parts[name] = {"p50": p50, "p95": p95, "p99": p99}
        about["cut"] = parts
    return {
        "name": figures.name,
        "version": str(figures.version),
        "inference_count": figures.requests - figures.errors,
        "parameters": about,
    }


class ServedModels:
    """All that is served."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[int, ServedVersion]] = {}
        self._current: dict[str, ServedVersion] = {}

    def names(self) -> list[str]:
        """Return the models of which a version answers."""
        return sorted(self._current)

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that are loaded."""
        return sorted(self._versions.get(name, {}))

    def find(self, name: str, version: int = 0) -> ServedVersion | None:
        """Return a version of a model, 0 for the one that answers; None where it is not loaded."""
        return self._versions.get(name, {}).get(version) if version else self._current.get(name)

    def require_room(self, name: str, version: int) -> None:
        """Refuse a version that there would be no place for.

        Raises:
            ServingRefused: Two others of the model are loaded.
        """
        others = [one for one in self.versions(name) if one != version]
        if len(others) >= MOST_VERSIONS:
            raise ServingRefused(f"versions {others} of {name!r} are loaded, and no more than two may be: unload one")

    def add(self, model: OpenModel, cut: CutModel | None = None) -> None:
        """Take a version beside those there are; nobody who names none is answered by it yet."""
        told = model.manifest
        self.require_room(told.name, told.version)
        served = ServedVersion(model, cut=cut)
        self._versions.setdefault(told.name, {})[told.version] = served
        answering = self._current.get(told.name)
        if answering and answering.model.manifest.version == told.version:
            self._current[told.name] = served

    def switch(self, name: str, version: int) -> None:
        """Have a version answer who names none.

        Raises:
            ServingRefused: It is not loaded.
        """
        self._current[name] = self._require(name, version)

    def unload(self, name: str, version: int) -> None:
        """Forget a version; what it is computing it still answers."""
        gone = self._versions.get(name, {}).pop(version, None)
        if gone and self._current.get(name) is gone:
            del self._current[name]

    def figures(self, name: str, version: int) -> Figures:
        """Return how a version does.

        Raises:
            ServingRefused: It is not loaded.
        """
        return self._require(name, version).figures()

    def _require(self, name: str, version: int) -> ServedVersion:
        found = self._versions.get(name, {}).get(version)
        if found is None:
            raise ServingRefused(f"version {version} of {name!r} is not loaded")
        return found

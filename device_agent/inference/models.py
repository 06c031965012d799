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
from shared.errors import ServingRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEPT_SECONDS = 1024
MOST_VERSIONS = 2
"""Of a model at once: each takes twice the memory of its weights."""


@dataclass
class ServedVersion:
    """A version of a model, and how it does.

    Attributes:
        model: It.
        requests: That it was given.
        errors: Of them, those that it failed.
        non_finite: Of the errors, those with an output that is no number.
        seconds: Of the last requests, ONNX Runtime's alone.
    """

    model: OpenModel
    requests: int = 0
    errors: int = 0
    non_finite: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SECONDS))

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
        except Exception as error:  # of ONNX Runtime's C++ code, by no common class
            self.errors += 1
            problem = str(error).strip().partition("\n")[0]
            raise ServingRefused(f"the model failed: {problem or type(error).__name__}") from error
        self.seconds.append(time.perf_counter() - began)
        if not np.isfinite(outputs).all():
            if not np.isfinite(inputs).all():
                raise ValueError("the input holds numbers that are NaN or infinite")
            self.errors += 1
            self.non_finite += 1
            raise ServingRefused("the model's output is no number: NaN or infinite")
        return outputs

    def figures(self) -> Figures:
        """Return how it does."""
        told = self.model.manifest
        p50, p95, p99 = percentiles(self.seconds, (0.5, 0.95, 0.99))
        return Figures(
            told.name, told.version, self.requests, self.errors, self.non_finite, p50_s=p50, p95_s=p95, p99_s=p99
        )


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
        """Return a version of a model, 0 for the one that answers; None where it is not loaded.

        Args:
            name: Of the model.
            version: Of it.
        """
        return self._versions.get(name, {}).get(version) if version else self._current.get(name)

    def require_room(self, name: str, version: int) -> None:
        """Refuse a version that there would be no place for.

        Raises:
            ServingRefused: Two others of the model are loaded.
        """
        others = [one for one in self.versions(name) if one != version]
        if len(others) >= MOST_VERSIONS:
            raise ServingRefused(f"versions {others} of {name!r} are loaded, and no more than two may be: unload one")

    def add(self, model: OpenModel) -> None:
        """Take a version beside those there are; nobody who names none is answered by it yet."""
        told = model.manifest
        self.require_room(told.name, told.version)
        served = ServedVersion(model)
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

"""An inference process as a swap sees it, in memory: what is loaded, what answers, and figures as a test sets them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from device_agent.inference.messages import Figures
from shared.errors import ServingDied, ServingRefused

MOST_VERSIONS = 2


@dataclass
class MemoryServing:
    """Serves names.

    Attributes:
        starts: Of the process.
        loaded: Versions by name.
        current: What answers, by name.
        figures_of: How versions do.
        refused: Versions that it cannot load.
        dying: How often it dies yet of what it is asked.
        asked: All that it was asked, in order.
    """

    starts: int = 1
    loaded: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    current: dict[str, int] = field(default_factory=dict)
    figures_of: dict[int, Figures] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    dying: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)

    def _hear(self, what: str, version: int) -> None:
        self.asked.append((what, version))
        if self.dying:
            self.dying -= 1
            self.starts += 1
            raise ServingDied("the inference process ended")

    async def load(self, name: str, version: int) -> None:
        self._hear("load", version)
        if version in self.refused:
            raise ServingRefused("it has no room for it")
        self.loaded[name].add(version)
        assert len(self.loaded[name]) <= MOST_VERSIONS

    async def switch(self, name: str, version: int) -> None:
        self._hear("switch", version)
        self._require(name, version)
        self.current[name] = version

    async def unload(self, name: str, version: int) -> None:
        self._hear("unload", version)
        self.loaded[name].discard(version)
        if self.current.get(name) == version:
            del self.current[name]

    async def figures(self, name: str, version: int) -> Figures:
        self._require(name, version)
        return self.figures_of.get(version, Figures(name, version))

    def _require(self, name: str, version: int) -> None:
        if version not in self.loaded[name]:
            raise ServingRefused(f"version {version} of {name} is not loaded")

"""The releases of a board at work: what it serves from its start, and what rollouts bring while it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from device_agent.exchange.download import Download
from device_agent.exchange.release_offers import ReleaseOffers
from device_agent.inference.candidate import Gates, Serving, Surroundings
from device_agent.inference.messages import Figures
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.inference.release import write_manifest
from shared.runtime import backports
from shared.runtime.distributions import installed_version
from shared.runtime.executor import background

log = logging.getLogger(__name__)

FIGURES_S = 2.0
"""For the inference process to say how a version does; what it does not say then is told the next time."""
HEALTH = ("requests", "errors", "non_finite", "p50_s", "p95_s", "p99_s")


@dataclass(frozen=True)
class BoardFiles:
    """Where the files of a release lie on a board: in its store, or in a folder that its operator named.

    Attributes:
        folders: By the names of their models.
    """

    store: BoardStore
    folders: Mapping[str, ReleaseFiles]

    def find(self, name: str, number: int) -> ReleaseFiles:
        """Return the files of a version.

        Raises:
            ConfigError: There is none.
            CorruptFile: A part of it is gone, or its manifest is damaged.
        """
        if number in self.store.versions(name):
            return self._stored(name, number)
        one = self.folders.get(name)
        if one is None or one.version != number:
            raise ConfigError(f"neither a rollout nor a folder of serve.releases brought {name}/{number}")
        return one

    def _stored(self, name: str, number: int) -> ReleaseFiles:
        manifest = self.store.manifest(name, number)
        if missing := self.store.missing(manifest):
            raise CorruptFile(f"{manifest.reference}: {', '.join(sorted(missing))} is gone from this board")
        parts = {one: self.store.path(part.sha256) for one, part in manifest.parts.items()}
        return ReleaseFiles(name, number, write_manifest(manifest), parts)

    def served(self) -> dict[str, ReleaseFiles]:
        """Return what is to answer from the start: what rollouts brought, and what only folders have."""
        found = dict(self.folders)
        for name in self.store.names():
            with suppress(ConfigError, CorruptFile):  # the swap says so
                record = self.store.record(name)
                for number in (record.serving, record.committed, record.previous):
                    if number and (one := self._whole(name, number)):
                        found[name] = one
                        break
        return found

    def _whole(self, name: str, number: int) -> ReleaseFiles | None:
        try:
            return self._stored(name, number)
        except (ConfigError, CorruptFile) as error:
            log.warning("not served: %s", error)
            return None


class BoardReleases:
    """A board's part in rollouts: its offers, its swap, and how what it serves does.

    Args:
        download: Fetches parts, on the channels of releases.
        gates: Try a release out.
        instance: That of the process's Status.
        folders: Versions that an operator's folders have, by the names of their models.
    """

    def __init__(
        self,
        download: Download,
        store: BoardStore,
        serving: Serving,
        gates: Gates,
        instance: str,
        folders: Mapping[str, int],
    ) -> None:
        self._serving = serving
        self._offers = ReleaseOffers(
            *(download, store), runtime=runtime_version(), instance=instance, health=self._health, folders=folders
        )

        def has_folder(name: str, version: int) -> bool:
            return folders.get(name, version) != version

        self._swap = Swaps(Surroundings(store, serving, gates, self._offers.announce, has_folder=has_folder))
        self._offers.swap = self._swap

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        async with background(self._swap.run()):
            await self._offers.run()

    async def _health(self, name: str, number: int) -> dict[str, float]:
        """Return how a version does; nothing where nobody says so soon."""
        found = Figures(name, number)
        with suppress(FieldFleetError, TimeoutError):
            async with backports.timeout(FIGURES_S):
                found = await self._serving.figures(name, number)
        return {one: float(getattr(found, one)) for one in HEALTH} if found.requests else {}


def runtime_version() -> str:
    """Return the version of ONNX Runtime that is installed here, without importing it; empty for none."""
    return installed_version("onnxruntime", "onnxruntime-gpu")
